// Keys, the same in every view; a view adds its own.

import { h } from "./dom.js";

const EVERYWHERE = [
  ["1 … 9, 0", "open a view"],
  ["← ↑ → ↓", "move"],
  ["Enter", "pin what is pointed at"],
  ["Esc", "let go"],
  ["/", "find a token"],
  ["[ ]", "the layer before, the next"],
  [", .", "the head before, the next"],
  ["t", "a tour of a minute"],
  ["?", "these keys"],
];

let own = [];

/** Show the keys. */
export function help() {
  if (document.querySelector("dialog[open]")) return;
  const said = new Set();
  const list = [...own, ...EVERYWHERE].filter(([key]) => !said.has(key) && said.add(key))
    .flatMap(([key, words]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, words)]);
  const box = h(
    "dialog",
    { "aria-label": "Keys" },
    h("h2", {}, "Keys"),
    h("dl", {}, list),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")),
  );
  document.body.append(box);
  box.addEventListener("close", () => box.remove());
  box.showModal();
}

export function listenToKeys({ views, go, current, everywhere }) {
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    // who types, chooses or is asked something means what is focused; a button takes its own Enter and space
    if (event.target.closest?.("input, textarea, select, dialog, .tour")) return;
    if (event.target.closest?.("button, a, summary") && ["Enter", " "].includes(event.key)) return;
    const number = event.key === "0" ? 10 : Number(event.key);
    if (event.key === "?") help();
    else if (number >= 1 && number <= views().length) go(views()[number - 1].id);
    else {
      const act = current()?.keys?.[event.key] ?? everywhere(event.key);
      if (!act) return;
      act(event);
    }
    event.preventDefault();
  });
}

/** What a view's own keys do, in words, for the list. */
export function describe(words) {
  own = words;
}
