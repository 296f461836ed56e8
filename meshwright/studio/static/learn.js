// The guide that ships with the package: a start page, groups in its order, and the way from page to page.
import { $, SILENT, ask, h } from "./dom.js";

let guide = null;
const wide = matchMedia("(min-width:901px)");
wide.addEventListener("change", () => { $("pages").open = wide.matches; });

export async function enter(query) {
  try {
    guide ??= await ask("/api/guide");
    const pages = [guide.start, ...guide.groups.flatMap(group => group.pages)];
    const place = Math.max(0, pages.findIndex(page => page.name === query.get("page"))), { name } = pages[place];
    const { html, error } = await ask(`/api/page?page=${encodeURIComponent(name)}`);
    if (error) throw new Error(error);
    showPages(name);
    $("page").innerHTML = html;  // escaped by the server
    $("page").append(h("nav", { class: "turn", "aria-label": "Previous and next page" },
      place ? link(pages[place - 1], name, "← ") : null, place + 1 < pages.length ? link(pages[place + 1], name, "", " →") : null));
  } catch {
    $("page").replaceChildren(h("p", { class: "status error" }, SILENT));  // not the page before under this name
  }
  const heading = query.get("at") && $("page").querySelector(`[id="${CSS.escape(query.get("at"))}"]`);
  if (heading) heading.scrollIntoView(); else scrollTo(0, 0);
}

export function leave() {}

function link(page, name, before = "", after = "") {
  return h("a", { href: `#learn?page=${encodeURIComponent(page.name)}`, "aria-current": page.name === name && "page" }, `${before}${page.title}${after}`);
}

// Only the group of the page that is read is open, and on a phone not even the list of groups.
function showPages(name) {
  $("pages").open = wide.matches;
  const groups = guide.groups.map(group => h("details", { open: group.pages.some(page => page.name === name) },
    h("summary", {}, group.title), ...group.pages.map(page => link(page, name))));
  $("guide").replaceChildren(link(guide.start, name), ...groups);
}
