"use strict";
// Sections with a heading of their own are what the list at the top leads to.
for (const section of document.querySelectorAll("main > section")) {
  const link = document.createElement("a");
  link.href = "#" + section.id;
  link.textContent = section.querySelector("h2").textContent;
  document.getElementById("sections").appendChild(document.createElement("li")).appendChild(link);
}
const holder = document.getElementById("charts");
const specs = holder ? JSON.parse(holder.textContent) : {};
async function draw(element) {
  // A closed part has no width to draw in.
  if (element.dataset.drawn || element.closest("details:not([open])")) return;
  element.dataset.drawn = "yes";
  const spec = specs[element.dataset.chart];
  await vegaEmbed(element, spec, { actions: false, renderer: "svg" });
  element.querySelector("svg").setAttribute("aria-label", spec.description);
}
async function drawAll(root) {
  for (const element of root.querySelectorAll(".chart")) {
    await draw(element);
    await new Promise((resume) => setTimeout(resume));
  }
}
const drawn = drawAll(document).then(() => { document.body.dataset.drawn = "yes"; });
for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", () => drawAll(part));
const renew = document.getElementById("renew");
if (renew) setInterval(() => { if (renew.checked) location.reload(); }, 15000);
