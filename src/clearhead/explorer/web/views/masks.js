// Masks put together by clicking, as the expression that Python takes; and positions as pictures.

import { choice, fill, h } from "../dom.js";
import { picture, under } from "../draw.js";
import { two } from "../format.js";
import { describe } from "../keys.js";

const LEAVES = ["causal()", "window(1, 1)", "global_tokens([0])", "prefix(2)", "lengths(3)", "documents([0, 0, 1, 1, 1])", "random_blocks(1, count=1, seed=0)"];
const POSITIONS = [["alibi", "ALiBi"], ["relative bias", "T5's relative bias"], ["rotary", "rotary"], ["sinusoidal", "sinusoidal"]];

export const masks = {
  id: "masks",
  title: "Masks and positions",
  lede: "Who may attend to whom. Add masks with a click, or type what you would write in Python.",
  async show(root, { about, ask, set, say, state, live }) {
    describe([]);
    const input = h("input", { type: "text", size: 44, "aria-label": "Mask, as in Python", onchange: (event) => set({ expression: event.target.value }) });
    const add = h("div", { class: "tokens" });
    const view = h("div", { class: "matrices" });
    const positions = h("div", { class: "card" });
    root.append(h("div", { class: "card" }, h("div", { class: "controls" }, h("label", {}, "mask =", input)), add), view, positions);
    let asked = 0;

    const expression = () => state().expression || about.mask || "causal()";

    function joined(leaf, sign) {
      const now = expression();
      set({ expression: now.includes(" | ") && sign === "&" ? `(${now}) & ${leaf}` : `${now} ${sign} ${leaf}` });
    }

    async function update(now) {
      const mine = ++asked;
      input.value = expression();
      input.disabled = !live;
      fill(add, LEAVES.flatMap((leaf) => [
        h("button", { type: "button", disabled: !live, onclick: () => joined(leaf, "&"), title: "and" }, `& ${leaf}`),
        h("button", { type: "button", disabled: !live, onclick: () => joined(leaf, "|"), title: "or" }, `| ${leaf}`),
      ]), h("button", { type: "button", disabled: !live, onclick: () => set({ expression: `~(${expression()})` }) }, "~ not"), live ? null : h("p", { class: "muted" }, "Other masks need the live page."));
      try {
        const [found, before] = await Promise.all([ask("/mask", { expression: expression() === about.mask || !live ? null : expression() }), ask("/matrix", { what: "weights", mask: "none" }).catch(() => null)]);
        if (mine !== asked) return;
        await drawn(now, found, before, mine);
      } catch (error) {
        fill(view, h("div", { class: "card error", role: "alert" }, error.message));
      }
      const kind = POSITIONS.some(([one]) => one === now.kind) ? now.kind : "alibi";
      const place = await ask("/position", { kind, count: 24 });
      if (mine !== asked) return;
      fill(positions, h("h2", {}, "Positions"), choice("", POSITIONS, kind, (one) => set({ kind: one })), h("p", { class: "muted" }, place.words),
        picture(place.numbers, { side: 320, label: `${kind}, position by position` }).canvas);
    }

    async function drawn(now, found, before, mine) {
      const allowed = found.allowed;
      const shown = picture(allowed, { side: 320, low: 0, high: 1, hidden: (i, j) => !allowed[i][j], label: `Mask: ${found.count} pairs are let through` });
      const why = h("p", { role: "status", class: "muted" }, "Click a pair: the mask says why.");
      shown.canvas.addEventListener("click", async (event) => {
        const at = under(event, shown.canvas, allowed[0].length, allowed.length);
        if (!at) return;
        const said = await ask("/why", { expression: expression(), query: at[0], key: at[1] }).catch((error) => ({ reason: error.message }));
        why.textContent = `${about.query_tokens[at[0]] ?? at[0]} → ${about.tokens[at[1]] ?? at[1]}: ${said.allowed ? "may attend" : "may not"}, ${said.reason}`;
        say(why.textContent);
      });
      const cards = [h("section", { class: "card" }, h("h2", {}, found.spelled), shown.canvas,
        h("p", { class: "muted" }, `${found.count} of ${allowed.length * allowed[0].length} pairs, ${two(100 * found.share)} %`), why)];
      const after = live ? await ask("/matrix", { what: "weights", mask: expression() }).catch(() => null) : await ask("/matrix", { what: "weights" });
      if (mine !== asked) return;
      const rows = (array) => Array.from({ length: array.shape[0] }, (_, i) => Array.from(array.data.subarray(i * array.shape[1], (i + 1) * array.shape[1])));
      if (before) cards.push(h("section", { class: "card" }, h("h2", {}, "Weights before"), picture(rows(before), { side: 320, low: 0, label: "Weights without a mask" }).canvas));
      if (after && after.shape[0] === allowed.length) cards.push(h("section", { class: "card" }, h("h2", {}, "and after"), picture(rows(after), { side: 320, low: 0, hidden: (i, j) => !allowed[i][j], label: "Weights with the mask" }).canvas));
      cards.push(h("p", {}, h("button", { type: "button", disabled: !live, onclick: () => set({ mask: expression() }) }, "Use this mask in every view")));
      fill(view, cards);
    }

    return { update, shown: () => update(state()) };
  },
};
