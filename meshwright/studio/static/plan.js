// Plan: the form is the state, the URL stores it, and every change queries the planner.
import { $, SILENT, ask, h, number, setAddress } from "./dom.js";
import { bindFigures } from "./hover.js";
import { LAYOUTS, hideAnswer, showAnswer, showInputs } from "./questions.js";

const SLIDERS = ["layers", "width", "heads", "kv_heads", "head_dim", "ffn_width", "vocab_size", "experts.count", "experts.top_k",
  "experts.ffn_width", "experts.shared_width"];
const CLUSTERS = { "8 × H100": [1, 8, "h100"], "2 × 8 × A100 80 GB": [2, 8, "a100-80gb"], "8 × H200": [1, 8, "h200"],
  "16 × 8 × H100": [16, 8, "h100"], "64 × 8 × H100": [64, 8, "h100"], "16 × 4 × A100 64 GB": [16, 4, "a100-64gb"],
  "4 × L40S": [1, 4, "l40s"], "2 × RTX 3090": [1, 2, "rtx-3090"] };
const NUMBERS = ["node_link", "network_link", "pue", "co2"], TRAINING = ["tokens", "days", "price", "pue", "co2"];
const ASKED = ["clusters", "budget"], WRITTEN = ["seq", "batch", "tokens", "days", "price", ...ASKED];
const form = $("question"), fields = form.elements;
let choices = null, shape = {}, base = {}, pick = null, own = false, busy = false, again = false, turn = 0, timer = 0;

export async function enter(query) {
  if (!choices) await begin();
  shape = parsed(query.get("shape"), {});
  take(fields.model, query.get("model") ?? (Object.keys(shape).length ? "" : "llama-3.2-1b"));
  take(fields.gpu, query.get("gpu") || "h100");
  take(fields.ask, query.get("ask") || LAYOUTS);
  for (const name of ["nodes", "gpus", ...NUMBERS, ...WRITTEN]) fields[name].value = query.get(name) ?? { nodes: 1, gpus: 8 }[name] ?? "";
  const allowed = parsed(query.get("allow"), []);
  for (const box of form.querySelectorAll("[name=allow]")) box.checked = allowed.includes(box.value);
  pick = query.get("pick");
  own = Boolean(pick);
  matchCluster();
  refresh();
}

export function leave() { clearTimeout(timer); turn += 1; }

// An unknown name is kept, so that the planner rejects it by name instead of planning something else.
function take(select, name) {
  if (![...select.options].some(option => option.value === name)) select.append(h("option", {}, name));
  select.value = name;
}

// Parts of a truncated or hand-typed URL that cannot be parsed are ignored.
function parsed(text, otherwise) {
  try {
    const found = JSON.parse(text);
    return found && Array.isArray(found) === Array.isArray(otherwise) && typeof found === "object" ? found : otherwise;
  } catch { return otherwise; }
}

async function begin() {
  choices = await ask("/api/choices");
  fields.model.append(h("option", { value: "" }, "custom shape"), ...Object.keys(choices.models).map(name => h("option", {}, name)));
  fields.gpu.append(...Object.entries(choices.gpus).map(([name, { gib, guessed }]) => h("option", { value: name }, `${name} (${gib} GiB${guessed ? ", rates guessed" : ""})`)));
  fields.ask.append(...Object.entries(choices.questions).map(([name, words]) => h("option", { value: name }, words)));
  fields.cluster.append(h("option", { value: "" }, "as below"), ...Object.keys(CLUSTERS).map(name => h("option", {}, name)));
  $("shape").append(...SLIDERS.map(slider));
  $("allowed").append(...choices.allowed.map(word => h("label", {}, h("input", { type: "checkbox", name: "allow", value: word }), word)));
  form.addEventListener("input", changed);
  form.addEventListener("submit", event => event.preventDefault());
  $("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText($("job").textContent);
      told("copied", false, "copied");
    } catch {  // a page from another machine may not access the clipboard
      getSelection().selectAllChildren($("job"));
      told("your browser does not let this page copy; the text is selected, press Ctrl-C", true, "copied");
    }
  });
}

function slider(name) {
  const [least, most] = choices.limits[name];
  const none = name === "experts.count" ? 0 : least;  // no experts: a plain feed-forward
  const exact = h("input", { type: "number", min: none, max: most, "data-shape": name, "aria-label": name });
  const [top, step] = { layers: [160, 1], heads: [160, 1], kv_heads: [160, 1], head_dim: [256, 8], width: [20480, 128],
    ffn_width: [65536, 128], vocab_size: [262144, 256], "experts.count": [512, 1], "experts.top_k": [32, 1],
    "experts.ffn_width": [16384, 128], "experts.shared_width": [16384, 128] }[name];
  const range = h("input", { type: "range", min: Math.min(none, step), max: top, step, "data-shape": name, "aria-label": `${name}, slider` });
  const { label, meaning } = choices.shape[name];
  return h("div", { title: meaning }, h("label", {}, label, exact), range);
}

// The shape with one number changed. A plain feed-forward becomes experts with the first of their numbers; none is plain again.
function withNumber(name, value) {
  const [field, key] = name.split(".");
  if (!key) return value ? { ...shape, [field]: value } : shape;
  const now = { ...base, ...shape }, experts = now.experts ?? { count: 8, top_k: 2, ffn_width: now.ffn_width };
  if (key === "count" && !value) return { ...shape, experts: null };
  return { ...shape, experts: { ...experts, [key]: value } };
}

async function changed(event) {
  const target = event.target;
  if (target.name === "config") { await upload(target); return; }
  if (target.dataset.shape) {
    const value = Math.round(Number(target.value));
    if (target.value === "") return;
    shape = withNumber(target.dataset.shape, value);
    if (base[target.dataset.shape] === value && fields.model.value) delete shape[target.dataset.shape];
  }
  if (target.name === "model") { shape = {}; told(""); }
  if (target.name === "cluster" && CLUSTERS[target.value])
    [fields.nodes.value, fields.gpus.value, fields.gpu.value] = CLUSTERS[target.value];
  if (!TRAINING.includes(target.name) && target.name !== "ask") own = false;
  matchCluster();
  refresh();
}

async function upload(input) {
  const file = input.files[0];
  if (!file) return;
  try {
    if (file.size > 1e6) throw new Error("it is larger than a config.json");
    const answer = await ask("/api/plan", { part: "config", config: JSON.parse(await file.text()) });
    if (answer.error) throw new Error(answer.error);
    fields.model.value = "";
    shape = answer.shape;
    own = false;
    refresh();
    told(`using the shape of ${file.name}`);
  } catch (error) {
    told(`${file.name} cannot be used: ${error.message}`, true);
  }
  input.value = "";  // so that the same file can be chosen again after a fix
}

function matchCluster() {
  const now = JSON.stringify([Number(fields.nodes.value), Number(fields.gpus.value), fields.gpu.value]);
  fields.cluster.value = Object.keys(CLUSTERS).find(name => JSON.stringify(CLUSTERS[name]) === now) || "";
}

function state() {
  const asked = { nodes: Number(fields.nodes.value), gpus: Number(fields.gpus.value), gpu: fields.gpu.value };
  if (fields.model.value) asked.model = fields.model.value;
  if (Object.keys(shape).length) asked.shape = shape;
  for (const name of NUMBERS) if (fields[name].value) asked[name] = Number(fields[name].value);
  const other = fields.ask.value !== LAYOUTS;
  if (other) asked.ask = fields.ask.value;
  for (const name of WRITTEN)  // as people write it: 15T
    if (fields[name].value.trim() && (other || !ASKED.includes(name))) asked[name] = fields[name].value.trim();
  const allow = [...form.querySelectorAll("[name=allow]:checked")].map(box => box.value);
  return allow.length ? { ...asked, allow } : asked;
}

function refresh() {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(state())) query.set(name, typeof value === "object" ? JSON.stringify(value) : value);
  if (own) query.set("pick", pick);
  setAddress("plan", query);
  showInputs(form, fields.ask.value);
  again = true;
  if (!busy) run();
}

// One request at a time: while it runs, only the latest change is queued.
async function run() {
  busy = true;
  while (again) {
    again = false;
    turn += 1;
    clearTimeout(timer);
    $("answer").classList.add("late");
    if (fields.ask.value === LAYOUTS) await search(state(), turn, false);
    else answerLater(state(), turn, 150);
  }
  busy = false;
}

// Not awaited: a change of the form must not wait for it, and interrupts it.
function answerLater(asked, mine, pause) {
  say("searching …");
  timer = setTimeout(() => mine === turn && answer(asked, mine), pause);
}

async function answer(asked, mine) {
  const begun = performance.now();
  const found = await ask("/api/plan", { part: "question", ...asked }).catch(() => ({ error: SILENT }));
  if (mine !== turn) return;
  if (found.interrupted) { answerLater(asked, mine, 500); return; }  // by the page of somebody else
  $("answer").classList.remove("late");
  $("found").hidden = true;
  hideAnswer();
  mark(found.field);
  if (found.error) { say(found.error, true); return; }
  showAnswer(choices.questions[asked.ask], found, open);
  say(`answered in ${Math.round(performance.now() - begun)} ms`);
}

// Show one of an answer's layouts: the form as it was asked about, and the question that lists layouts.
function open({ pick: wanted, shape: shown, ...values }) {
  for (const [name, value] of Object.entries(values)) if (name === "gpu") take(fields.gpu, value); else fields[name].value = value;
  if (shown) { shape = shown; fields.model.value = ""; }
  fields.ask.value = LAYOUTS;
  pick = wanted;
  own = true;
  matchCluster();
  refresh();
}

async function search(asked, mine, full) {
  const begun = performance.now();
  const found = await ask("/api/plan", { part: "search", ...asked, ...(full ? { full } : {}) }).catch(() => ({ error: SILENT }));
  if (mine !== turn) return;
  $("answer").classList.remove("late");
  $("found").hidden = Boolean(found.error);  // what is there answers an earlier request
  hideAnswer();
  mark(found.field);
  if (found.error) { forget(found.error); return; }
  base = found.shape;
  showShape(found);
  // A layout that the user chose stays selected, even if a shared URL names one that is not among the best.
  if (!own) pick = found.rows[0]?.pick ?? null;
  showRows(found);
  const more = found.whole ? "" : "; still searching";
  say(found.nothing || `${found.bounded.toLocaleString("en")} layouts bounded, ${found.predicted} predicted in ${Math.round(performance.now() - begun)} ms${more}`, Boolean(found.nothing));
  await choose(asked, mine);
  if (!found.whole && mine === turn) timer = setTimeout(() => mine === turn && search(asked, mine, true), 150);
}

// After an error the form keeps only what the user chose: nothing computed for an earlier request.
function forget(words) {
  say(words, true);
  showNumbers({ ...choices.models[fields.model.value], ...shape });
  for (const name of ["seq", "batch"]) fields[name].placeholder = "";
  $("size").textContent = $("practice").textContent = "";
  delete $("chosen").dataset.shown;
}

// The field that an error is about.
function mark(field) {
  for (const input of form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  for (const input of field ? form.querySelectorAll(`[name="${CSS.escape(field)}"],[data-shape="${CSS.escape(field)}"]`) : []) {
    input.setAttribute("aria-invalid", "true");
    input.closest("details")?.setAttribute("open", "");
  }
}

function showNumbers(numbers) {
  for (const input of document.querySelectorAll("[data-shape]")) if (input !== document.activeElement) input.value = at(numbers, input.dataset.shape) ?? "";
}

function at(numbers, name) { return name.split(".").reduce((table, key) => table?.[key], numbers); }

function showShape(found) {
  showNumbers(found.shape);
  $("size").textContent = `${found.parameters_words} parameters${found.active_words ? `, ${found.active_words} active` : ""}`;
  fields.seq.placeholder = found.sequence;
  fields.batch.placeholder = found.batch_tokens;
  $("practice").textContent = found.practice || `${found.batch} sequence${found.batch === 1 ? "" : "s"} per step`;
}

function showRows(found) {
  const rows = found.rows.map((row, place) => h("tr", { "aria-selected": String(row.pick === pick), "data-pick": row.pick, onclick: () => select(row.pick) },
    h("td", {}, h("button", { type: "button", class: "pick", "aria-pressed": String(row.pick === pick) }, row.layout)),
    h("td", { class: "number", "data-name": "tokens/s per GPU" }, place && row.tie ? h("span", { title: "predictions do not tell it apart from the first" }, "≈ ") : null, number(row.tokens_per_s_per_gpu), between(row.interval, number)),
    h("td", { class: "number", "data-name": "MFU" }, row.mfu === null ? "–" : `${(100 * row.mfu).toFixed(1)}%`),
    h("td", { class: "number", "data-name": "step" }, `${number(row.step_s)} s`),
    h("td", { class: "number", "data-name": "GiB" }, row.gib.toFixed(1), between(row.gib_interval, size => size.toFixed(0))),
    ...whole(row.training),
    h("td", { "data-name": "limited by" }, row.limited_by)));
  document.querySelector("#layouts tbody").replaceChildren(...rows);
  const first = found.rows[0]?.training;
  $("layouts-training").textContent = fields.tokens.value.trim() ? "days" : "tokens";
  $("layouts-training").hidden = !first;
  $("layouts-cost").hidden = (first?.cost ?? null) === null;
  $("training").textContent = found.training;
  $("layouts").closest("section").hidden = !found.rows.length;
  $("rejected").hidden = !found.misses.length;
  document.querySelector("#rejected h2").textContent = found.rows.length ? "Faster, but does not fit" : "Does not fit";
  document.querySelector("#rejected ul").replaceChildren(...found.misses.map(miss => h("li", {}, miss)));
}

// The 80% interval, small, under its number.
function between([low, high], words) {
  return h("small", { class: "between", title: "8 of 10 such predictions end up between these" }, `${words(low)}–${words(high)}`);
}

// Cells of the whole training: its days, or the tokens of the days that are given, and what it costs.
function whole(training) {
  if (!training) return [];
  const name = fields.tokens.value.trim() ? "days" : "tokens";
  const cells = [h("td", { class: `number${training.late ? " late-days" : ""}`, "data-name": name }, name === "days" ? number(training.days) : training.tokens_words)];
  return training.cost === null ? cells : [...cells, h("td", { class: "number", "data-name": "cost" }, number(training.cost))];
}

function select(wanted) {
  pick = wanted;
  own = true;
  for (const row of document.querySelectorAll("#layouts tbody tr")) {
    row.setAttribute("aria-selected", String(row.dataset.pick === pick));
    row.querySelector("button").setAttribute("aria-pressed", String(row.dataset.pick === pick));
  }
  const query = new URLSearchParams(location.hash.split(/\?(.*)/s)[1] || "");
  query.set("pick", pick);
  setAddress("plan", query);
  choose(state(), turn);
}

async function choose({ tokens, days, price, ...asked }, mine) {  // one layout is the same whatever is trained with it
  $("chosen").hidden = !pick;
  if (!pick || $("chosen").dataset.shown === JSON.stringify([asked, pick])) return;
  const wanted = pick, one = await ask("/api/plan", { part: "layout", ...asked, pick }).catch(() => ({ error: SILENT }));
  if (mine !== turn || wanted !== pick) return;
  if (one.error) {
    $("chosen").hidden = true;
    delete $("chosen").dataset.shown;
    say(one.error, true);
    return;
  }
  $("chosen").dataset.shown = JSON.stringify([asked, pick]);
  told("", false, "copied");
  $("chosen-title").textContent = one.title;
  $("pictures").innerHTML = one.pictures;  // drawn and escaped by the server
  bindFigures($("pictures"));
  const notes = [...one.evidence, `profile: ${one.profile}`, ...one.guessed.map(guess => `guessed: ${guess}`)];
  $("guessed").replaceChildren(...notes.map(note => h("p", { class: "note" }, note)));
  $("job").textContent = one.job;
  const file = new Blob([one.job], { type: "application/toml" });
  URL.revokeObjectURL($("download").href);
  $("download").href = URL.createObjectURL(file);
  $("commands").replaceChildren(...one.commands.flatMap(each => [h("dt", {}, each.what), h("dd", {}, h("code", {}, each.command))]));
}

function told(words, error = false, place = "upload") {
  $(place).textContent = words;
  $(place).classList.toggle("error", error);
}

function say(words, error = false) {
  told(words, error, "plan-status");
}
