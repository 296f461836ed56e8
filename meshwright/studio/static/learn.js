// The guide that ships with the package.
import { $, ask, h } from "./dom.js";

let titles = null;

export async function enter(query) {
  titles ??= (await ask("/api/guide")).titles;
  const names = Object.keys(titles), name = query.get("page") in titles ? query.get("page") : "playbook/README";
  let folder = "";
  $("guide").replaceChildren(...names.flatMap(each => {
    const link = h("a", { href: `#learn?page=${encodeURIComponent(each)}`, "aria-current": each === name && "page" }, titles[each]);
    const before = folder;
    folder = each.includes("/") ? each.split("/")[0] : "";
    return folder === before ? [link] : [h("b", {}, folder), link];
  }));
  $("page").innerHTML = (await ask(`/api/page?page=${encodeURIComponent(name)}`)).html;  // escaped by the server
  if (query.get("at")) $("page").querySelector(`[id="${CSS.escape(query.get("at"))}"]`)?.scrollIntoView();
  else if (query.has("page") && $("page").offsetTop > innerHeight / 2) $("page").scrollIntoView();  // below the list
  else scrollTo(0, 0);
}

export function leave() {}
