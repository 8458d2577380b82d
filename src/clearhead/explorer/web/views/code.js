// The formula in NumPy and in loops: click a line to see what it gave; and a doctor for a function of one's own.

import { fill, h, segment } from "../dom.js";
import { full, two, value } from "../format.js";
import { describe } from "../keys.js";
import { pasted } from "../pasted.js";
import { place } from "../state.js";

const WAYS = [["numpy", "NumPy"], ["loops", "loops"], ["yours", "your function"]];

export const code = {
  id: "code",
  title: "Code",
  byHead: true,
  lede: "The whole mechanism, line by line. Click a line, or move with ↑ and ↓, to see the shape and the numbers that it gave.",
  async show(root, context) {
    const { about, ask, set, say, state } = context;
    describe([["↑ ↓", "the line before, the next"], ["← →", "the pass before, the next, in loops"]]);
    const head = place(state(), "head", about.heads);
    const written = await ask("/code", { head: head || null });
    const lines = written.lines;
    const switches = h("div", { class: "controls" });
    const listing = h("ol", { class: "listing" });
    const panel = h("div", { class: "card panel scroll" });
    const body = h("div", { class: "halves" });
    root.append(switches, body);
    const own = pasted(context);
    let loops = null;

    const way = (now) => (WAYS.some(([one]) => one === now.way) ? now.way : "numpy");

    async function update(now) {
      const chosen = way(now);
      fill(switches, segment("As", WAYS, chosen, (one) => set({ way: one, line: null, pass: null })));
      if (chosen === "yours") {
        fill(body, own.element);
        return own.update(now);
      }
      if (chosen === "loops") loops ??= await ask("/loops", { head: head || null });
      if (body.firstChild !== listing.parentElement || !body.contains(panel)) fill(body, h("div", { class: "card" }, listing), panel);
      const all = chosen === "loops" ? loops.lines : lines;
      const first = chosen === "loops" ? all.findIndex((one) => one.passes.length) : 0;
      const at = place(now, "line", all.length, first);
      const focused = listing.contains(document.activeElement);
      fill(listing, all.map((one, i) =>
        h("li", {}, h("button", { type: "button", "aria-current": String(i === at), disabled: chosen === "loops" && !one.passes.length, onclick: () => set({ line: i, pass: null }) }, one.line, one.says ? h("span", { class: "says" }, `  # ${one.says}`) : null))));
      if (focused) listing.querySelector("[aria-current=true]")?.focus();
      if (chosen === "loops") looped(all[at], now);
      else plain(all[at]);
    }

    function plain(one) {
      say(`${one.line}: ${one.says}`);
      const columns = one.value[0].length === about.tokens.length ? about.tokens : one.value[0].map((_, c) => String(c + 1));
      const cut = one.value.length < one.shape[0] || one.value[0].length < one.shape[1] ? h("p", { class: "muted" }, `The first ${one.value.length} × ${one.value[0].length} are shown.`) : null;
      fill(panel, h("h2", {}, one.name), h("p", { class: "muted" }, `${one.says} · shape (${one.shape.join(", ")})`), table(one.value, columns), cut);
    }

    function looped(one, now) {
      const at = place(now, "pass", one.passes.length);
      const pass = one.passes[at];
      const slider = h("input", { type: "range", class: "scrubber", min: 0, max: one.passes.length - 1, value: at, "aria-label": "Pass", oninput: (event) => set({ pass: event.target.value }, { quiet: true }) });
      slider.value = at;
      const counters = Object.entries(pass.at).map(([name, number]) => `${name} = ${number}`).join(", ");
      const words = `pass ${at + 1} of ${one.passes.length}${counters ? `: ${counters}` : ""}`;
      say(`${one.line.trim()}, ${words}`);
      const whole = typeof pass.value === "number" || typeof pass.value === "string";
      const shape = whole ? "one number" : `a list of ${pass.value.length}`;
      const rows = whole ? null : Array.isArray(pass.value[0]) ? pass.value : [pass.value];
      const names = rows === null || Array.isArray(pass.value[0]) ? about.query_tokens : [""];
      const columns = rows?.[0]?.length === about.tokens.length && pass.name !== "row" ? about.tokens : (rows?.[0] ?? []).map((_, c) => String(c + 1));
      const stay = document.activeElement?.getAttribute("aria-label") === "Pass" && panel.contains(document.activeElement);
      fill(panel, h("h2", {}, pass.name), h("p", { class: "muted" }, `${words} · ${shape}`), one.passes.length > 1 ? slider : null,
        whole ? h("p", { class: "big", title: full(pass.value) }, Number.isInteger(value(pass.value)) && "ijc".includes(pass.name) ? String(pass.value) : two(pass.value)) : rows[0]?.length ? table(rows, columns, names) : h("p", { class: "big" }, "[ ]"),
        h("details", {}, h("summary", {}, "Every pass"), h("ol", { class: "history" }, one.passes.slice(0, 400).map((each, i) =>
          h("li", { "aria-current": i === at ? "step" : null }, `${Object.values(each.at).join(", ")}${Object.keys(each.at).length ? " → " : ""}${spelled(each.value)}`)))));
      if (stay) panel.querySelector("input[type=range]")?.focus();
    }

    function table(rows, columns, names = about.query_tokens) {
      return h("table", {},
        h("thead", {}, h("tr", {}, h("td", {}), columns.map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, rows.map((row, i) => h("tr", {}, h("th", { scope: "row" }, names[i] ?? String(i)), row.map((x) => h("td", { title: full(x) }, two(x)))))));
    }

    function step(dl, dp) {
      const now = state();
      const chosen = way(now);
      if (chosen === "yours") return;
      const all = chosen === "loops" ? loops.lines : lines;
      if (dp) {
        const one = all[place(now, "line", all.length, all.findIndex((each) => each.passes?.length))];
        if (one.passes) set({ pass: Math.min(one.passes.length - 1, Math.max(0, place(now, "pass", one.passes.length) + dp)) }, { quiet: true });
        return;
      }
      let to = place(now, "line", all.length, chosen === "loops" ? all.findIndex((each) => each.passes.length) : 0) + dl;
      while (all[to]?.passes && !all[to].passes.length) to += dl;
      if (all[to]) set({ line: to, pass: null }, { quiet: true });
    }

    function exports() {
      const chosen = way(state());
      if (chosen === "yours") return own.exports();
      const cells = (one, row, i) => row.map((x, c) => [one.line, i, c, full(x)]);
      return chosen === "loops"
        ? {
            name: "loops", picture: root, python: loops.python,
            rows: [["line", "pass", "counters", "value"], ...loops.lines.flatMap((one) => one.passes.map((pass, i) => [one.line.trim(), i + 1, Object.entries(pass.at).map((each) => each.join("=")).join(" "), spelled(pass.value, full)]))],
          }
        : {
            picture: root, python: written.python,
            rows: [["line", "row", "column", "value"], ...lines.flatMap((one) => one.value.flatMap((row, i) => cells(one, row, i)))],
          };
    }

    return { update, shown: () => update(state()), exports, keys: { ArrowUp: () => step(-1, 0), ArrowDown: () => step(1, 0), ArrowLeft: () => step(0, -1), ArrowRight: () => step(0, 1) } };
  },
};

/** A value of a pass on one line. */
function spelled(given, one = two) {
  return Array.isArray(given) ? `[${given.map((each) => spelled(each, one)).join(", ")}]` : one(given);
}
