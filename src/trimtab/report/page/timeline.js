// Operations of every lane of every rank in one micro-step. A row is one lane of one rank; its operations do not overlap.
const RANK_GAP = 9, AXIS = 24, NARROW = 560;

function startTimeline() {
  const canvas = byId("lanes"), box = canvas.parentElement, filler = byId("lanes-filler"), readout = byId("lane-readout");
  const which = byId("timeline"), ranks = byId("timeline-ranks");
  const legends = [...document.querySelectorAll("[data-legend]")];
  let chosen, events, allRows, rows, colours, inks, from, to, cursor = null, gutter, narrow, printed, wanted = false, rowHeight = 15;

  // Operations by rank, lane and start, and the rows that they form: rank, lane, first operation, number of operations.
  function sortOperations() {
    const { kind, layer, rank, lane, start, length } = Object.fromEntries(
      Object.entries(chosen.arrays).map(([name, part]) => [name, array(part)]),
    );
    const order = Uint32Array.from(start.keys());
    const row = rank.map((each, i) => each * chosen.lanes.length + lane[i]);
    order.sort((a, b) => row[a] - row[b] || start[a] - start[b] || length[a] - length[b]);
    const sorted = (values) => Float64Array.from(order, (i) => values[i]);
    events = { kind: sorted(kind), layer: sorted(layer), start: sorted(start), end: sorted(start.map((s, i) => s + length[i])) };
    allRows = [];
    order.forEach((i, place) => {
      if (!place || row[i] !== row[order[place - 1]]) allRows.push({ rank: rank[i], lane: lane[i], first: place, count: 0 });
      allRows.at(-1).count++;
    });
  }

  function load() {
    chosen = report.timelines[Number(which?.value ?? 0)];
    sortOperations();
    legends.forEach((legend, index) => (legend.hidden = index !== report.timelines.indexOf(chosen)));
    const options = [["busiest", `${chosen.busiest.length} busiest ranks`], ["all", `all ${chosen.ranks.length} ranks`]];
    if (chosen.busiest.length === chosen.ranks.length) options.shift();
    const before = ranks.value;
    ranks.replaceChildren(
      ...[...options, ...chosen.ranks.map((rank) => [String(rank), `rank ${rank}`])].map(([value, text]) => {
        return new Option(text, value);
      }),
    );
    if ([...ranks.options].some((option) => option.value === before)) ranks.value = before;
    from = 0;
    to = chosen.total;
    cursor = null;
    arrange();
  }

  // Rows of the ranks that are shown, and where each is. On a narrow page, a rank's name is above its rows.
  function arrange() {
    const shown = ranks.value === "all" ? chosen.ranks : ranks.value === "busiest" ? chosen.busiest : [Number(ranks.value)];
    const wantedRanks = new Set(shown), found = allRows.filter(({ rank }) => wantedRanks.has(rank));
    narrow = box.clientWidth < NARROW;
    // Few rows may be tall.
    rowHeight = clamp(Math.floor(300 / found.length), 15, 26);
    let y = 6, last = null;
    rows = [];
    for (const row of found) {
      const opens = row.rank !== last;
      if (opens) y += (last === null ? 0 : RANK_GAP) + (narrow ? 15 : 0);
      rows.push({ ...row, y, opens });
      last = row.rank;
      y += rowHeight;
    }
    const height = y + 6;
    printed = isPrinting();
    // All rows of a few ranks on one page of paper.
    const visible = Math.min(height + AXIS, printed ? 880 : Math.min(576, window.innerHeight * 0.8));
    canvas.dataset.height = visible;
    filler.style.height = `${Math.max(0, height + AXIS - visible)}px`;
    cursor = null;
    tint();
    draw();
  }

  function tint() {
    const legend = legends[report.timelines.indexOf(chosen)];
    colours = [...legend.querySelectorAll("i")].map((swatch) => getComputedStyle(swatch).backgroundColor);
    inks = Object.fromEntries(["ink", "muted", "line", "ground", "track"].map((name) => [name, colourOf(`var(--${name})`)]));
  }

  function firstEndingAfter(row, ticks) {
    let low = row.first, high = row.first + row.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (events.end[middle] > ticks) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  function draw() {
    const height = Number(canvas.dataset.height);
    const { context, width } = prepared(canvas, height);
    gutter = narrow ? 84 : 146;
    const plotWidth = width - gutter - 8, scroll = box.scrollTop, tick = chosen.tick;
    const x = (seconds) => gutter + ((seconds - from) / (to - from)) * plotWidth;
    const marks = ticks(plotWidth, x);
    context.textBaseline = "middle";
    context.strokeStyle = inks.line;
    context.beginPath();
    for (const [at] of marks) {
      context.moveTo(at, AXIS);
      context.lineTo(at, height);
    }
    context.stroke();
    for (const row of rows) {
      const y = row.y + AXIS - scroll;
      if (y + rowHeight < AXIS || y - 15 > height) continue;
      context.fillStyle = inks.track;
      context.fillRect(gutter, y + 1, plotWidth, rowHeight - 2);
      // Operations thinner than a pixel would hide one another: of those that begin in the same pixel, one is drawn.
      let covered = -1;
      for (let i = firstEndingAfter(row, from / tick); i < row.first + row.count; i++) {
        const start = events.start[i] * tick;
        if (start > to) break;
        const left = Math.max(gutter, x(start)), right = Math.min(gutter + plotWidth, x(events.end[i] * tick));
        if (right <= covered) continue;
        const w = right - left;
        context.fillStyle = colours[events.kind[i]];
        context.fillRect(left, y + 1, Math.max(w > 3 ? w - 0.6 : w, 0.8), rowHeight - 2);
        covered = Math.max(right, left + 0.6);
      }
      context.textAlign = "left";
      context.fillStyle = inks.ink;
      if (row.opens) context.fillText(`rank ${row.rank}`, 6, narrow ? y - 7 : y + rowHeight / 2);
      context.textAlign = "right";
      context.fillStyle = inks.muted;
      context.fillText(chosen.lanes[row.lane], gutter - 8, y + rowHeight / 2);
    }
    if (cursor !== null) {
      const row = rows.find((r) => cursor >= r.first && cursor < r.first + r.count);
      const left = x(events.start[cursor] * tick), right = x(events.end[cursor] * tick);
      if (row && right >= gutter && left <= gutter + plotWidth) {
        context.strokeStyle = inks.ink;
        context.lineWidth = 2;
        const clipped = Math.max(gutter, left);
        context.strokeRect(clipped, row.y + AXIS - scroll, Math.max(2, Math.min(gutter + plotWidth, right) - clipped), rowHeight);
        context.lineWidth = 1;
      }
    }
    context.fillStyle = inks.ground;
    context.fillRect(0, 0, width, AXIS);
    context.fillStyle = inks.muted;
    context.textAlign = "center";
    for (const [at, text] of marks) if (at < width - 22) context.fillText(text, at, AXIS / 2);
  }

  // Ticks of time: lines behind the rows, labels above them.
  function ticks(plotWidth, x) {
    const rough = (to - from) / Math.max(1, plotWidth / 90);
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
    const [factor, name] = step >= 0.1 ? [1, "s"] : step >= 1e-4 ? [1e3, "ms"] : [1e6, "µs"];
    const digits = Math.max(0, Math.ceil(-Math.log10(step * factor) - 1e-9));
    const found = [];
    for (let n = Math.ceil(from / step); n * step <= to; n++) {
      found.push([Math.round(x(n * step)) + 0.5, `${(n * step * factor).toFixed(digits)} ${name}`]);
    }
    return found;
  }

  function tell() {
    if (cursor === null) return;
    const row = rows.find((r) => cursor >= r.first && cursor < r.first + r.count);
    const start = events.start[cursor] * chosen.tick, end = events.end[cursor] * chosen.tick;
    const layer = events.layer[cursor];
    say(
      readout, [chosen.names[events.kind[cursor]]],
      ` · rank ${row.rank}, ${chosen.lanes[row.lane]}${layer < 0 ? "" : `, layer ${report.layers[layer] ?? layer}`}`,
      ` · ${secondsText(end - start, chosen.tick)}, from ${secondsText(start, chosen.tick, chosen.total)}`,
    );
  }

  function view(start, end) {
    const least = Math.max(chosen.tick * 20, chosen.total * 1e-6);
    const span = clamp(end - start, least, chosen.total);
    from = clamp(start, 0, chosen.total - span);
    to = from + span;
    later();
  }
  const zoom = (factor, at = (from + to) / 2) => view(at - (at - from) * factor, at + (to - at) * factor);
  const pan = (part) => view(from + (to - from) * part, to + (to - from) * part);

  function later() {
    if (wanted) return;
    wanted = true;
    requestAnimationFrame(() => {
      wanted = false;
      draw();
    });
  }

  const timeAt = (clientX) => {
    const rect = canvas.getBoundingClientRect();
    return from + ((clientX - rect.left - gutter) / (rect.width - gutter - 8)) * (to - from);
  };

  function eventAt(clientX, clientY) {
    const y = clientY - canvas.getBoundingClientRect().top - AXIS + box.scrollTop;
    const row = rows.find((r) => y >= r.y && y < r.y + rowHeight);
    if (!row) return null;
    const time = timeAt(clientX), ticks = time / chosen.tick;
    const near = (((to - from) / canvas.clientWidth) * 2) / chosen.tick;
    const i = firstEndingAfter(row, ticks - near);
    return i < row.first + row.count && events.start[i] <= ticks + near ? i : null;
  }

  // The next or previous operation of the row, or the first that is in view of the next or previous row.
  function walk(along, across) {
    if (!rows.length) return;
    let index = cursor === null ? -1 : rows.findIndex((r) => cursor >= r.first && cursor < r.first + r.count);
    if (index < 0 || across) {
      const shownRow = clamp(index < 0 ? 0 : index + across, 0, rows.length - 1), row = rows[shownRow];
      const time = cursor === null ? from / chosen.tick : events.start[cursor];
      cursor = Math.min(firstEndingAfter(row, time), row.first + row.count - 1);
    } else {
      const row = rows[index];
      cursor = clamp(cursor + along, row.first, row.first + row.count - 1);
    }
    const row = rows.find((r) => cursor >= r.first && cursor < r.first + r.count);
    const height = Number(canvas.dataset.height) - AXIS;
    box.scrollTop = clamp(box.scrollTop, row.y + rowHeight + 6 - height, row.y - 6);
    const start = events.start[cursor] * chosen.tick, end = events.end[cursor] * chosen.tick;
    if (end < from || start > to) view(start - (to - from) / 4, start + ((to - from) * 3) / 4);
    later();
    tell();
  }

  const pointers = new Map();
  let pinch = null;
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event);
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragging");
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      pinch = null;
      canvas.classList.remove("dragging");
    });
  }
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (before) {
      pointers.set(event.pointerId, event);
      if (pointers.size === 2) {
        const [a, b] = [...pointers.values()], apart = Math.max(10, Math.abs(a.clientX - b.clientX));
        if (pinch) zoom(pinch / apart, timeAt((a.clientX + b.clientX) / 2));
        pinch = apart;
      } else {
        pan((before.clientX - event.clientX) / (canvas.clientWidth - gutter - 8));
      }
    }
    const found = eventAt(event.clientX, event.clientY);
    if (found === null || found === cursor) return;
    cursor = found;
    later();
    tell();
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(clamp(event.deltaY, -60, 60) * 0.01), timeAt(event.clientX));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pan((event.deltaX || event.deltaY) / canvas.clientWidth);
    } else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(0.5, timeAt(event.clientX)));
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => view(0, chosen.total),
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
      ArrowUp: () => walk(0, -1), ArrowDown: () => walk(0, 1), n: () => walk(1, 0), p: () => walk(-1, 0),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  byId("zoom-in").addEventListener("click", () => zoom(0.5));
  byId("zoom-out").addEventListener("click", () => zoom(2));
  byId("zoom-fit").addEventListener("click", () => view(0, chosen.total));
  box.addEventListener("scroll", later);
  which?.addEventListener("change", load);
  ranks.addEventListener("change", () => {
    box.scrollTop = 0;
    arrange();
  });
  redraws.push(() => {
    if (printed !== isPrinting() || narrow !== box.clientWidth < NARROW) return arrange();
    tint();
    draw();
  });
  load();
  byId("step-timeline").dataset.drawn = "";
}
