// The plan page's other questions: which inputs they need, and their answer as one table.
import { $, h } from "./dom.js";

export const LAYOUTS = "layouts";

// Inputs that only some questions use.
export function showInputs(form, question) {
  for (const input of form.querySelectorAll("[data-asks]")) input.hidden = !input.dataset.asks.split(" ").includes(question);
}

export function hideAnswer() {
  $("other").hidden = true;
}

// `open` shows a row's layout: it changes the form to what the row is about.
export function showAnswer(title, found, open) {
  $("other").hidden = false;
  $("other-title").textContent = title;
  $("other-sentence").textContent = found.sentence;
  $("other-picture").innerHTML = found.picture;  // drawn and escaped by the server
  document.querySelector("#other-table thead tr").replaceChildren(...found.columns.map(({ name, number }) => h("th", { scope: "col", class: number ? "number" : null }, name)));
  document.querySelector("#other-table tbody").replaceChildren(...found.rows.map(row => h("tr", { "aria-selected": row.chosen ? "true" : null },
    ...row.cells.map((cell, place) => cellOf(cell, found.columns[place], row.opens && place === row.cells.length - 1 ? () => open(row.opens) : null)))));
  $("other-notes").replaceChildren(...found.notes.map(note => h("p", { class: "note" }, note)));
}

function cellOf(text, { name, number }, open) {
  const words = open ? h("button", { type: "button", class: "open", title: "Show this layout", onclick: open }, text) : text;
  return h("td", { class: number ? "number" : null, "data-name": name }, words);
}
