// Colour scheme; redraws when it or the width changes.
const root = document.documentElement, toggle = byId("theme");
const SCHEMES = { auto: ["Auto", "as the system"], light: ["Light", "light"], dark: ["Dark", "dark"] };
const redraw = () => redraws.forEach((draw) => draw());

function setScheme(scheme) {
  if (scheme === "auto") delete root.dataset.theme;
  else root.dataset.theme = scheme;
  const [text, spoken] = SCHEMES[scheme];
  toggle.textContent = text;
  toggle.setAttribute("aria-label", `Colour scheme: ${spoken}`);
}
toggle.addEventListener("click", () => {
  const names = Object.keys(SCHEMES);
  const next = names[(names.indexOf(root.dataset.theme ?? "auto") + 1) % names.length];
  setScheme(next);
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

let schemeBefore = "auto";
addEventListener("beforeprint", () => {
  schemeBefore = root.dataset.theme ?? "auto";
  setScheme("light");
  redraw();
});
addEventListener("afterprint", () => {
  setScheme(schemeBefore);
  redraw();
});

let width = root.clientWidth;
addEventListener("resize", () => {
  if (width === root.clientWidth) return;
  width = root.clientWidth;
  redraw();
});
root.dataset.ready = "";
