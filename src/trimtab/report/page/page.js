// Colour scheme; redraws when it or the width changes.
const root = document.documentElement, toggle = byId("theme");
const SCHEMES = { auto: "Auto", light: "Light", dark: "Dark" };
const redraw = () => redraws.forEach((draw) => draw());

function setScheme(scheme) {
  if (scheme === "auto") delete root.dataset.theme;
  else root.dataset.theme = scheme;
  toggle.textContent = SCHEMES[scheme];
  toggle.setAttribute("aria-label", `${SCHEMES[scheme]} colour scheme`);
}
toggle.addEventListener("click", () => {
  const names = Object.keys(SCHEMES);
  const next = names[(names.indexOf(root.dataset.theme ?? "auto") + 1) % names.length];
  setScheme(next);
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

// A print is light, as wide as paper and complete: `data-printing` gives the layout its width before the print media do.
let schemeBefore = "auto", closed = [];
addEventListener("beforeprint", () => {
  schemeBefore = root.dataset.theme ?? "auto";
  root.dataset.printing = "";
  setScheme("light");
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((details) => (details.open = true));
  redraw();
});
addEventListener("afterprint", () => {
  delete root.dataset.printing;
  setScheme(schemeBefore);
  closed.forEach((details) => (details.open = false));
  redraw();
});

let width = root.clientWidth;
addEventListener("resize", () => {
  if (width === root.clientWidth) return;
  width = root.clientWidth;
  redraw();
});

if (!window.DecompressionStream) {
  const note = document.createElement("p");
  note.className = "note";
  note.textContent = "Heat maps and the timeline need a browser of 2023 or later; all tables are shown without it.";
  byId("main").prepend(note);
  root.dataset.ready = "";
  return;
}
await unpackAll([...report.maps, ...report.grids].map((part) => part.array));
if (report.maps.length) startHeatMap();
for (const figure of document.querySelectorAll("[data-grid]")) startGrid(figure);
root.dataset.ready = "";
await unpackAll(report.timelines.flatMap(({ arrays }) => Object.values(arrays)));
if (report.timelines.length) startTimeline();
