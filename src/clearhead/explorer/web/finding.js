// Find a token by its text, among queries and keys, and go there in whatever view is open.

import { fill, h } from "./dom.js";

const MOST = 50; // that are listed

/** Ask for a text, list where it stands, and go to the place that is chosen. */
export function find(about, shown, set) {
  if (document.querySelector("dialog[open]")) return;
  const same = about.tokens.length === about.query_tokens.length && about.tokens.every((one, i) => one === about.query_tokens[i]);
  const places = [
    ...about.query_tokens.map((token, i) => ({ token, kind: "query", i })),
    ...about.tokens.map((token, i) => ({ token, kind: "key", i })),
  ].sort((a, b) => (same ? a.i - b.i : 0));
  const input = h("input", { type: "text", "aria-label": "Token to find", role: "combobox", "aria-expanded": "true", "aria-controls": "places", autocomplete: "off", spellcheck: "false", oninput: () => list(0), onkeydown: keys });
  const found = h("ul", { class: "found", id: "places", role: "listbox", "aria-label": "Places" });
  const words = h("p", { class: "muted", role: "status" });
  const box = h("dialog", { class: "finder", "aria-label": "Find a token" }, h("h2", {}, "Find a token"), input, words, found);
  let listed = [];
  let at = 0;

  function list(to) {
    const text = input.value.trim().toLocaleLowerCase();
    const all = places.filter((one) => one.token.toLocaleLowerCase().includes(text));
    listed = all.slice(0, MOST);
    at = Math.min(listed.length - 1, Math.max(0, to));
    words.textContent = all.length ? `${all.length} of ${places.length} places` : "No token has this text.";
    fill(found, listed.map((one, i) =>
      h("li", { role: "option", id: `place-${i}`, "aria-selected": String(i === at), onclick: () => go(one) }, one.token, h("span", { class: "muted" }, `${one.kind} ${one.i}`))));
    input.setAttribute("aria-activedescendant", listed.length ? `place-${at}` : "");
    found.children[at]?.scrollIntoView({ block: "nearest" });
  }

  function keys(event) {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") list(at + (event.key === "ArrowDown" ? 1 : -1));
    else if (event.key === "Enter" && listed[at]) go(listed[at]);
    else return;
    event.preventDefault();
  }

  function go({ kind, i }) {
    box.close();
    if (shown?.found) shown.found(kind, i);
    else set({ [kind]: i });
  }

  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  list(0);
  input.focus();
}
