// Shared by all scripts: the report's values, colours of the current scheme, numbers as text.
const report = JSON.parse(document.getElementById("report").textContent);
const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const redraws = [];

const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f8: Float64Array, i2: Int16Array };
const decoded = new Map();
function array(blob) {
  if (!decoded.has(blob.id)) {
    const element = byId(blob.id);
    const binary = atob(element.textContent);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    decoded.set(blob.id, new TYPES[blob.type](bytes.buffer));
    element.remove();
  }
  return decoded.get(blob.id);
}

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
function secondsText(seconds, span = seconds) {
  const scale = Math.abs(span);
  const [factor, unit] = scale >= 1 ? [1, "s"] : scale >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const value = seconds * factor;
  return `${value.toFixed(Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2)} ${unit}`;
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
  const dense = window.devicePixelRatio || 1;
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
