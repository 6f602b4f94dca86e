// Shared by all scripts: the report's values, colours of the current scheme, numbers as text.
const report = JSON.parse(document.getElementById("report").textContent);
const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const redraws = [];
const isPrinting = () => "printing" in document.documentElement.dataset;

// Integer arrays: differences, byte planes, deflate, base64; see `page_arrays.py`.
const unpacked = new Map();
async function unpack({ id, count, bytes }) {
  const element = byId(id);
  const packed = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  element.remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const values = new Float64Array(count);
  let last = 0;
  for (let i = 0; i < count; i++) {
    let coded = 0;
    for (let plane = bytes - 1; plane >= 0; plane--) coded = coded * 256 + planes[plane * count + i];
    last += coded % 2 ? -(coded + 1) / 2 : coded / 2;
    values[i] = last;
  }
  unpacked.set(id, values);
}
const unpackAll = (parts) => Promise.all(parts.map(unpack));
const array = ({ id }) => unpacked.get(id);

function colourOf(expression) {
  const probe = document.createElement("span");
  probe.style.color = expression;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const ratioText = (value) => (Number.isFinite(value) ? value.toFixed(2) : "–");
// Three digits, in a unit that fits `span`, but none below the resolution `tick`.
function secondsText(seconds, tick, span = seconds) {
  const scale = Math.abs(span);
  const [factor, unit] = scale >= 1 ? [1, "s"] : scale >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const value = seconds * factor, known = Math.max(0, Math.ceil(-Math.log10(tick * factor) - 1e-9));
  return `${value.toFixed(Math.min(known, Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2))} ${unit}`;
}

// A line of text; parts in brackets are bold. Text only: names come from users' files.
function say(element, ...parts) {
  element.replaceChildren(
    ...parts.map((part) => {
      if (typeof part === "string") return document.createTextNode(part);
      const bold = document.createElement("b");
      bold.textContent = part[0];
      return bold;
    }),
  );
}

function prepared(canvas, height) {
  const width = Math.max(1, canvas.parentElement.clientWidth);
  const dense = isPrinting() ? 3 : window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  const context = canvas.getContext("2d");
  context.setTransform(dense, 0, 0, dense, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

function tickStep(count, pixels, apart) {
  let step = 1;
  while ((step * pixels) / Math.max(1, count) < apart && step < count) step *= 2;
  return step;
}

/* Choose cells by pointer and arrow keys. `at` returns the plot, width of a column, height of a cell, their numbers and
   the chosen cell; `turn`, if given, changes the layer. */
function chooseCells(canvas, at, choose, turn) {
  const point = (event) => {
    const { plot, column, cell, columns, rows, cursor } = at(), box = canvas.getBoundingClientRect();
    const c = Math.floor((event.clientX - box.left - plot.x) / column);
    const r = Math.floor((event.clientY - box.top - plot.y) / cell);
    if (c < 0 || r < 0 || c >= columns || r >= rows || (cursor && cursor.c === c && cursor.r === r)) return;
    choose({ r, c });
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("keydown", (event) => {
    const pages = turn && { PageUp: -1, PageDown: 1 }[event.key];
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!pages && !move) return;
    event.preventDefault();
    if (pages) return turn(pages);
    const { columns, rows, cursor } = at(), from = cursor ?? { r: -move[0], c: -move[1] };
    choose({ r: clamp(from.r + move[0], 0, rows - 1), c: clamp(from.c + move[1], 0, columns - 1) });
  });
}
