// A run's colour: chosen when it is first seen, kept by this browser, and never that of another run in the list.
const NAMED = 12, GOLDEN_DEGREES = 137.508;
let numbers = new Map();

// `names` are the newest first: colours are given from the oldest on, so that another browser gives the same ones.
export function assign(names, folder) {
  const key = `colours of ${folder}`, before = numbers.size ? numbers : kept(key);
  numbers = new Map(names.filter(name => before.has(name)).map(name => [name, before.get(name)]));
  const used = new Set(numbers.values());
  for (const name of names.toReversed()) {
    if (numbers.has(name)) continue;
    let free = 0;
    while (used.has(free)) free += 1;
    numbers.set(name, free);
    used.add(free);
  }
  if (numbers.size === before.size && names.every(name => before.has(name))) return;
  try { localStorage.setItem(key, JSON.stringify([...numbers])); } catch { /* a browser that keeps nothing */ }
}

function kept(key) {
  try { return new Map(JSON.parse(localStorage.getItem(key) ?? "[]")); } catch { return new Map(); }
}

// The first colours are chosen by hand; after them the golden angle makes every hue a new one.
export function paint(element, name) {
  const number = numbers.get(name) ?? 0;
  element.classList.add(number < NAMED ? `tint-${number}` : "tint-more");
  if (number >= NAMED) element.style.setProperty("--hue", (number * GOLDEN_DEGREES) % 360);
  return element;
}
