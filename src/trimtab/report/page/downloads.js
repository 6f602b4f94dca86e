// Tables as CSV, heat maps as PNG, charts as SVG, the result as JSON, in files named after page and figure.
function save(blob, kind, title) {
  const link = document.createElement("a"), words = `${document.title} ${title}`.toLowerCase().match(/[a-z0-9]+/g);
  link.download = `${words.join("-").slice(0, 120)}.${kind}`;
  link.href = URL.createObjectURL(blob);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

function offer(after, kind, title, blobOf) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "save";
  button.textContent = kind.toUpperCase();
  button.setAttribute("aria-label", `Download ${title} as ${kind.toUpperCase()}`);
  button.addEventListener("click", async () => save(await blobOf(), kind, title));
  after.after(button);
}

// A cell without what a row is about. Names come from users' files: a spreadsheet must not take them for formulas.
function csvCell(cell) {
  const copy = cell.cloneNode(true);
  copy.querySelector(".about")?.remove();
  const text = copy.textContent.trim(), risky = /^[=+@\t\r]|^-(?![\d.])/.test(text);
  return `"${(risky ? `'${text}` : text).replaceAll('"', '""')}"`;
}

for (const table of document.querySelectorAll("main table")) {
  if (!table.caption) continue;
  const rows = () => [...table.rows].map((row) => [...row.cells].map(csvCell).join(","));
  const title = table.caption.textContent.trim();
  offer(table.parentElement, "csv", title, () => new Blob(["\ufeff", rows().join("\r\n"), "\r\n"], { type: "text/csv" }));
}
// With the page's ground: texts of a dark page could not be read without it.
function pictureOf(canvas) {
  const copy = document.createElement("canvas"), context = copy.getContext("2d");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  context.fillStyle = colourOf("var(--ground)");
  context.fillRect(0, 0, copy.width, copy.height);
  context.drawImage(canvas, 0, 0);
  return new Promise((done) => copy.toBlob(done));
}

// A chart with its title and legend, and with the styles that the page gives it.
const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "font-size"];
function drawingOf(figure) {
  const shown = figure.querySelector("svg"), { width, height } = shown.viewBox.baseVal;
  const copy = shown.cloneNode(true), lines = [...figure.querySelectorAll("figcaption b, .legend li")];
  const originals = [...shown.querySelectorAll("*")];
  [...copy.querySelectorAll("*")].forEach((element, index) => {
    const style = getComputedStyle(originals[index]);
    for (const name of STYLES) element.style.setProperty(name, style.getPropertyValue(name));
  });
  const add = (name, attributes, text = "") => {
    const element = document.createElementNS(copy.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    copy.prepend(element);
  };
  const top = -20 * lines.length, ink = colourOf("var(--ink)");
  lines.forEach((line, index) => {
    const y = top + 15 + 20 * index, key = line.querySelector("i");
    add("text", { x: key ? 26 : 10, y, fill: ink, "font-size": 12, "font-weight": key ? 400 : 600 }, line.textContent);
    if (key) add("rect", { x: 10, y: y - 9, width: 10, height: 10, fill: getComputedStyle(key).backgroundColor });
  });
  add("rect", { x: 0, y: top, width, height: height - top, fill: colourOf("var(--ground)") });
  const size = { viewBox: `0 ${top} ${width} ${height - top}`, width, height: height - top };
  for (const [key, value] of Object.entries(size)) copy.setAttribute(key, value);
  copy.setAttribute("font-family", "system-ui, sans-serif");
  return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
}

for (const canvas of document.querySelectorAll("main figure canvas")) {
  const title = canvas.getAttribute("aria-label").split(". ")[0];
  offer(canvas.parentElement, "png", title, () => pictureOf(canvas));
}
for (const figure of document.querySelectorAll("main .chart")) {
  const drawing = figure.querySelector("svg");
  offer(drawing, "svg", drawing.getAttribute("aria-label"), () => drawingOf(figure));
}
if (byId("result")) {
  const json = () => new Blob([byId("result").textContent], { type: "application/json" });
  offer(document.querySelector("header nav"), "json", "all figures", json);
}
