// Colour grids: one value for each row and column, from neutral to hot. Some have several planes to choose from.
// Those in percent compare rows with each other, and have no names of columns.
function startGrid(figure) {
  const grid = report.grids.find(({ name }) => name === figure.dataset.grid);
  const canvas = figure.querySelector("canvas"), readout = figure.querySelector(".readout");
  const select = figure.querySelector("select");
  const [rowWord, columnWord] = grid.words, rows = grid.rows.length, columns = grid.columns.length;
  let plane = grid.start, cursor = null, plot = null;

  const valueAt = (row, column) => {
    const value = array(grid.array)[(plane * rows + row) * columns + column];
    return value ? (value - 1) * grid.unit : NaN;
  };

  function draw() {
    const table = heatColours(), ink = colourOf("var(--ink)"), muted = colourOf("var(--muted)");
    const cell = clamp(Math.floor(448 / rows), 2, 36);
    const context = canvas.getContext("2d");
    context.font = "11px system-ui, sans-serif";
    const shown = canvas.parentElement.clientWidth;
    const longest = Math.max(...grid.rows.map((name) => context.measureText(name).width));
    const left = clamp(Math.ceil(longest) + 10, 34, shown / 3);
    const { width } = prepared(canvas, 22 + rows * cell + (grid.percent ? 8 : 32));
    plot = { x: left, y: 22, w: width - left - 1, h: rows * cell, cell };
    plot.column = plot.w / columns;
    const small = document.createElement("canvas");
    small.width = columns;
    small.height = rows;
    const image = new ImageData(columns, rows);
    for (let r = 0; r < rows; r++) {
      for (let c = 0; c < columns; c++) {
        const part = (valueAt(r, c) - grid.low) / (grid.high - grid.low);
        const at = Number.isFinite(part) ? 128 + Math.round(clamp(part, 0, 1) * 128) : 128;
        image.data.set(table.subarray(at * 4, at * 4 + 4), (r * columns + c) * 4);
      }
    }
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, plot.x, plot.y, plot.w, plot.h);
    context.strokeStyle = colourOf("var(--line)");
    context.strokeRect(plot.x + 0.5, plot.y + 0.5, plot.w - 1, plot.h - 1);
    context.fillStyle = muted;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let r = 0, step = tickStep(rows, plot.h, 18); r < rows; r += step) {
      context.fillText(grid.rows[r], plot.x - 6, plot.y + (r + 0.5) * cell, left - 8);
    }
    context.textAlign = "left";
    if (!grid.percent) {
      context.textAlign = "center";
      for (let c = 0, step = tickStep(columns, plot.w, 34); c < columns; c += step) {
        context.fillText(grid.columns[c], plot.x + (c + 0.5) * plot.column, plot.y + plot.h + 10);
      }
      context.textAlign = "left";
      context.fillText(columnWord, plot.x, plot.y + plot.h + 25);
      context.fillText(rowWord, 0, 6);
    }
    if (cursor) {
      context.strokeStyle = ink;
      context.lineWidth = 2;
      context.strokeRect(plot.x + cursor.c * plot.column - 1, plot.y + cursor.r * cell - 1, plot.column + 2, cell + 2);
      context.lineWidth = 1;
    }
  }

  function tell() {
    if (!cursor) return;
    const value = valueAt(cursor.r, cursor.c);
    const place = `${rowWord} ${grid.rows[cursor.r]}${grid.percent ? "" : ","} ${columnWord} ${grid.columns[cursor.c]}`;
    const text = !Number.isFinite(value) ? "no load" : grid.percent ? `${Math.round(value * 100)}%` : ratioText(value);
    say(readout, [place.trim()], " · ", [text], Number.isFinite(value) ? ` ${grid.label}` : "");
  }

  function pick(next) {
    plane = clamp(next, 0, grid.planes.length - 1);
    if (select) select.value = String(plane);
    draw();
    tell();
  }

  function choose(next) {
    cursor = next;
    draw();
    tell();
  }
  const at = () => ({ plot, column: plot.column, cell: plot.cell, columns, rows, cursor });
  chooseCells(canvas, at, choose, grid.planes.length > 1 && ((pages) => pick(plane + pages)));
  select?.addEventListener("change", () => pick(Number(select.value)));
  redraws.push(draw);
  pick(plane);
}
