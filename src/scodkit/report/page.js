"use strict";

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const coarse = window.matchMedia("(pointer: coarse)");

/* Colours come from the style sheet, so that light and dark are stated once. */
function colour(role) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${role}`).trim();
}

function paint(plot) {
  for (const model of plot.references()) {
    for (const tag of model.tags ?? []) {
      const [part, role] = String(tag).split(":");
      model[`${part}_color`] = colour(role);
    }
    if (model.type?.endsWith("Axis")) {
      model.axis_line_color = model.major_tick_line_color = colour("soft");
      model.major_label_text_color = model.axis_label_text_color = colour("soft");
    }
    if (model.type === "Grid") model.grid_line_color = colour("rule");
  }
}

/* Moves a range by a share of its length, or shrinks it about its middle. */
function shift(range, scale, by, zoom) {
  const there = scale === "LogScale" ? Math.log10 : (x) => x;
  const back = scale === "LogScale" ? (x) => 10 ** x : (x) => x;
  const start = there(range.start), end = there(range.end), length = end - start;
  const middle = (start + end) / 2 + by * length, half = (length * zoom) / 2;
  range.setv({ start: back(middle - half), end: back(middle + half) });
}

const MOVES = {
  ArrowLeft: [-0.15, 0, 1], ArrowRight: [0.15, 0, 1],
  ArrowUp: [0, 0.15, 1], ArrowDown: [0, -0.15, 1],
  "+": [0, 0, 0.7], "=": [0, 0, 0.7], "-": [0, 0, 1 / 0.7],
};

function listen(place, plot) {
  const first = [plot.x_range, plot.y_range].map((r) => ({ start: r.start, end: r.end }));
  place.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "0") {
      plot.x_range.setv(first[0]);
      plot.y_range.setv(first[1]);
    } else if (event.key in MOVES) {
      const [x, y, zoom] = MOVES[event.key];
      shift(plot.x_range, plot.x_scale.type, x, zoom);
      shift(plot.y_range, plot.y_scale.type, y, zoom);
    } else {
      return;
    }
    event.preventDefault();
  });
}

function descend(root, visit) {
  for (const element of root.querySelectorAll("*")) {
    visit(element);
    if (element.shadowRoot) descend(element.shadowRoot, visit);
  }
}

async function draw(item) {
  const place = document.getElementById(item.target_id);
  await Bokeh.embed.embed_item(item);
  const plot = Bokeh.documents.at(-1).roots()[0];
  paint(plot);
  dark.addEventListener("change", () => paint(plot));
  listen(place, plot);
  /* a finger on a chart scrolls the page until a tool is chosen */
  if (coarse.matches) for (const tool of plot.toolbar.tools) if ("active" in tool) tool.active = tool.type === "HoverTool";
  /* one stop for the Tab key, with a name, in place of bokeh's own without one */
  descend(place, (element) => { if (element.classList.contains("bk-events")) element.tabIndex = -1; });
  place.dataset.drawn = "true";
}

function key(row, column) {
  const cell = row.cells[column];
  const order = cell.dataset.order;
  return order === undefined ? cell.textContent.trim() : Number(order);
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, { numeric: true });
}

/* Numbers from the largest first, words from A; blank cells stay last. */
function sort(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const before = heads[column].getAttribute("aria-sort");
  const natural = heads[column].classList.contains("number") ? "descending" : "ascending";
  const opposite = natural === "ascending" ? "descending" : "ascending";
  const now = before === natural ? opposite : natural;
  heads.forEach((head, i) => head.setAttribute("aria-sort", i === column ? now : "none"));
  const sign = now === "ascending" ? 1 : -1;
  const rows = [...table.tBodies[0].rows].map((row) => [key(row, column), row]);
  rows.sort(([a], [b]) => (a === "") - (b === "") || sign * compare(a, b));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sort(table, column));
  });
}

(async () => {
  for (const item of JSON.parse(document.getElementById("plots").textContent)) await draw(item);
})();
