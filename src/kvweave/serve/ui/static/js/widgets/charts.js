// Charts as SVG, drawn here: lines over time, curves with a bound, bars. Each has its figures in
// words.
import { html, useId, useLayoutEffect, useRef, useState } from "../html.js";

const PAD = { top: 10, right: 12, bottom: 26, left: 46 };

/** Width of the element in pixels, so that text is never stretched. */
function useWidth() {
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  return [box, width];
}

/** Numbers of an axis from `low` to `high`: round ones, about `wanted` of them. */
export function ticks(low, high, wanted = 4) {
  const rough = (high - low) / wanted || 1;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * size).find((n) => n >= rough);
  const out = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) out.push(
    Number(at.toPrecision(12)));
  return out;
}

/** Neighbouring points that are there. */
function runsOf(points) {
  const runs = [[]];
  for (const point of points) {
    if (point[1] === null) runs.push([]);
    else runs.at(-1).push(point);
  }
  return runs.filter((run) => run.length > 0);
}

/** Full minutes between two times in seconds, about `wanted` of them. */
function timeTicks(low, high, wanted) {
  const step = [60, 120, 300, 600, 900, 1800,
    3600].find((each) => (high - low) / each <= wanted) ?? 3600;
  const first = Math.ceil(low / step) * step;
  return Array.from({ length: Math.max(0, Math.floor((high - first) / step) + 1) },
    (_, at) => first + at * step);
}

/** series: [{ name, className, points:[[x, y|null]…], dashed, band:[[x, low, high]…] }]; lines: [{
 * y, label }]. */
export function Curves({ series, label, height = 200, formatX = String, formatY = String, lowY,
  highY, lines = [], fill = false, log = false, time = false }) {
  const [box, width] = useWidth();
  const id = useId();
  const drawn = series.filter((each) => each.points.some(([, y]) => y !== null));
  const xs = drawn.flatMap((each) => each.points.map(([x]) => x));
  const ys = [...drawn.flatMap((each) => each.points.map(([, y]) => y).filter((y) => y !== null)),
    ...lines.map((each) => each.y)];
  if (!xs.length) return html`<div ref=${box}
    class="chart-none small faint">Nothing to draw yet.</div>`;
  const [minX, maxX] = [Math.min(...xs), Math.max(...xs)];
  const least = Math.min(...ys.filter((y) => y > 0), 1);
  const [minY, maxY] = log ? [10 ** Math.floor(Math.log10(least)),
    10 ** Math.ceil(Math.log10(Math.max(...ys, least * 10)))]
    : [lowY ?? Math.min(0, ...ys), highY ?? Math.max(...ys, 1e-9) * 1.08];
  const scaleY = (y) => (log ? Math.log10(Math.max(y, minY)) : y);
  const x = (value) => PAD.left + ((value - minX) / (maxX - minX || 1)) * (
    width - PAD.left - PAD.right);
  const y = (value) => height - PAD.bottom - (
    (scaleY(value) - scaleY(minY)) / (scaleY(maxY) - scaleY(minY) || 1)) * (
    height - PAD.top - PAD.bottom);
  const marksY = log ? Array.from({ length: Math.round(Math.log10(maxY / minY)) + 1 },
    (_, at) => minY * 10 ** at) : ticks(minY, maxY);
  const path = (points) => {
    let pen = "M";
    let text = "";
    for (const [px, py] of points) {
      if (py === null) { pen = "M"; continue; }
      text += `${pen}${x(px).toFixed(1)} ${y(py).toFixed(1)}`;
      pen = "L";
    }
    return text;
  };
  return html`<div class="chart" ref=${box}>${width > 0
    && html`<svg width=${width} height=${height} role="img" aria-labelledby=${id}><title id=${id}>
    ${label}</title>
    ${marksY.map((mark) => html`<g class="grid">
      <line x1=${PAD.left} x2=${width - PAD.right} y1=${y(mark)} y2=${y(mark)} />
      <text x=${PAD.left - 8} y=${y(mark) + 4} text-anchor="end">${formatY(mark)}</text></g>`)}
    ${(time ? timeTicks : ticks)(minX, maxX, Math.max(2, Math.floor(width / 110))).map(
      (mark) => html`<text class="axis" x=${x(mark)} y=${height - 6} text-anchor="middle">
      ${formatX(mark)}</text>`)}
    ${drawn.map((each) => html`<g class=${`series ${each.className}`}>
      ${each.band && html`<path class="band" d=${`${path(
        each.band.map(([bx, , high]) => [bx, high]))}${path(
        [...each.band].reverse().map(([bx, low]) => [bx, low])).replace("M", "L")}Z`} />`}
      ${fill && runsOf(each.points).filter((run) => run.length > 1).map(
        (run) => html`<path class="area" d=${`${path(run)}L${x(run.at(-1)[0])} ${y(minY)}L${x(
        run[0][0])} ${y(minY)}Z`} />`)}
      <path class=${each.dashed ? "line dashed" : "line"} d=${path(each.points)} />
      ${(each.points.length < 24 ? each.points.filter(([, py]) => py !== null)
        : runsOf(each.points).filter((run) => run.length === 1).flat()).map(
        ([px, py]) => html`<circle cx=${x(px)} cy=${y(py)} r="3"><title>
        ${`${each.name}: ${formatX(px)} → ${formatY(py)}`}</title></circle>`)}</g>`)}
    ${lines.map((each) => html`<g class="bound">
      <line x1=${PAD.left} x2=${width - PAD.right} y1=${y(each.y)} y2=${y(each.y)} />
      <text x=${width - PAD.right} y=${y(each.y) - 5} text-anchor="end">${each.label}</text></g>`)}
  </svg>`}${series.length > 1 && html`<ul class="plain row tiny quiet chart-legend">
    ${drawn.map((each) => html`<li class="row"><span class=${`dot ${each.className}`}></span>
    ${each.name}</li>`)}</ul>`}</div>`;
}

/** Stacked columns over time: series as of `timed`, steps gathered into about one column per 8
 * pixels. */
export function Columns({ series, label, height = 200, formatX, formatY }) {
  const [box, width] = useWidth();
  const id = useId();
  const steps = series[0]?.points.length ?? 0;
  const room = Math.max(width - PAD.left - PAD.right, 1);
  const each = Math.max(1, Math.ceil((steps * 8) / room));
  const groups = Array.from({ length: Math.ceil(steps / each) },
    (_, at) => series.map(({ points }) => points.slice(at * each,
    (at + 1) * each).reduce((sum, [, value]) => sum + (value ?? 0), 0)));
  const top = Math.max(...groups.map((group) => group.reduce((a, b) => a + b, 0)), 0);
  if (top === 0) return html`<div ref=${box}
    class="chart-none small faint">Nothing in the last half hour.</div>`;
  const [first, last] = [series[0].points[0][0], series[0].points.at(-1)[0]];
  const x = (time) => PAD.left + ((time - first) / (last - first || 1)) * room;
  const y = (value) => height - PAD.bottom - (value / (top * 1.08)) * (
    height - PAD.top - PAD.bottom);
  const wide = room / groups.length;
  return html`<div class="chart" ref=${box}>${width > 0
    && html`<svg width=${width} height=${height} role="img" aria-labelledby=${id}><title id=${id}>
    ${label}</title>
    ${ticks(0, top * 1.08).map((mark) => html`<g class="grid">
      <line x1=${PAD.left} x2=${width - PAD.right} y1=${y(mark)} y2=${y(mark)} />
      <text x=${PAD.left - 8} y=${y(mark) + 4} text-anchor="end">${formatY(mark)}</text></g>`)}
    ${timeTicks(first, last, Math.max(2, Math.floor(width / 110))).map(
      (mark) => html`<text class="axis" x=${x(mark)} y=${height - 6} text-anchor="middle">
      ${formatX(mark)}</text>`)}
    ${groups.map((group, at) => {
      let below = 0;
      return group.map((value, which) => {
        if (!value) return null;
        below += value;
        return html`<rect class=${`column ${series[which].className}`}
          x=${PAD.left + at * wide + 0.5} width=${Math.max(wide - 1, 1)} y=${y(below)}
          height=${y(below - value) - y(below)} />`;
      });
    })}</svg>`}${series.length > 1 && html`<ul class="plain row tiny quiet chart-legend">
      ${series.map(({ name, className }) => html`<li class="row">
      <span class=${`dot ${className}`}></span>${name}</li>`)}</ul>`}</div>`;
}

/** rows: [{ name, value, words, className }] as horizontal bars, largest first where they came so.
 * */
export function Bars({ rows, label, most }) {
  const top = most ?? Math.max(...rows.map((row) => row.value), 1e-9);
  return html`<ul class="plain bars" aria-label=${label}>
    ${rows.map((row) => html`<li><span class="cut small">${row.name}</span>
    <span class="bars-track" aria-hidden="true">
    <span class=${row.className ?? ""} style=${{ width: `${Math.min(100,
    (100 * row.value) / top)}%` }}></span></span><span class="small num quiet">${row.words}
    </span></li>`)}</ul>`;
}
