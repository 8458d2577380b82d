// The formula in plain NumPy: click a line to see the shape and the numbers that it gave for this call.

import { fill, h } from "../dom.js";
import { full, two } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

export const code = {
  id: "code",
  title: "Code",
  lede: "The whole mechanism, line by line. Click a line, or move with ↑ and ↓, to see what it gave.",
  async show(root, { about, ask, set, say, state }) {
    describe([["↑ ↓", "the line before, the next"]]);
    const head = place(state(), "head", about.heads);
    const lines = await ask("/code", { head: head || null });
    const listing = h("ol", { class: "listing" });
    const panel = h("div", { class: "card panel scroll" });
    root.append(h("div", { class: "halves" }, h("div", { class: "card" }, listing), panel));

    function update(now) {
      const at = place(now, "line", lines.length);
      fill(listing, lines.map((one, i) =>
        h("li", {}, h("button", { type: "button", "aria-current": String(i === at), onclick: () => set({ line: i }) }, one.line))));
      const one = lines[at];
      say(`${one.line}: ${one.says}`);
      const columns = one.value[0].length === about.tokens.length ? about.tokens : one.value[0].map((_, c) => String(c + 1));
      fill(panel, h("h2", {}, one.name), h("p", { class: "muted" }, `${one.says} · shape (${one.shape.join(", ")})`),
        h("table", {},
          h("thead", {}, h("tr", {}, h("td", {}), columns.map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, one.value.map((row, i) =>
            h("tr", {}, h("th", { scope: "row" }, about.query_tokens[i] ?? String(i)), row.map((x) => h("td", { title: full(x) }, two(x))))))));
    }

    const step = (by) => set({ line: Math.min(lines.length - 1, Math.max(0, place(state(), "line", lines.length) + by)) }, { quiet: true });
    return { update, shown: () => update(state()), keys: { ArrowUp: () => step(-1), ArrowDown: () => step(1) } };
  },
};
