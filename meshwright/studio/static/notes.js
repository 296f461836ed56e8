// A note per run, saved in its folder when the user leaves the field; text that is being written is never replaced.
import { $, SILENT, ask } from "./dom.js";

let run = null, saved = "";

export function beginNotes() {
  $("note").addEventListener("change", () => save(run, $("note").value));
}

export function showNote(name, text) {
  const another = name !== run, unsaved = !another && $("note").value !== saved;
  run = name;
  if (another) say("");
  if (unsaved) return;
  saved = text;
  if ($("note").value !== text) $("note").value = text;
}

async function save(name, text) {
  const answer = await ask("/api/note", { run: name, text, before: saved }).catch(() => ({ error: SILENT }));
  if (name !== run) return;
  if (!answer.error) saved = text;
  say(answer.error ? `not saved: ${answer.error}` : "saved", Boolean(answer.error));
}

function say(words, error = false) {
  $("note-status").textContent = words;
  $("note-status").classList.toggle("error", error);
}
