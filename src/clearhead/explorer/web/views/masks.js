// Masks put together by clicking, as the expression that Python takes; before and after; positions as pictures.

import { ask as asked } from "../ask.js";
import { fill, h, segment } from "../dom.js";
import { full, two } from "../format.js";
import { grid, rowsOf } from "../grid.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

const POSITIONS = [["alibi", "ALiBi"], ["relative bias", "T5's relative bias"], ["rotary", "Rotary"], ["sinusoidal", "Sinusoidal"]];

/** The masks that a click adds, in sizes that show something for so many keys. */
function leaves(keys) {
  const half = Math.ceil(keys / 2);
  const ids = Array.from({ length: Math.min(keys, 64) }, (_, j) => (j < half ? 0 : 1));
  const block = Math.max(1, Math.floor(keys / 4));
  return [
    ["causal", "causal()", "no key after the query"],
    ["window", `window(${Math.max(1, Math.floor(keys / 5))})`, "only the last few keys"],
    ["global", "global_tokens([0])", "the first token sees and is seen by all"],
    keys <= 64 ? ["documents", `documents([${ids.join(", ")}])`, "no token sees into another document"] : null,
    ["padding", `lengths(${Math.max(1, keys - 1)})`, "the last key is padding"],
    ["random blocks", `random_blocks(${block}, count=1)`, "each block of queries sees one block of keys"],
    ["prefix", `prefix(${Math.min(2, keys)})`, "every query sees the first keys"],
    ["first tokens", `first_tokens(${Math.min(2, keys)})`, "the first keys stay in sight, as sinks, of whoever comes after them"],
    ["dilated", "dilated(2)", "every other key before the query"],
    ["strided", `strided(${Math.max(2, Math.floor(keys / 5))})`, "the last few keys, and each as many before them"],
    keys <= 64 ? ["blocks", `blocks([[1, 0], [1, 1]], ${half})`, "whole blocks of queries see whole blocks of keys"] : null,
  ].filter(Boolean);
}

export const masks = {
  id: "masks",
  title: "Masks and positions",
  short: "Masks",
  lede: "Who may attend to whom. Add masks with a click, or type what you would write in Python; then click a pair and ask why.",
  async show(root, { about, ask, set, say, state, live }) {
    describe([["← ↑ → ↓", "another pair; the mask says why"]]);
    const rows = about.query_tokens.length;
    const columns = about.tokens.length;
    const names = { rows: about.query_tokens, columns: about.tokens };
    const input = h("input", { type: "text", "aria-label": "Mask, as in Python", disabled: !live, spellcheck: "false", onchange: (event) => set({ expression: event.target.value }) });
    const add = h("div", { class: "joins", role: "group", "aria-label": "Add a mask" });
    const view = h("div", { class: "thirds" });
    const why = h("p", { class: "why", role: "status" });
    const positions = h("div", { class: "quarters" });
    root.append(
      h("div", { class: "card" }, h("label", { class: "expression" }, h("code", {}, "mask ="), input), add, live ? null : h("p", { class: "muted" }, "Other masks need the live page: clearhead explore.")),
      view, h("div", { class: "card" }, why),
      h("h2", { class: "part" }, "Positions"), h("p", { class: "lede" }, "Four ways in which a model knows where a token stands; 24 positions each, lighter is more."), positions);
    let turn = 0;
    let drawn = null;
    let sign = "&";

    const expression = () => state().expression || about.mask || "causal()";
    const own = () => !live || (!state().expression && about.mask);

    function joined(leaf) {
      const now = input.value.trim();
      if (!now || sign === "=") return set({ expression: leaf });
      const left = sign === "&" && now.includes("|") ? `(${now})` : now;
      set({ expression: `${left} ${sign} ${leaf}` });
    }

    function clicks() {
      fill(add,
        segment("How the next one joins", [["&", "& and"], ["|", "| or"], ["=", "= instead"]], sign, (one) => { sign = one; clicks(); }),
        leaves(columns).map(([name, leaf, words]) => h("button", { type: "button", disabled: !live, title: `${leaf}: ${words}`, onclick: () => joined(leaf) }, name)),
        h("button", { type: "button", disabled: !live, title: "what is hidden is seen, and the other way round", onclick: () => set({ expression: `~(${expression()})` }) }, "~ not"),
        h("button", { type: "button", disabled: !live || !state().expression, onclick: () => set({ expression: null }) }, "Start over"),
        h("button", { type: "button", class: "strong", disabled: !live, onclick: () => set({ mask: expression(), expression: null }) }, "Use in every view"));
    }

    async function update(now) {
      const mine = ++turn;
      input.value = expression();
      clicks();
      const said = own() ? null : expression();
      const [found, before, after] = await Promise.all([
        ask("/mask", { expression: said }),
        ask("/matrix", { what: "weights", mask: "none" }).catch(() => null),
        ask("/matrix", { what: "weights", mask: said ?? call().mask }).catch(() => null),
      ]);
      if (mine !== turn) return;
      drawn = { found, before, after };
      const at = [place(now, "query", rows, -1), place(now, "key", columns, -1)];
      const { allowed } = found;
      const hidden = (i, j) => !allowed[i][j];
      const point = (i, j, clicked) => clicked && set({ query: i, key: j }, { quiet: true });
      const words = `${found.count} of ${allowed.length * allowed[0].length} pairs are let through, ${two(100 * found.share)} %`;
      const empty = found.empty.length ? `; ${found.empty.length} ${found.empty.length > 1 ? "queries see" : "query sees"} nothing` : "";
      fill(view,
        h("section", { class: "card" }, h("h2", {}, "The mask"), grid(allowed, { label: `Mask: ${words}`, names, low: 0, high: 1, hidden, point, at, numbers: false }), h("p", { class: "muted" }, `${words}${empty}.`)),
        before && h("section", { class: "card" }, h("h2", {}, "Weights before"), grid(rowsOf(before), { label: "Weights without a mask", names, low: 0, high: 1, point, at }), h("p", { class: "muted" }, "No key is hidden.")),
        after && after.shape[0] === allowed.length && h("section", { class: "card" }, h("h2", {}, "and after"), grid(rowsOf(after), { label: "Weights with the mask", names, low: 0, high: 1, hidden, point, at }), h("p", { class: "muted" }, "What is left shares the whole among it.")));
      await explained(at, said, mine);
      await pictures(mine);
    }

    function call() {
      return state().mask ? { mask: state().mask } : {};
    }

    async function explained(at, said, mine) {
      if (at[0] < 0 || at[1] < 0) {
        why.textContent = "Click a pair: the mask says why it is seen, or why not.";
        return;
      }
      const told = await ask("/why", { expression: said, query: at[0], key: at[1] }).catch((error) => ({ words: error.message }));
      if (mine !== turn) return;
      why.textContent = `${about.query_tokens[at[0]]} → ${about.tokens[at[1]]}: ${told.words}`;
      why.className = told.allowed ? "why good" : "why bad";
      say(why.textContent);
    }

    async function pictures(mine) {
      if (positions.childElementCount) return;
      const all = await Promise.all(POSITIONS.map(([kind]) => asked("/position", { kind, count: 24 })));
      if (mine !== turn) return;
      fill(positions, POSITIONS.map(([, title], i) => h("section", { class: "card" }, h("h2", {}, title), grid(all[i].numbers, { label: `${title}, position by position`, width: 240, numbers: false }), h("p", { class: "muted" }, all[i].words), h("pre", {}, all[i].python))));
    }

    function step(dq, dk) {
      const now = state();
      const to = (name, count, by) => Math.min(count - 1, Math.max(0, place(now, name, count, 0) + (now[name] === undefined ? 0 : by)));
      set({ query: to("query", rows, dq), key: to("key", columns, dk) }, { quiet: true });
    }

    return {
      update,
      shown: () => update(state()),
      exports: () => ({
        name: "mask",
        picture: root,
        rows: [["may attend", ...about.tokens], ...drawn.found.allowed.map((row, i) => [about.query_tokens[i], ...row]),
          ["weight", ...about.tokens], ...(drawn.after ? rowsOf(drawn.after).map((row, i) => [about.query_tokens[i], ...row.map(full)]) : [])],
        python: `mask = ${spelled(drawn.found.spelled)}\nprint(mask.dense(${rows}, ${columns}).astype(int))\nch.observe(q, k, v, mask=mask, weights=True)`,
      }),
      keys: { ArrowLeft: () => step(0, -1), ArrowRight: () => step(0, 1), ArrowUp: () => step(-1, 0), ArrowDown: () => step(1, 0), Escape: () => set({ query: null, key: null }) },
    };
  },
};

/** The same expression with the names of masks where Python finds them. */
function spelled(text) {
  return text.replace(/\b([a-z]\w*)\(/g, "ch.$1(");
}
