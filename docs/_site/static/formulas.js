// Formulas of a page, drawn by KaTeX; it writes MathML beside them for screen readers.
for (const place of document.querySelectorAll(".math")) {
  katex.render(place.textContent, place, {
    displayMode: place.tagName === "DIV",
    throwOnError: false,
  });
  // long ones scroll, by the keyboard, too
  if (place.scrollWidth > place.clientWidth && place.tagName === "DIV") place.tabIndex = 0;
}
