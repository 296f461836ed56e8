// Curves of many runs in one SVG: lowest and highest of every bucket, marks, ticks, and a read-out under the pointer.
import { paint } from "./colours.js";
import { extent, positive, smooth, valueAt } from "./curves.js";
import { h, number } from "./dom.js";

const SPACE = "http://www.w3.org/2000/svg", LEFT = 62, RIGHT = 12, TOP = 10, BOTTOM = 36, MOST_READ = 6;

function s(tag, attributes, text) {
  const made = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export function niceTicks(low, high, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const gap = [1, 2, 5, 10].map(f => f * power).find(g => g >= rough * 0.75);
  const ticks = [];
  for (let at = Math.ceil(low / gap - 1e-9); at <= high / gap + 1e-9; at += 1) ticks.push(Number((at * gap).toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
    for (const factor of high / low < 1000 ? [1, 2, 5] : [1]) if (factor * 10 ** power >= low && factor * 10 ** power <= high) ticks.push(factor * 10 ** power);
  return ticks.length > 1 ? ticks : niceTicks(low, high, 4);
}

export function short(v) {
  const size = Math.abs(v);
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit) return `${+(v / unit).toPrecision(3)}${suffix}`;
  return size && size < 1e-2 ? v.toExponential(1).replace(".0e", "e") : String(+v.toPrecision(3));
}

// A mapping from values to pixels and back.
function scale(low, high, start, end, log) {
  const f = log ? Math.log10 : v => v, back = log ? v => 10 ** v : v => v;
  const to = v => start + (f(v) - f(low)) / (f(high) - f(low)) * (end - start);
  return Object.assign(to, { back: at => back(f(low) + Math.min(1, Math.max(0, (at - start) / (end - start))) * (f(high) - f(low))) });
}

// Draws into `figure`, which is reused from one poll to the next so that nothing jumps, and drawn anew only if it changes.
export function draw(figure, chart) {
  const { title, unit, axis, marks = [], fromZero = false, smoothing = 0, logX = false, logY = false } = chart;
  const wide = figure.classList.contains("wide"), width = Math.max(300, figure.clientWidth || 600), height = wide ? 330 : 240;
  const content = JSON.stringify([chart, width]);
  if (figure.content === content) return;
  figure.content = content;
  const base = height - BOTTOM;
  const series = chart.series.map(one => positive(one, logX, logY)).filter(one => one.low.some(value => value !== null));
  const heading = h("figcaption", {}, h("h3", {}, title), wide ? legend(series, marks, smoothing) : null);
  if (!series.length) {
    figure.replaceChildren(heading, h("p", { class: "empty" }, logY ? "No value above 0, which a log axis needs." : "Nothing recorded yet."));
    return;
  }
  let { low, high, left, right } = extent(series);
  if (left === right) { left *= 0.9; right = right * 1.1 || 1; } else if (!logX && left > 0 && left < 0.05 * right) left = 0;
  const log = logY || (!fromZero && low > 0 && high / low > 50);
  if (log) { low /= 1.15; high *= 1.15; } else {
    const margin = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    low = fromZero ? Math.min(0, low) : low - margin; high += margin;
  }
  const atX = scale(left, right, LEFT, width - RIGHT, logX), atY = scale(low, high, base, TOP, log);
  if (smoothing) for (const one of series) if (!one.dash) one.smoothed = smooth(one.x.map(atX), one.mean ?? one.low, smoothing * (width - LEFT - RIGHT));
  const label = `${title} of ${series.length} run${series.length > 1 ? "s" : ""} over ${axis}; latest ${series.slice(0, 5).map(one => `${one.label} ${number(last(one.low), 4)}`).join(", ")}`;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const tick of log ? logTicks(low, high) : niceTicks(low, high, 5)) {
    svg.append(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: atY(tick), y2: atY(tick) }),
      s("text", { class: "tick", "text-anchor": "end", x: LEFT - 8, y: atY(tick) + 3.5 }, short(tick)));
  }
  svg.append(s("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: base, y2: base }));
  for (const tick of logX ? logTicks(left, right) : niceTicks(left, right, width > 600 ? 8 : 4))
    svg.append(s("text", { class: "tick", "text-anchor": "middle", x: atX(tick), y: base + 16 }, short(tick)));
  svg.append(s("text", { class: "unit", "text-anchor": "middle", x: (LEFT + width) / 2, y: height - 3 }, logX ? `${axis}, log scale` : axis),
    s("text", { class: "unit", "text-anchor": "middle", transform: `translate(11 ${(TOP + base) / 2}) rotate(-90)` }, log ? `${unit}, log scale` : unit));
  for (const mark of marks) {
    if (mark.x < left || mark.x > right) continue;
    const line = s("line", { class: `mark ${kindOf(mark)}`, x1: atX(mark.x), x2: atX(mark.x), y1: TOP, y2: base });
    line.append(s("title", {}, mark.kind));
    svg.append(line);
  }
  for (const one of series) svg.append(...curve(one, atX, atY));
  const hair = s("line", { class: "hair", y1: TOP, y2: base, visibility: "hidden" });
  const out = h("p", { class: "readout" }, "\u00a0");
  svg.append(hair);
  const read = pointer => {
    const box = svg.getBoundingClientRect(), x = (pointer - box.left) / box.width * width;
    hair.setAttribute("x1", x); hair.setAttribute("x2", x); hair.setAttribute("visibility", "visible");
    out.replaceChildren(...readOut(series, axis === "steps" ? Math.round(atX.back(x)) : atX.back(x), axis));
  };
  svg.addEventListener("pointermove", event => { figure.pointer = event.clientX; read(figure.pointer); });
  figure.onpointerleave = () => { figure.pointer = null; hair.setAttribute("visibility", "hidden"); out.textContent = "\u00a0"; };
  figure.replaceChildren(heading, svg, out);
  if (figure.pointer != null) read(figure.pointer);  // new points came while it was read
}

function readOut(series, wanted, axis) {
  const there = series.map(one => [one, valueAt(one, wanted)]).filter(([, value]) => value !== null);
  const named = there.slice(0, MOST_READ).map(([one, value]) =>
    h("span", {}, paint(h("i", { class: "swatch" }), one.run), `${one.label} `, h("b", {}, number(value, 4))));
  return [`${axis} ${number(wanted)}`, ...named, there.length > MOST_READ ? `and ${there.length - MOST_READ} more` : ""];
}

const kindOf = mark => ["checkpoint", "stop"].includes(mark.kind) ? "saved" : ["restart", "resume"].includes(mark.kind) ? "begun" : "bad";

// What is not named in the list of runs: dashed curves, pale ones, and vertical lines.
function legend(series, marks, smoothing) {
  const keys = [];
  if (series.some(one => one.dash && !one.dots)) keys.push(h("span", {}, h("i", { class: "key dashed" }), "validation"));
  if (series.some(one => one.dots)) keys.push(h("span", {}, h("i", { class: "key dot" }), "validation"));
  if (smoothing) keys.push(h("span", {}, h("i", { class: "key" }), "smoothed"), h("span", {}, h("i", { class: "key pale" }), "as recorded"));
  for (const kind of ["saved", "begun", "bad"]) {
    const words = [...new Set(marks.filter(mark => kindOf(mark) === kind).map(mark => mark.kind.replaceAll("_", " ")))];
    if (words.length) keys.push(h("span", {}, h("i", { class: `key upright ${kind}` }), words.join(", ")));
  }
  return keys.length ? h("span", { class: "legend" }, ...keys) : null;
}

function curve(one, atX, atY) {
  const { path, points } = line(one.x, one.low, one.high, atX, atY);
  if (points === 1 || one.dots)
    return one.x.map((x, n) => one.low[n] === null ? null : paint(s("circle", { r: 3, cx: atX(x), cy: atY(one.low[n]) }), one.run)).filter(Boolean);
  const drawn = [paint(s("path", { class: `curve${one.dash ? " dash" : ""}${one.smoothed ? " pale" : ""}`, d: path }), one.run)];
  if (one.smoothed) drawn.push(paint(s("path", { class: "curve smooth", d: line(one.x, one.smoothed, null, atX, atY).path }), one.run));
  return drawn;
}

function line(xs, low, high, atX, atY) {
  let path = "", open = false, points = 0;
  for (let n = 0; n < xs.length; n += 1) {
    if (low[n] === null) { open = false; continue; }
    const x = atX(xs[n]).toFixed(1);
    path += `${open ? "L" : "M"}${x} ${atY(low[n]).toFixed(1)}${open ? "" : "h0"}`;  // h0: a single point becomes a dot
    if (high && high[n] !== low[n]) path += `L${x} ${atY(high[n]).toFixed(1)}`;
    open = true; points += 1;
  }
  return { path, points };
}

function last(values) { for (let n = values.length - 1; n >= 0; n -= 1) if (values[n] !== null) return values[n]; return null; }
