"use strict";
// All of this is comfort: without it every value is in a table, and every event in the list.
for (const chart of document.querySelectorAll("svg.chart[data-read]")) {
  const points = JSON.parse(chart.dataset.read);
  const reading = chart.querySelector(".reading");
  const readout = chart.parentElement.querySelector(".readout");
  if (!points.length) continue;
  const make = (name, values) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
    return made;
  };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect(), style = getComputedStyle(chart);
    const left = parseFloat(style.paddingLeft), right = parseFloat(style.paddingRight);
    const x = (event.clientX - box.left - left) / (box.width - left - right);
    const y = event.clientY - box.top - parseFloat(style.paddingTop);
    let best = points[0], least = Infinity;
    for (const point of points) {
      const far = Math.abs(point[0] - x) * 4000 + Math.abs(point[1] - y);
      if (far < least) { least = far; best = point; }
    }
    const at = `${100 * best[0]}%`;
    reading.replaceChildren(
      make("line", { x1: at, x2: at, y1: 0, y2: "100%" }), make("circle", { cx: at, cy: best[1], r: 4 }));
    readout.textContent = best[2];
  });
  chart.addEventListener("pointerleave", () => { reading.replaceChildren(); readout.textContent = ""; });
}
const form = document.querySelector("form.filter");
if (form) {
  const rows = [...document.querySelectorAll(".events > tbody > tr")];
  const words = rows.map((row) => row.textContent.toLowerCase());
  const filter = () => {
    const text = form.elements.text.value.toLowerCase();
    const kind = form.elements.kind.value, node = form.elements.node.value;
    let shown = 0;
    rows.forEach((row, number) => {
      const fits = words[number].includes(text) && (!kind || row.dataset.kind === kind) &&
        (!node || row.dataset.node === node);
      row.hidden = !fits;
      shown += fits;
    });
    form.elements.shown.textContent = `${shown} of ${rows.length} shown`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();
}
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("#failures details, #inventory details, #timeline details")) each.open = true;
});
