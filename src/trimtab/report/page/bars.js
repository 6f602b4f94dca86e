// Stacked bars: the pointer or the arrow keys choose a part, whose figures are shown.
for (const figure of document.querySelectorAll("[data-bars]")) {
  const readout = figure.querySelector(".readout");
  let shown = null;
  const show = (part) => {
    shown?.classList.remove("on");
    shown = part;
    if (!part) return;
    part.classList.add("on");
    const [name, ...figures] = part.dataset.figures.split("\n");
    say(readout, [name], ` · ${figures.join(", ")}`);
  };
  for (const bar of figure.querySelectorAll(".bar")) {
    const parts = [...bar.children];
    bar.addEventListener("pointerover", (event) => event.target !== bar && show(event.target));
    bar.addEventListener("pointerleave", () => show(null));
    bar.addEventListener("focus", () => parts.includes(shown) || show(parts[0]));
    bar.addEventListener("blur", () => show(null));
    bar.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || !parts.length) return;
      event.preventDefault();
      show(parts[clamp(parts.indexOf(shown) + step, 0, parts.length - 1)]);
    });
  }
}
