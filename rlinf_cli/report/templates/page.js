"use strict";
// Code from text is forbidden on pages of runs, and so are styles that a script adds.
const OPTIONS = { actions: false, renderer: "svg", ast: true, defaultStyle: false, tooltip: { disableDefaultStyle: true } };
const NUMBERS = new Set(["step", "value", "low", "high", "seconds"]);
const holder = document.getElementById("charts");
const specs = new Map(Object.entries(holder ? JSON.parse(holder.textContent) : {}));
const drawn = new Set();

// Sections with a heading of their own are what the list at the top leads to.
function listSections() {
  const list = document.getElementById("sections");
  for (const section of document.querySelectorAll("main > section")) {
    const link = document.createElement("a");
    link.href = "#" + section.id;
    link.textContent = section.querySelector("h2").textContent;
    list.appendChild(document.createElement("li")).appendChild(link);
  }
}

// Vega's own reader of CSV makes code from text.
function rowsOf(text) {
  const lines = [];
  for (const line of text.trimEnd().matchAll(/(?:"(?:[^"]|"")*"|[^"\n])+/g)) {
    const cells = [...line[0].matchAll(/(?:^|,)(?:"((?:[^"]|"")*)"|([^,]*))/g)];
    lines.push(cells.map(([, quoted, bare]) => (quoted === undefined ? bare : quoted.replaceAll('""', '"'))));
  }
  const [heads, ...rest] = lines;
  const value = (name, cell) => (NUMBERS.has(name) ? (cell === "" ? null : Number(cell)) : cell);
  return rest.map((cells) => Object.fromEntries(heads.map((name, place) => [name, value(name, cells[place])])));
}

async function draw(element) {
  const spec = specs.get(element.dataset.chart);
  // A closed part has no width to draw in.
  if (!spec || drawn.has(element) || element.closest("details:not([open])")) return;
  drawn.add(element);
  const { format, ...data } = spec.data;
  await vegaEmbed(element, { ...spec, data, datasets: { rows: rowsOf(spec.datasets.rows) } }, OPTIONS);
  element.querySelector("svg").setAttribute("aria-label", spec.description);
}

async function drawAll(root) {
  for (const element of root.querySelectorAll(".chart")) {
    await draw(element);
    await new Promise((resume) => setTimeout(resume));
  }
}

listSections();
drawAll(document).then(() => { document.body.dataset.drawn = "yes"; });
for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", () => drawAll(part));
