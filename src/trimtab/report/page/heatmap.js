// Load of every rank in every micro-step, divided by the mean of its instance, for one layer or all.
const GUTTER = { left: 34, top: 20, bottom: 32 };

function toOklab([r, g, b]) {
  const linear = [r, g, b].map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const [R, G, B] = linear;
  const l = Math.cbrt(0.4122214708 * R + 0.5363325363 * G + 0.0514459929 * B);
  const m = Math.cbrt(0.2119034982 * R + 0.6806995451 * G + 0.1073969566 * B);
  const s = Math.cbrt(0.0883024619 * R + 0.2817188376 * G + 0.6299787005 * B);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function fromOklab([L, a, b]) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((c) => 255 * clamp(c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055, 0, 1));
}

// 257 colours; the middle one is a load of exactly the mean.
function heatColours() {
  const anchors = [0, 1, 2, 3, 4, 5, 6].map((i) => {
    const channels = colourOf(`var(--heat-${i})`).match(/[\d.]+/g).map(Number);
    return toOklab(channels.slice(0, 3).map((c) => c / 255));
  });
  const table = new Uint8ClampedArray(257 * 4);
  for (let i = 0; i <= 256; i++) {
    const at = (i / 256) * (anchors.length - 1);
    const k = Math.min(anchors.length - 2, Math.floor(at));
    const mixed = anchors[k].map((value, c) => value + (anchors[k + 1][c] - value) * (at - k));
    table.set([...fromOklab(mixed), 255], i * 4);
  }
  return table;
}

function startHeatMap() {
  const { maps, spread, layers } = report;
  const select = byId("layer"), slider = byId("layer-slider"), readout = byId("heat-readout");
  const canvases = [...document.querySelectorAll("[data-map]")];
  const captions = [...document.querySelectorAll("[data-map-caption]")];
  let layer = report.start_layer;
  let cursor = null;
  let views = [];

  // Tokens and ratios of one layer, or their means over all layers (-1); a ratio is NaN where there are no tokens.
  function values(map) {
    const { M, L, R, unit } = map, loads = array(map.array);
    const tokens = new Float64Array(M * R), ratios = new Float64Array(M * R), counted = new Uint16Array(M);
    const chosen = layer < 0 ? [...Array(L).keys()] : [layer];
    let worst = 0, sum = 0, instances = 0;
    for (let m = 0; m < M; m++) {
      for (const l of chosen) {
        const at = (r) => (l * R + r) * M + m;
        let total = 0, most = 0;
        for (let r = 0; r < R; r++) {
          total += loads[at(r)];
          most = Math.max(most, loads[at(r)]);
        }
        for (let r = 0; r < R; r++) tokens[m * R + r] += (loads[at(r)] * unit) / chosen.length;
        if (!total) continue;
        counted[m]++;
        for (let r = 0; r < R; r++) ratios[m * R + r] += (loads[at(r)] * R) / total;
        const ratio = (most * R) / total;
        worst = Math.max(worst, ratio);
        sum += ratio;
        instances++;
      }
      for (let r = 0; r < R; r++) ratios[m * R + r] = counted[m] ? ratios[m * R + r] / counted[m] : NaN;
    }
    return { tokens, ratios, mean: instances ? sum / instances : NaN, worst: instances ? worst : NaN };
  }

  function draw() {
    const table = heatColours(), ink = colourOf("var(--ink)"), muted = colourOf("var(--muted)");
    const line = colourOf("var(--line)");
    views = maps.map((map, index) => {
      const { M, R } = map, { tokens, ratios, mean, worst } = values(map);
      const cell = clamp(Math.floor(448 / R), 2, 36);
      const { context, width } = prepared(canvases[index], GUTTER.top + R * cell + GUTTER.bottom);
      const plot = { x: GUTTER.left, y: GUTTER.top, w: width - GUTTER.left - 1, h: R * cell };
      const small = document.createElement("canvas");
      small.width = M;
      small.height = R;
      const image = new ImageData(M, R);
      for (let m = 0; m < M; m++) {
        for (let r = 0; r < R; r++) {
          const ratio = ratios[m * R + r];
          const at = Number.isFinite(ratio) ? Math.round(clamp(0.5 + (ratio - 1) / (2 * spread), 0, 1) * 256) : 128;
          image.data.set(table.subarray(at * 4, at * 4 + 4), (r * M + m) * 4);
        }
      }
      small.getContext("2d").putImageData(image, 0, 0);
      context.imageSmoothingEnabled = false;
      context.drawImage(small, plot.x, plot.y, plot.w, plot.h);
      context.strokeStyle = line;
      context.strokeRect(plot.x + 0.5, plot.y + 0.5, plot.w - 1, plot.h - 1);
      context.fillStyle = muted;
      context.textBaseline = "middle";
      context.textAlign = "right";
      for (let r = 0, step = tickStep(R, plot.h, 18); r < R; r += step) context.fillText(r, plot.x - 6, plot.y + (r + 0.5) * cell);
      context.textAlign = "center";
      const column = plot.w / M;
      for (let m = 0, step = tickStep(M, plot.w, 26); m < M; m += step) {
        context.fillText(map.columns?.[m] ?? m, plot.x + (m + 0.5) * column, plot.y + plot.h + 10);
      }
      context.textAlign = "left";
      context.fillText("micro-step", plot.x, plot.y + plot.h + 25);
      context.fillText("rank", 0, 8);
      if (cursor && cursor.m < M && cursor.r < R) {
        context.strokeStyle = ink;
        context.lineWidth = 2;
        context.strokeRect(plot.x + cursor.m * column - 1, plot.y + cursor.r * cell - 1, column + 2, cell + 2);
        context.lineWidth = 1;
      }
      say(captions[index], ` · max/mean ${ratioText(mean)} on average, ${ratioText(worst)} at most`);
      return { map, plot, cell, column, tokens, ratios };
    });
  }

  function tell() {
    if (!cursor) return;
    const parts = [[`Rank ${cursor.r}, micro-step ${maps[0].columns?.[cursor.m] ?? cursor.m}`]];
    views.forEach(({ map, tokens, ratios }) => {
      if (cursor.m >= map.M || cursor.r >= map.R) return;
      const at = cursor.m * map.R + cursor.r;
      const count = `${map.unit > 1 ? "about " : ""}${whole.format(tokens[at])} tokens`;
      parts.push(` · ${map.title} `, [`${ratioText(ratios[at])}×`], ` the mean (${count})`);
    });
    say(readout, ...parts);
  }

  function pick(next) {
    layer = clamp(next, -1, layers.length - 1);
    select.value = slider.value = String(layer);
    slider.setAttribute("aria-valuetext", layer < 0 ? "all layers" : layers[layer]);
    byId("layer-previous").disabled = layer <= -1;
    byId("layer-next").disabled = layer >= layers.length - 1;
    draw();
    tell();
  }

  select.addEventListener("change", () => pick(Number(select.value)));
  slider.addEventListener("input", () => pick(Number(slider.value)));
  byId("layer-previous").addEventListener("click", () => pick(layer - 1));
  byId("layer-next").addEventListener("click", () => pick(layer + 1));
  for (const link of document.querySelectorAll("[data-layer]")) {
    link.addEventListener("click", () => {
      pick(Number(link.dataset.layer));
      byId("load").scrollIntoView();
      select.focus({ preventScroll: true });
    });
  }
  function choose({ r, c }) {
    cursor = { r, m: c };
    draw();
    tell();
  }
  canvases.forEach((canvas, index) => {
    const at = () => {
      const { plot, cell, column, map } = views[index];
      return { plot, cell, column, columns: map.M, rows: map.R, cursor: cursor && { r: cursor.r, c: cursor.m } };
    };
    chooseCells(canvas, at, choose, (pages) => pick(layer + pages));
  });
  redraws.push(draw);
  pick(layer);
}
