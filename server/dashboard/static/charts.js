// Draws each chart from the table beside it: without scripts the table is what there is.
"use strict";
(() => {
  const colours = ["--accent", "--skipped", "--good", "--quiet"];
  const plots = new Map();

  function read(table) {
    const names = [...table.tHead.rows[0].cells].slice(1).map((cell) => cell.textContent);
    const columns = [[], ...names.map(() => [])];
    for (const row of table.tBodies[0].rows) {
      columns[0].push(Number(row.cells[0].dataset.x));
      names.forEach((_, i) => {
        const text = row.cells[i + 1].textContent;
        columns[i + 1].push(text === "" ? null : Number(text));
      });
    }
    return [names, columns];
  }

  // Where points are too many to be drawn, those between two gaps still are: no line leads to them.
  function alone(plot, number, shown) {
    const values = plot.data[number];
    const isAlone = (at) => values[at] != null && values[at - 1] == null && values[at + 1] == null;
    return shown ? null : [...values.keys()].filter(isAlone);
  }

  function draw(figure) {
    const holder = figure.querySelector(".plot");
    const table = figure.querySelector("details table");
    if (!holder || !table) return;
    const [names, columns] = read(table);
    const known = plots.get(holder);
    if (known) return known.setData(columns);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
    const short = (at) => (at == null ? "" : at.toLocaleString([], { maximumSignificantDigits: 6 }));
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const series = names.map((label, i) => ({
      label, width: 2, stroke: colour(colours[i % colours.length]), dash: i ? [8, 3 * i] : undefined,
      spanGaps: false, points: { size: 5, filter: alone },
    }));
    const size = () => ({ width: Math.max(200, holder.clientWidth), height: 200 });
    const plot = new uPlot({ ...size(), series: [{ label: "Time", value: (_, at) => (at == null ? "–" : clock(at)) }, ...series], axes: [{ ...axis, space: 80, values: (_, ats) => ats.map(clock) }, { ...axis, size: 60, values: (_, at) => at.map(short) }], scales: { y: { range: figure.dataset.top ? [0, Number(figure.dataset.top)] : { min: { pad: 0, soft: 0, mode: 1 }, max: { pad: 0.1 } } } } }, columns, holder);
    plots.set(holder, plot);
    new ResizeObserver(() => plot.setSize(size())).observe(holder);
  }

  function all() {
    document.querySelectorAll("figure.chart").forEach(draw);
  }

  document.addEventListener("DOMContentLoaded", all);
  document.addEventListener("htmx:sse:after:message", all);
})();
