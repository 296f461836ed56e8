// Small helpers; text is always inserted as text, never as markup.
export const $ = id => document.getElementById(id);

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter(child => child !== null));
  return made;
}

export const SILENT = "the studio does not respond; is it still running?";

export async function ask(path, question) {
  const options = question && {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question),
  };
  const reply = await fetch(path, options);
  return reply.json();
}

export function number(value, digits = 3) {
  if (typeof value !== "number") return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size && size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(digits));
}

export function setAddress(page, query) {
  const text = query.toString();
  const wanted = `#${page}${text ? "?" + text : ""}`;
  if (location.hash !== wanted) history.replaceState(null, "", wanted);
  remember(page, wanted);
}

// The link to a page restores its last state.
export function remember(page, address) {
  document.querySelector(`[data-page=${page}]`).setAttribute("href", address);
}
