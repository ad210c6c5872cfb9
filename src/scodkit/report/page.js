"use strict";

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const plots = [];
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
  for (const renderer of plot.renderers) if (renderer.name?.startsWith("click:")) chooses(renderer);
  plots.push(plot);
  place.dataset.drawn = "true";
}

/* Charts with the same tag keep the same horizontal range. */
function link(tag) {
  const linked = plots.filter((plot) => plot.tags?.includes(tag)).map((plot) => plot.x_range);
  for (const range of linked) {
    const follow = () => linked.forEach((other) => {
      if (other.start !== range.start || other.end !== range.end) other.setv({ start: range.start, end: range.end });
    });
    for (const end of ["start", "end"]) range.properties[end].change.connect(follow);
  }
}

/* --- Inputs that are shown ------------------------------------------------------------------ */

const inputs = document.querySelectorAll("#inputs li[data-set], #inputs tr[data-set]");
const field = (name) => document.getElementById(`filter-${name}`);

function isChosen(item, show, chosen) {
  const own = item.dataset, score = Number(own.score);
  if (chosen.set && own.set !== chosen.set) return false;
  if (chosen.class && own.kind !== chosen.class) return false;
  if (score < chosen.from || score > chosen.to) return false;
  return { alarms: own.alarm === "1", "no alarm": own.alarm === "0", mistakes: own.wrong === "1" }[show] ?? true;
}

function choose(said = "") {
  const show = field("show").value;
  const chosen = { set: field("set")?.value, class: field("class")?.value };
  chosen.from = field("from").value === "" ? -Infinity : Number(field("from").value);
  chosen.to = field("to").value === "" ? Infinity : Number(field("to").value);
  const few = show === field("show").options[0].value && !chosen.set && !chosen.class
    && chosen.from === -Infinity && chosen.to === Infinity;
  const counts = { LI: 0, TR: 0 };
  for (const item of inputs) {
    const extra = item.dataset.extra === "1" || item.closest(".pictures-of")?.dataset.extra === "1";
    item.hidden = few ? extra : !isChosen(item, show, chosen);
    counts[item.tagName] += !item.hidden;
  }
  for (const row of document.querySelectorAll(".pictures-of")) row.hidden = !row.querySelector("li:not([hidden])");
  field("says").textContent = few ? "" : `${said}${counts.TR} listed below, ${counts.LI} of them with a picture.`;
}

if (field("show")) {
  const all = ["show", "set", "class", "from", "to"].map(field).filter(Boolean);
  for (const one of all) one.addEventListener("input", () => choose());
  field("reset").addEventListener("click", () => {
    for (const one of all) if (one.tagName === "SELECT") one.selectedIndex = 0; else one.value = "";
    choose();
  });
}

/* A bar that is pressed stands for inputs: of one set, between two scores. */
let pressed = [];
function chooses(renderer) {
  const source = renderer.data_source;
  source.selected.properties.indices.change.connect(() => {
    const [index] = source.selected.indices;
    if (index === undefined || !field("show")) return;
    const bar = Object.fromEntries(["set", "left", "right", "count"].map((name) => [name, source.get(name)[index]]));
    source.selected.indices = [];
    if (bar.count) pressed.push(bar);
    setTimeout(() => {
      if (!pressed.length) return;
      const sets = new Set(pressed.map((one) => one.set));
      if (field("set")) field("set").value = sets.size === 1 ? bar.set : "";
      if (field("class")) field("class").value = "";
      field("show").value = "all";
      field("from").value = bar.left;
      field("to").value = bar.right;
      choose(pressed.map((one) => `${one.count} of ${one.set}`).join(" and ") + " have scores in this range: ");
      pressed = [];
      document.getElementById("inputs").scrollIntoView();
    });
  });
}

/* --- Another threshold ---------------------------------------------------------------------- */

const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;

function slide(slider) {
  const range = document.getElementById("threshold"), at = Number(range.value), step = slider.steps[at];
  const words = `${step.toPrecision(3)} nats${slider.says?.[at] ?? ""}`;
  document.getElementById("threshold-says").textContent = words;
  range.setAttribute("aria-valuetext", words);
  const rows = document.querySelectorAll(".slider tbody tr");
  const shares = slider.sets.map((one) => one.counts[at] / one.inputs);
  slider.sets.forEach((one, i) => {
    rows[i].querySelector("[data-count]").textContent = one.counts[at];
    rows[i].querySelector("[data-share]").textContent = percent(shares[i]);
    rows[i].querySelector("[data-ends]").textContent = `${(100 * one.low[at]).toFixed(1)} to ${percent(one.high[at])}`;
  });
  const named = (name) => plots.flatMap((plot) => [...plot.renderers, ...plot.center]).filter((part) => part.name === name);
  for (const line of named("threshold")) line.data_source.data = { ...line.data_source.data, x: [step, step] };
  for (const label of named("threshold-label")) label.setv({ x: step, text: `alarm above ${step.toPrecision(3)}` });
  const known = slider.sets.filter((one) => one.known);
  const total = known.reduce((sum, one) => sum + one.inputs, 0);
  const wrong = known.reduce((sum, one) => sum + one.counts[at], 0) / total;
  slider.sets.filter((one) => !one.known).forEach((one, i) => {
    for (const dot of named(`operating:${i}`)) dot.data_source.data = { ...dot.data_source.data, x: [wrong], y: [one.counts[at] / one.inputs] };
  });
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

const { plots: items, slider } = JSON.parse(document.getElementById("data").textContent);
if (slider) slide(slider);

(async () => {
  for (const item of items) await draw(item);
  link("link:stream");
  if (!slider) return;
  const range = document.getElementById("threshold");
  range.addEventListener("input", () => slide(slider));
  document.getElementById("threshold-reset").addEventListener("click", () => {
    range.value = slider.start;
    slide(slider);
  });
})();
