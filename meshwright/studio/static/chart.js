// Curves of many runs in one SVG: lowest and highest of every bucket, marks, ticks, and a read-out under the pointer.
import { h, number } from "./dom.js";
import { nearest } from "./hover.js";

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

export function short(v) {
  const size = Math.abs(v);
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit) return `${+(v / unit).toPrecision(3)}${suffix}`;
  return size && size < 1e-2 ? v.toExponential(1) : String(+v.toPrecision(3));
}

function extent(series) {
  let low = Infinity, high = -Infinity, left = Infinity, right = -Infinity;
  for (const one of series) {
    const top = one.high || one.low;
    for (let n = 0; n < one.x.length; n += 1) {
      if (one.low[n] === null || one.x[n] === null) continue;
      if (one.low[n] < low) low = one.low[n];
      if (top[n] > high) high = top[n];
      if (one.x[n] < left) left = one.x[n];
      if (one.x[n] > right) right = one.x[n];
    }
  }
  return { low, high, left, right };
}

// Draws into `figure`, which is reused from one poll to the next so that nothing jumps.
export function draw(figure, { title, unit, axis, series, marks = [], fromZero = false }) {
  const wide = figure.classList.contains("wide"), width = Math.max(300, figure.clientWidth || 600), height = wide ? 330 : 240;
  const dashed = wide ? [...new Set(marks.map(mark => mark.kind.replaceAll("_", " ")))] : [];
  const heading = h("figcaption", {}, h("h3", {}, title), dashed.length ? h("span", { class: "legend" }, h("span", {}, h("i", { class: "key marked" }), dashed.join(", "))) : null);
  series = series.filter(one => one.low.some(value => value !== null));
  if (!series.length) { figure.replaceChildren(heading, h("p", { class: "empty" }, "Nothing recorded yet.")); return; }
  let { low, high, left, right } = extent(series);
  if (left === right) { left -= 1; right += 1; } else if (left > 0 && left < 0.05 * right) left = 0;
  const log = !fromZero && low > 0 && high / low > 50;
  if (log) { low /= 1.15; high *= 1.15; } else {
    const margin = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    low = fromZero ? Math.min(0, low) : low - margin; high += margin;
  }
  const f = log ? Math.log10 : v => v;
  const atX = v => LEFT + (v - left) / (right - left) * (width - RIGHT - LEFT);
  const atY = v => height - BOTTOM - (f(v) - f(low)) / (f(high) - f(low)) * (height - BOTTOM - TOP);
  const label = `${title} of ${series.length} run${series.length > 1 ? "s" : ""} over ${axis}; latest ${series.slice(0, 5).map(one => `${one.label} ${number(last(one.low), 4)}`).join(", ")}`;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const ticks = log ? decades(low, high) : niceTicks(low, high, 5);
  for (const tick of ticks) {
    svg.append(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: atY(tick), y2: atY(tick) }),
      s("text", { class: "tick", "text-anchor": "end", x: LEFT - 8, y: atY(tick) + 3.5 }, short(tick)));
  }
  const base = height - BOTTOM;
  svg.append(s("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: base, y2: base }));
  for (const tick of niceTicks(left, right, width > 600 ? 8 : 4))
    svg.append(s("text", { class: "tick", "text-anchor": "middle", x: atX(tick), y: base + 16 }, short(tick)));
  svg.append(s("text", { class: "unit", "text-anchor": "middle", x: (LEFT + width) / 2, y: height - 3 }, axis),
    s("text", { class: "unit", "text-anchor": "middle", transform: `translate(11 ${(TOP + base) / 2}) rotate(-90)` }, log ? `${unit}, log scale` : unit));
  for (const mark of marks) {
    const kind = ["checkpoint", "stop"].includes(mark.kind) ? "checkpoint" : ["restart", "resume"].includes(mark.kind) ? "" : "bad";
    const line = s("line", { class: `mark ${kind}`, x1: atX(mark.x), x2: atX(mark.x), y1: TOP, y2: base });
    line.append(s("title", {}, mark.kind));
    svg.append(line);
  }
  for (const one of series) svg.append(...curve(one, atX, atY));
  const hair = s("line", { class: "hair", y1: TOP, y2: base, visibility: "hidden" });
  svg.append(hair);
  const out = h("p", { class: "readout" }, "\u00a0");
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    const exact = Math.min(right, Math.max(left, left + (x - LEFT) / (width - RIGHT - LEFT) * (right - left)));
    const wanted = axis === "steps" ? Math.round(exact) : exact;
    hair.setAttribute("x1", x); hair.setAttribute("x2", x); hair.setAttribute("visibility", "visible");
    const there = series.map(one => [one, valueAt(one, wanted)]).filter(([, value]) => value !== null);
    const more = there.length > MOST_READ ? ` and ${there.length - MOST_READ} more` : "";
    out.replaceChildren(`${axis} ${number(wanted)}`, ...there.slice(0, MOST_READ).map(([one, value]) =>
      h("span", {}, h("i", { class: `swatch tint-${one.tint}` }), `${one.label} `, h("b", {}, number(value, 4)))), more);
  });
  svg.addEventListener("pointerleave", () => { hair.setAttribute("visibility", "hidden"); out.textContent = "\u00a0"; });
  figure.replaceChildren(heading, svg, out);
}

// The value at a position; null before a run began and after it ended, even if its validations lie further apart.
function valueAt(one, wanted) {
  const [begin, end] = one.within ?? [one.x[0], one.x.at(-1)];
  return wanted < begin || wanted > end ? null : one.low[nearest(one.x, wanted)];
}

function curve(one, atX, atY) {
  let path = "", open = false, points = 0;
  for (let n = 0; n < one.x.length; n += 1) {
    if (one.low[n] === null || one.x[n] === null) { open = false; continue; }
    const x = atX(one.x[n]).toFixed(1);
    path += `${open ? "L" : "M"}${x} ${atY(one.low[n]).toFixed(1)}${open ? "" : "h0"}`;  // h0: a single point becomes a dot
    if (one.high && one.high[n] !== one.low[n]) path += `L${x} ${atY(one.high[n]).toFixed(1)}`;
    open = true; points += 1;
  }
  if (points === 1 || one.dots) {
    return one.x.map((x, n) => one.low[n] === null ? null : s("circle", { class: `tint-${one.tint}`, r: 3, cx: atX(x), cy: atY(one.low[n]) })).filter(Boolean);
  }
  return [s("path", { class: `tint-${one.tint}${one.dash ? " dash" : ""}`, d: path })];
}

function decades(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
    for (const factor of high / low < 1000 ? [1, 2, 5] : [1]) if (factor * 10 ** power >= low && factor * 10 ** power <= high) ticks.push(factor * 10 ** power);
  return ticks;
}

function last(values) { for (let n = values.length - 1; n >= 0; n -= 1) if (values[n] !== null) return values[n]; return null; }
