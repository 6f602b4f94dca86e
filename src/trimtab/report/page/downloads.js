// Tables as CSV and heat maps as PNG, in files named after page and figure.
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
for (const canvas of document.querySelectorAll("main figure canvas")) {
  const title = canvas.getAttribute("aria-label").split(/[.:]/)[0];
  offer(canvas.parentElement, "png", title, () => new Promise((done) => canvas.toBlob(done)));
}
