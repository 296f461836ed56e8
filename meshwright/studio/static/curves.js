// Curves as numbers: what a log axis can show, smoothing, and the value under the pointer.
import { nearest } from "./hover.js";

// Only points that have a place on the axes: a log axis has none for 0 and below.
export function positive(one, logX, logY) {
  const keep = one.x.map((x, n) => x !== null && (!logX || x > 0) ? n : -1).filter(n => n >= 0);
  const of = values => values && keep.map(n => logY && !(one.low[n] > 0) ? null : values[n]);
  return { ...one, x: keep.map(n => one.x[n]), low: of(one.low), high: of(one.high), mean: of(one.mean) };
}

export function extent(series) {
  let low = Infinity, high = -Infinity, left = Infinity, right = -Infinity;
  for (const one of series) {
    const top = one.high || one.low;
    for (let n = 0; n < one.x.length; n += 1) {
      if (one.low[n] === null) continue;
      if (one.low[n] < low) low = one.low[n];
      if (top[n] > high) high = top[n];
      if (one.x[n] < left) left = one.x[n];
      if (one.x[n] > right) right = one.x[n];
    }
  }
  return { low, high, left, right };
}

// A mean over the neighbours within half a width on both sides, equally far on each so that it does not lag.
export function smooth(at, values, width) {
  const sums = [0], counts = [0];
  for (const value of values) { sums.push(sums.at(-1) + (value ?? 0)); counts.push(counts.at(-1) + (value !== null)); }
  let low = 0, high = 0;
  return values.map((value, n) => {
    while (at[n] - at[low] > width / 2) low += 1;
    while (high + 1 < at.length && at[high + 1] - at[n] <= width / 2) high += 1;
    const reach = Math.min(n - low, high - n);
    return value === null ? null : (sums[n + reach + 1] - sums[n - reach]) / (counts[n + reach + 1] - counts[n - reach]);
  });
}

// The value at a position; null before a run began and after it ended, even if its validations lie further apart.
export function valueAt(one, wanted) {
  const [begin, end] = one.within ?? [one.x[0], one.x.at(-1)];
  return wanted < begin || wanted > end ? null : (one.smoothed ?? one.mean ?? one.low)[nearest(one.x, wanted)];
}
