"use strict";
// Code from text is forbidden on pages of runs, and so are styles that a script adds.
const OPTIONS = { actions: false, renderer: "svg", ast: true, defaultStyle: false, tooltip: { disableDefaultStyle: true } };
const NUMBERS = new Set(["step", "value", "low", "high", "seconds", "start", "end", "ms"]);
const SECOND = 1000;
// Between two requests while the server reads a long run.
const READING_PAUSE = 50;
const isLive = document.body.dataset.version !== undefined;
const holder = document.getElementById("charts");
const specs = new Map(Object.entries(holder ? JSON.parse(holder.textContent) : {}));
const drawn = new WeakMap();

// Sections with a heading of their own are what the list at the top leads to.
function listSections() {
  const list = document.getElementById("sections");
  list.replaceChildren();
  for (const section of document.querySelectorAll("main > section")) {
    const link = document.createElement("a");
    link.href = "#" + section.id;
    link.textContent = section.querySelector("h2").textContent;
    list.appendChild(document.createElement("li")).appendChild(link);
  }
}

// The rows of a chart as text, and all else of it.
function partsOf(spec) {
  const { datasets, ...rest } = spec;
  const [name] = Object.keys(datasets);
  return { rows: datasets[name], shape: JSON.stringify(rest).replaceAll(name, "rows") };
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
  if (!spec || element.closest("details:not([open])")) return;
  const parts = partsOf(spec), before = drawn.get(element);
  if (before && before.rows === parts.rows && before.shape === parts.shape) return;
  drawn.set(element, { ...parts, view: before && before.view });
  if (before && before.view && before.shape === parts.shape) {
    await before.view.data("rows", rowsOf(parts.rows)).runAsync();
    return;
  }
  // Keeps the page from jumping while the chart is drawn anew.
  if (before) element.style.minHeight = element.offsetHeight + "px";
  const whole = { ...JSON.parse(parts.shape), datasets: { rows: rowsOf(parts.rows) } };
  delete whole.data.format;
  const { view } = await vegaEmbed(element, whole, OPTIONS);
  drawn.set(element, { ...parts, view });
  element.querySelector("svg").setAttribute("aria-label", spec.description);
}

async function drawAll(root) {
  for (const element of root.querySelectorAll(".chart")) {
    await draw(element);
    await new Promise((resume) => setTimeout(resume));
  }
}

// Live pages draw what is in view, and ask for that alone.
const inView = new Set();
let drawing = Promise.resolve();
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) isIntersecting ? inView.add(target) : inView.delete(target);
  drawing = drawVisible();
}, { rootMargin: "200px" });

async function drawVisible() {
  const elements = [...inView].filter((element) => element.isConnected);
  const wanted = elements.map((element) => element.dataset.chart).filter((name) => !specs.has(name));
  if (wanted.length) {
    const answer = await fetch("charts?names=" + encodeURIComponent(wanted.join(",")));
    for (const [name, spec] of Object.entries(await answer.json())) specs.set(name, spec);
  }
  for (const element of elements) await draw(element);
}

function watchCharts() {
  for (const element of document.querySelectorAll(".chart")) watcher.observe(element);
}

// A section that has changed takes the place of the one before; its drawn charts and opened parts stay as they are.
function takeOver(old, fresh) {
  for (const chart of fresh.querySelectorAll(".chart")) {
    const before = [...old.querySelectorAll(".chart")].find((element) => element.dataset.chart === chart.dataset.chart);
    if (before) chart.replaceWith(before);
  }
  const open = new Set([...old.querySelectorAll("details[open] > summary")].map((element) => element.textContent));
  for (const part of fresh.querySelectorAll("details")) {
    part.open = part.open || open.has(part.querySelector("summary").textContent);
  }
  old.replaceWith(fresh);
}

const texts = new Map();
function update(text) {
  // A parsed document runs nothing; every value in it was escaped by the server.
  const page = new DOMParser().parseFromString(text, "text/html");
  document.title = page.title;
  document.body.dataset.version = page.body.dataset.version;
  document.querySelector("header").replaceChildren(...page.querySelector("header").childNodes);
  const old = document.getElementById("content"), names = new Set();
  let last = null;
  for (const section of [...page.querySelectorAll("main > section")]) {
    names.add(section.id);
    const before = document.getElementById(section.id), markup = section.innerHTML;
    const fresh = document.importNode(section, true);
    if (!before) last ? last.after(fresh) : old.prepend(fresh);
    else if (texts.get(section.id) !== markup) takeOver(before, fresh);
    texts.set(section.id, markup);
    last = document.getElementById(section.id);
  }
  for (const section of [...old.children]) if (!names.has(section.id)) section.remove();
  listSections();
  watchCharts();
}

const after = (pause) => new Promise((resume) => setTimeout(resume, pause));

async function follow() {
  // The first charts are drawn before the server reads on; a hidden page has no frames.
  await Promise.race([new Promise((resume) => requestAnimationFrame(() => setTimeout(resume))), after(SECOND)]);
  await drawing.catch(() => {});
  for (;;) {
    let pause = SECOND;
    try {
      const answer = await fetch("?since=" + encodeURIComponent(document.body.dataset.version));
      if (answer.status === 200) {
        update(await answer.text());
        specs.clear();
        await drawVisible();
      }
      // The run's metrics are still being read.
      if (document.getElementById("freshness").textContent) pause = READING_PAUSE;
    } catch (error) {
      document.getElementById("freshness").textContent = "not connected: `rlinf report --live` has ended";
      pause = 5 * SECOND;
    }
    await after(pause);
  }
}

listSections();
if (isLive) {
  for (const section of document.querySelectorAll("main > section")) texts.set(section.id, section.innerHTML);
  watchCharts();
  follow();
} else {
  drawAll(document).then(() => { document.body.dataset.drawn = "yes"; });
  for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", () => drawAll(part));
}
