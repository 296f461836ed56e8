// The details of one run: rehearsal or prediction, memory, notes, logs, samples, events and job.
import { $, SILENT, ask, h, number } from "./dom.js";
import { bindFigures } from "./hover.js";
import { beginNotes, showNote } from "./notes.js";

let shown = null, log = null, detailed = "", wrong = "", begun = false;

export const name = () => shown;
export const fault = () => wrong;

export function close() {
  shown = null; wrong = "";
  $("run").hidden = true;
}

export async function open(wanted, list) {
  if (!begun) begin();
  shown = wanted; log = null; detailed = wrong = "";
  $("run").hidden = true;  // the run before is not this one, even if this one cannot be read
  $("log-text").textContent = "";
  await details(wanted, list);
}

// Called after every poll: details only if the run has grown.
export async function follow(list) {
  await tail();
  const now = list.find(run => run.name === shown);
  if (now && detailed !== growth(now)) await details(shown, list);
}

function begin() {
  begun = true;
  $("log").addEventListener("change", () => { log = null; $("log-text").textContent = ""; tail(); });
  beginNotes();
}

const growth = run => [run.name, run.state, run.version + run.unread].join();

// Refreshed whenever the run has grown; a chart that did not change is left in place.
async function details(wanted, list) {
  const now = list.find(run => run.name === wanted), before = detailed.split(",").slice(0, -1).join();
  const run = now ? await ask(`/api/run?run=${encodeURIComponent(wanted)}`).catch(() => ({ error: SILENT })) : { error: "it is not in this folder" };
  if (shown !== wanted) return;
  $("run").hidden = Boolean(run.error);
  wrong = run.error ? `the run ${wanted} cannot be shown: ${run.error}` : "";
  if (run.error) return;
  detailed = growth(now);
  $("run-title").textContent = wanted;
  $("unread").replaceChildren(...run.unread.map(report => h("p", { class: "note alarm" }, `${report}.`)));
  showNote(wanted, run.note);
  if ($("memory").dataset.shown !== run.memory) {
    $("memory").innerHTML = $("memory").dataset.shown = run.memory;  // drawn and escaped by the server
    bindFigures($("memory"));
  }
  if ($("rehearsal").dataset.shown !== run.rehearsal) $("rehearsal").innerHTML = $("rehearsal").dataset.shown = run.rehearsal;  // likewise
  $("run-job").textContent = run.job;
  $("samples").hidden = !run.samples.length;
  document.querySelector("#samples div").replaceChildren(...run.samples.flatMap(sample => [h("h3", {}, sample.name), h("pre", { tabindex: 0 }, sample.text)]));
  document.querySelector("#events tbody").replaceChildren(...run.events.toReversed().map(eventRow));
  $("logs").hidden = !run.logs.length;
  const rank = $("log").value;
  $("log").replaceChildren(...run.logs.map(each => h("option", { selected: each === rank }, each)));
  if ($("log").value !== rank) log = null;
  tail();
  if (now.kind === "rehearsal") $("predicted").replaceChildren();  // the plan is in its pictures
  else if (before !== [wanted, now.state].join()) showPredicted(wanted);
}

function eventRow({ kind, time, elapsed_s, ...more }) {
  const pairs = Object.entries(more).map(([key, value]) => h("span", {}, h("i", {}, key), worded(value)));
  return h("tr", {}, h("td", { class: "number", title: time ?? null }, elapsed_s === undefined ? "" : `${number(elapsed_s, 4)} s`), h("th", { scope: "row" }, kind), h("td", { class: "pairs" }, ...pairs));
}

export function worded(value) {
  if (value === null) return "—";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

async function showPredicted(wanted) {
  $("predicted").replaceChildren();
  const { html, error } = await ask(`/api/predicted?run=${encodeURIComponent(wanted)}`).catch(() => ({ error: SILENT }));
  if (shown !== wanted) return;
  if (html) $("predicted").innerHTML = html;  // escaped by the server
  else $("predicted").replaceChildren(h("p", { class: "note" }, error ?? "No prediction for this run: it has no steps yet, or ran on a device that the planner does not know."));
}

async function tail() {
  const file = $("log").value, run = shown, from = log;
  if (!shown || !file || $("run").hidden || $("logs").hidden) return;
  const query = new URLSearchParams({ run: shown, log: file, ...(log === null ? {} : { offset: log }) });
  const more = await ask(`/api/log?${query}`);
  if (more.error || file !== $("log").value || run !== shown || from !== log) return;  // requested twice, or no longer needed
  const box = $("log-text"), atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 5;
  if (log === null) box.textContent = "";
  log = more.offset;
  if (more.text) box.append(more.text);
  if (box.textContent.length > 2e5) box.textContent = box.textContent.slice(-1e5);
  if (atEnd) box.scrollTop = box.scrollHeight;
}
