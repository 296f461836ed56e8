// The guide that ships with the package.
import { $, ask, h } from "./dom.js";

let titles = null;

export async function enter(query) {
  titles ??= (await ask("/api/guide")).titles;
  const names = Object.keys(titles), name = query.get("page") in titles ? query.get("page") : names[0];
  $("guide").replaceChildren(...names.map(each => h("a",
    { href: `#learn?page=${encodeURIComponent(each)}`, "aria-current": each === name && "page" }, titles[each])));
  $("page").innerHTML = (await ask(`/api/page?page=${encodeURIComponent(name)}`)).html;  // escaped by the server
}

export function leave() {}
