// Runs: a list that is polled, and curves that are fetched only if a run has grown.
import { draw } from "./chart.js";
import { $, SILENT, ask, h, number, setAddress } from "./dom.js";
import { bindFigures } from "./hover.js";

const CHARTS = [
  { field: "loss", title: "Loss", unit: "nats per token", wide: true }, { field: "tokens_per_s", title: "Throughput", unit: "tokens/s", fromZero: true },
  { field: "mfu", title: "Model FLOPs utilisation", unit: "% of dense peak", scale: 100, fromZero: true }, { field: "grad_norm", title: "Gradient norm", unit: "before clipping" },
  { field: "lr", title: "Learning rate", unit: "learning rate", fromZero: true }, { field: "memory_bytes", title: "Memory", unit: "peak, GiB", scale: 2 ** -30, fromZero: true },
  { field: "data_wait_s", title: "Waiting for data", unit: "ms per step", scale: 1e3, fromZero: true },
];
const AXES = { step: "steps", tokens: "tokens", time: "seconds of training" };
const EVERY_MS = 1500, FEW = 5;
let drawn = null, shown = null, axis = "step", list = [], curves = {}, polling = 0, log = null, figures = null, begun = false, detailed = "", fault = "";
const tints = new Map();  // a run keeps its colour when newer ones appear above it

export async function enter(query) {
  if (!begun) begin();
  drawn = query.has("run") ? query.getAll("run").filter(Boolean) : null;
  axis = query.get("x") in AXES ? query.get("x") : "step";
  for (const radio of document.getElementsByName("x")) radio.checked = radio.value === axis;
  curves = {};
  const wanted = query.get("show");
  clearTimeout(polling);
  if (!wanted) { shown = null; fault = ""; $("run").hidden = true; }
  await poll();
  if (wanted && wanted !== shown) open(wanted);
}

export function leave() { clearTimeout(polling); polling = -1; }

function begin() {
  begun = true;
  figures = CHARTS.map(chart => h("figure", { class: `chart live ${chart.wide ? "wide" : "half"}`, "data-field": chart.field }));
  $("charts").append(...figures);
  $("find").addEventListener("input", showList);
  $("all").addEventListener("click", () => { drawn = visible().map(run => run.name); changed(); });
  $("none").addEventListener("click", () => { drawn = []; changed(); });
  $("axis").addEventListener("change", event => { axis = event.target.value; curves = {}; changed(); });
  $("log").addEventListener("change", () => { log = null; $("log-text").textContent = ""; tail(); });
  addEventListener("resize", showCurves);
}

function changed() {
  const query = new URLSearchParams();
  for (const name of drawn) query.append("run", name);
  if (!drawn.length) query.append("run", "");
  if (axis !== "step") query.set("x", axis);
  if (shown) query.set("show", shown);
  setAddress("runs", query);
  showList();
  clearTimeout(polling);
  poll();
}

async function poll() {
  polling = 0;
  let wait = EVERY_MS;
  try {
    if (!document.hidden) {
      list = (await ask("/api/runs")).runs;
      if (drawn === null) drawn = list.slice(0, FEW).map(run => run.name);
      const incomplete = await fetchCurves();
      const running = list.filter(run => run.state === "running").length;
      const unread = list.reduce((sum, run) => sum + run.unread, 0);
      say(`${list.length} run${list.length === 1 ? "" : "s"}, ${running} running${incomplete ? "; reading" : ""}`
        + (unread ? `; ${unread.toLocaleString("en")} line${unread === 1 ? "" : "s"} cannot be read` : "") + (fault && `; ${fault}`), Boolean(fault));
      showList();
      showCurves();
      await tail();
      const now = list.find(run => run.name === shown);
      if (now && detailed !== growth(now)) await details(shown);
      if (incomplete) wait = 30;
    }
  } catch {
    say(SILENT, true);
  }
  if (polling === 0) polling = setTimeout(poll, wait);
}

function say(words, error = false) {
  $("runs-status").textContent = words;
  $("runs-status").classList.toggle("error", error);
}

async function fetchCurves() {
  const stale = list.filter(run => drawn.includes(run.name) && !(curves[run.name]?.read >= 1 && curves[run.name].version >= run.version));
  for (let start = 0; start < stale.length; start += 50) {
    const query = new URLSearchParams({ x: axis });
    for (const run of stale.slice(start, start + 50)) query.append("run", run.name);
    Object.assign(curves, (await ask(`/api/curves?${query}`)).runs);
  }
  return stale.some(run => !(curves[run.name]?.read >= 1));
}

const visible = () => list.filter(run => run.name.toLowerCase().includes($("find").value.toLowerCase()));
const tint = name => tints.has(name) ? tints.get(name) : tints.set(name, tints.size % 12).get(name);

function showList() {
  const focus = document.activeElement?.dataset?.key;
  document.querySelector("#list tbody").replaceChildren(...visible().map(run => h("tr", { "aria-selected": String(run.name === shown) },
    h("td", {}, h("input", { type: "checkbox", "data-key": `draw ${run.name}`, "aria-label": `draw ${run.name}`, checked: drawn.includes(run.name), onchange: event => {
      drawn = event.target.checked ? [...drawn, run.name] : drawn.filter(name => name !== run.name);
      changed();
    } })),
    h("td", {}, h("span", { class: "named" }, h("i", { class: `swatch tint-${tint(run.name)}` }), h("button", { type: "button", class: "open", "data-key": `open ${run.name}`, onclick: () => open(run.name) }, run.name))),
    h("td", {}, h("span", { class: `state ${run.state}` }, run.state)),
    h("td", { class: "number" }, number(run.step)),
    h("td", { class: "number" }, run.loss === null ? "–" : run.loss.toFixed(3)))));
  if (focus) document.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus();
}

function showCurves() {
  const names = drawn.filter(name => curves[name]);
  CHARTS.forEach((chart, place) => {
    const series = [];
    for (const name of names) {
      const one = curves[name].fields[chart.field], scale = values => chart.scale ? values.map(v => v === null ? null : v * chart.scale) : values;
      if (one) series.push({ label: name, tint: tint(name), x: curves[name].x, low: scale(one.low), high: one.high && scale(one.high) });
      const held = curves[name].val_loss, within = curves[name].x.length ? [curves[name].x[0], curves[name].x.at(-1)] : undefined;
      if (chart.field === "loss" && held.x.length) series.push({ label: `${name} validation`, tint: tint(name), x: held.x, low: held.y, within, dots: held.x.length < 3, dash: true });
    }
    figures[place].hidden = chart.field !== "loss" && !series.length;
    const marks = names.length <= 3 ? names.flatMap(name => curves[name].marks) : [];
    draw(figures[place], { ...chart, axis: AXES[axis], series, marks });
  });
}

async function open(name) {
  shown = name; log = null; detailed = fault = "";
  $("run").hidden = true;  // the run before is not this one, even if this one cannot be read
  if (!drawn.includes(name)) drawn = [...drawn, name];
  $("log-text").textContent = "";
  await details(name);
  changed();
}

const growth = run => [run.name, run.state, run.version + run.unread].join();

// The details of one run, refreshed whenever it has grown; a chart that did not change is left in place.
async function details(name) {
  const now = list.find(run => run.name === name), before = detailed.split(",").slice(0, -1).join();
  const run = now ? await ask(`/api/run?run=${encodeURIComponent(name)}`).catch(() => ({ error: SILENT })) : { error: "it is not in this folder" };
  if (shown !== name) return;
  if (run.error) {
    $("run").hidden = true;
    fault = `the run ${name} cannot be shown: ${run.error}`;
    say(fault, true);
    return;
  }
  fault = "";
  detailed = growth(now);
  $("run").hidden = false;
  $("run-title").textContent = name;
  $("unread").replaceChildren(...run.unread.map(told => h("p", { class: "note alarm" }, `${told}.`)));
  if ($("memory").dataset.shown !== run.memory) {
    $("memory").innerHTML = $("memory").dataset.shown = run.memory;  // drawn and escaped by the server
    bindFigures($("memory"));
  }
  $("run-job").textContent = run.job;
  $("samples").hidden = !run.samples.length;
  document.querySelector("#samples div").replaceChildren(...run.samples.flatMap(sample => [h("h3", {}, sample.name), h("pre", { tabindex: 0 }, sample.text)]));
  document.querySelector("#events tbody").replaceChildren(...run.events.toReversed().map(eventRow));
  $("logs").hidden = !run.logs.length;
  const rank = $("log").value;
  $("log").replaceChildren(...run.logs.map(each => h("option", { selected: each === rank }, each)));
  if ($("log").value !== rank) log = null;
  tail();
  if (before !== [name, now.state].join()) showPredicted(name);
}

function eventRow({ kind, time, elapsed_s, ...more }) {
  const pairs = Object.entries(more).map(([key, value]) => h("span", {}, h("i", {}, key), worded(value)));
  return h("tr", {}, h("td", { class: "number", title: time ?? null }, elapsed_s === undefined ? "" : `${number(elapsed_s, 4)} s`), h("th", { scope: "row" }, kind), h("td", { class: "pairs" }, ...pairs));
}

function worded(value) {
  if (value === null) return "—";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

async function showPredicted(name) {
  $("predicted").replaceChildren();
  const { html, error } = await ask(`/api/predicted?run=${encodeURIComponent(name)}`);
  if (shown !== name) return;
  if (html) $("predicted").innerHTML = html;  // escaped by the server
  else $("predicted").replaceChildren(h("p", { class: "note" }, error ?? "No prediction for this run: it has no steps yet, or ran on a device that the planner does not know."));
}

async function tail() {
  const name = $("log").value, run = shown, from = log;
  if (!shown || !name || $("run").hidden || $("logs").hidden) return;
  const query = new URLSearchParams({ run: shown, log: name, ...(log === null ? {} : { offset: log }) });
  const more = await ask(`/api/log?${query}`);
  if (more.error || name !== $("log").value || run !== shown || from !== log) return;  // requested twice, or no longer needed
  const box = $("log-text"), atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 5;
  if (log === null) box.textContent = "";
  log = more.offset;
  if (more.text) box.append(more.text);
  if (box.textContent.length > 2e5) box.textContent = box.textContent.slice(-1e5);
  if (atEnd) box.scrollTop = box.scrollHeight;
}
