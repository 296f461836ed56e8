// Runs: a list that is polled, and curves that are fetched only if a run has grown.
import { draw } from "./chart.js";
import { assign, paint } from "./colours.js";
import { forgetSettings, showSettings } from "./compare.js";
import { $, SILENT, ask, h, number, setAddress } from "./dom.js";
import * as one from "./run.js";

const CHARTS = [
  { field: "loss", title: "Loss", unit: "nats per token", wide: true, noisy: true }, { field: "tokens_per_s", title: "Throughput", unit: "tokens/s", fromZero: true, noisy: true },
  { field: "mfu", title: "Model FLOPs utilisation", unit: "% of dense peak", scale: 100, fromZero: true, noisy: true }, { field: "grad_norm", title: "Gradient norm", unit: "before clipping", noisy: true },
  { field: "lr", title: "Learning rate", unit: "learning rate", fromZero: true }, { field: "memory_bytes", title: "Memory", unit: "peak, GiB", scale: 2 ** -30, fromZero: true },
  { field: "data_wait_s", title: "Waiting for data", unit: "ms per step", scale: 1e3, fromZero: true, noisy: true },
];
const AXES = { step: "steps", tokens: "tokens", time: "seconds of training" };
const EVERY_MS = 1500, FEW = 5;
let drawn = null, axis = "step", compared = false, list = [], curves = {}, polling = 0, figures = null, begun = false;

export async function enter(query) {
  if (!begun) begin();
  drawn = query.has("run") ? query.getAll("run").filter(Boolean) : null;
  axis = query.get("x") in AXES ? query.get("x") : "step";
  for (const radio of document.getElementsByName("x")) radio.checked = radio.value === axis;
  $("smooth").value = query.get("smooth") ?? "0";
  if ($("smooth").selectedIndex < 0) $("smooth").value = "0";
  for (const which of ["x", "y"]) $(`log-${which}`).checked = (query.get("log") ?? "").includes(which);
  compared = query.get("compare") === "1";
  curves = {};
  const wanted = query.get("show");
  clearTimeout(polling);
  if (!wanted) one.close();
  await poll();
  if (wanted && wanted !== one.name()) await open(wanted);
}

export function leave() { clearTimeout(polling); polling = -1; }

function begin() {
  begun = true;
  figures = CHARTS.map(chart => h("figure", { class: `chart live ${chart.wide ? "wide" : "half"}`, "data-field": chart.field }));
  $("charts").append(...figures);
  $("find").addEventListener("input", showList);
  $("all").addEventListener("click", () => { drawn = visible().filter(run => run.kind !== "rehearsal").map(run => run.name); changed(); });
  $("none").addEventListener("click", () => { drawn = []; changed(); });
  $("axis").addEventListener("change", event => { axis = event.target.value; curves = {}; changed(); });
  $("look").addEventListener("change", () => { remember(); showCurves(); });
  $("compare-runs").addEventListener("click", async () => {
    compared = true;
    await changed();
    reveal("compare-title");
  });
  $("compare-close").addEventListener("click", () => { compared = false; changed(); });
  $("run-close").addEventListener("click", () => { one.close(); changed(); });
  addEventListener("resize", showCurves);
}

function remember() {
  const query = new URLSearchParams(), log = ["x", "y"].filter(which => $(`log-${which}`).checked).join("");
  for (const name of drawn) query.append("run", name);
  if (!drawn.length) query.append("run", "");
  if (axis !== "step") query.set("x", axis);
  if ($("smooth").value !== "0") query.set("smooth", $("smooth").value);
  if (log) query.set("log", log);
  if (compared) query.set("compare", "1");
  if (one.name()) query.set("show", one.name());
  setAddress("runs", query);
}

function changed() {
  remember();
  showList();
  clearTimeout(polling);
  return poll();
}

async function poll() {
  polling = 0;
  let wait = EVERY_MS;
  try {
    if (!document.hidden) {
      const answer = await ask("/api/runs");
      if (answer.error) throw new Error(answer.error);
      list = answer.runs;
      assign(list.map(run => run.name), answer.folder);
      if (drawn === null) drawn = list.filter(run => run.kind !== "rehearsal").slice(0, FEW).map(run => run.name);
      const incomplete = await fetchCurves();
      showList();
      showCurves();
      if (compared) await showSettings(listed()); else forgetSettings();
      await one.follow(list);
      say(incomplete);
      if (incomplete) wait = 30;
    }
  } catch {
    $("runs-status").textContent = SILENT;
    $("runs-status").classList.add("error");
  }
  if (polling === 0) polling = setTimeout(poll, wait);
}

function say(incomplete) {
  const running = list.filter(run => run.state === "running").length, unread = list.reduce((sum, run) => sum + run.unread, 0);
  const parts = [`${list.length} run${list.length === 1 ? "" : "s"}, ${running} running`];
  if (incomplete) parts.push("reading");
  if (unread) parts.push(`${unread.toLocaleString("en")} line${unread === 1 ? "" : "s"} cannot be read`);
  if (one.fault()) parts.push(one.fault());
  $("runs-status").textContent = parts.join("; ");
  $("runs-status").classList.toggle("error", Boolean(one.fault()));
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
const listed = () => list.map(run => run.name).filter(name => drawn.includes(name));

function showList() {
  const focus = document.activeElement?.dataset?.key;
  document.querySelector("#list tbody").replaceChildren(...visible().map(run => h("tr", { "aria-selected": String(run.name === one.name()) },
    h("td", {}, run.kind === "rehearsal" ? null : h("input", { type: "checkbox", "data-key": `draw ${run.name}`, "aria-label": `draw ${run.name}`, checked: drawn.includes(run.name), onchange: event => {
      drawn = event.target.checked ? [...drawn, run.name] : drawn.filter(name => name !== run.name);
      changed();
    } })),
    h("td", {}, h("span", { class: "named" }, paint(h("i", { class: "swatch" }), run.name), h("button", { type: "button", class: "open", "data-key": `open ${run.name}`, onclick: () => open(run.name) }, run.name)),
      run.note ? h("small", { class: "note" }, run.note) : null),
    h("td", {}, h("span", { class: `state ${run.state}` }, run.state)),
    h("td", { class: "number" }, number(run.step)),
    h("td", { class: "number" }, run.loss === null ? "–" : run.loss.toFixed(3)))));
  if (focus) document.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus();
  $("compare-runs").disabled = listed().length < 2;
}

function showCurves() {
  const names = drawn.filter(name => curves[name]);
  CHARTS.forEach((chart, place) => {
    const series = [];
    for (const name of names) {
      const { x, fields, val_loss: held } = curves[name], found = fields[chart.field];
      const scaled = values => values && chart.scale ? values.map(v => v === null ? null : v * chart.scale) : values;
      if (found) series.push({ run: name, label: name, x, low: scaled(found.low), high: scaled(found.high), mean: scaled(found.mean) });
      const within = x.length ? [x[0], x.at(-1)] : undefined;
      if (chart.field === "loss" && held.x.length) series.push({ run: name, label: `${name} validation`, x: held.x, low: held.y, within, dots: held.x.length < 3, dash: true });
    }
    figures[place].hidden = chart.field !== "loss" && !series.length;
    const marks = names.length <= 3 ? names.flatMap(name => curves[name].marks) : [];
    const look = { smoothing: chart.noisy ? Number($("smooth").value) / 100 : 0, logX: $("log-x").checked, logY: $("log-y").checked };
    draw(figures[place], { ...chart, ...look, axis: AXES[axis], series, marks });
  });
}

async function open(name) {
  const kind = list.find(run => run.name === name)?.kind;
  if (!drawn.includes(name) && kind !== "rehearsal") drawn = [...drawn, name];  // which has no curves
  await one.open(name, list);
  await changed();
  if (one.name() === name && !one.fault()) reveal("run-title");
}

// What a click opens is below the charts: go there, with the keyboard too.
function reveal(title) {
  $(title).scrollIntoView();
  $(title).focus({ preventScroll: true });
}
