// The pages and the URL: the part after # is the whole state, so that a copied URL shows the same page.
import { remember } from "./dom.js";
import * as learn from "./learn.js";
import * as plan from "./plan.js";
import * as runs from "./runs.js";

const pages = { plan, runs, learn };
let shown = null;

export function readAddress() {
  const [name, query] = location.hash.slice(1).split(/\?(.*)/s);
  return { name: name in pages ? name : "plan", query: new URLSearchParams(query || "") };
}

function show() {
  const { name, query } = readAddress();
  for (const each of Object.keys(pages)) document.getElementById(each).hidden = each !== name;
  for (const link of document.querySelectorAll("[data-page]")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  if (shown !== name && shown) pages[shown].leave();
  shown = name;
  remember(name, location.hash || "#plan");
  pages[name].enter(query);
}

addEventListener("hashchange", show);
show();
