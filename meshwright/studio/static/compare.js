// A table of the settings in which some runs' jobs differ.
import { paint } from "./colours.js";
import { $, SILENT, ask, h } from "./dom.js";
import { worded } from "./run.js";

let shown = "";

export function forgetSettings() {
  shown = "";
  $("compare").hidden = true;
}

// A job never changes while its run exists: what was asked once is not asked again.
export async function showSettings(names) {
  if (shown === JSON.stringify(names)) return;
  shown = JSON.stringify(names);
  $("compare").hidden = names.length < 2;
  if (names.length < 2) return;
  const answer = await ask(`/api/settings?${new URLSearchParams(names.map(name => ["run", name]))}`).catch(() => ({ error: SILENT }));
  const { runs, rows, same, left_out: more, error } = answer;
  if (shown !== JSON.stringify(names)) return;
  if (error) shown = "";  // asked again with the next poll
  $("compare-note").textContent = error ?? [`${same} setting${same === 1 ? " is" : "s are"} the same`, names.length > runs.length ? `only the first ${runs.length} runs are compared` : "", more ? `${more} more differ` : ""].filter(Boolean).join("; ");
  const head = (runs ?? []).map(name => h("th", { scope: "col" }, paint(h("i", { class: "swatch" }), name), name));
  document.querySelector("#compare thead tr").replaceChildren(h("th", { scope: "col" }, "setting"), ...head);
  document.querySelector("#compare tbody").replaceChildren(...(rows ?? []).map(row =>
    h("tr", {}, h("th", { scope: "row" }, row.setting), ...row.values.map(value => h("td", {}, worded(value))))));
}
