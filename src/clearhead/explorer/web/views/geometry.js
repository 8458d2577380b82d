// Queries and keys as arrows in a plane: drag one, and scores, weights and the output move.

import { fill, h, s } from "../dom.js";
import { full, two, value } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

const SIDE = 440;
const HALF = SIDE / 2;
const MOST_DRAWN = 400; // arrows; of more, those with the largest weights
const MOST_NAMED = 24; // that have names and can be dragged
const NUDGE = 0.05; // of the plane's half, that an arrow key moves a tip

export const geometry = {
  id: "geometry",
  title: "Geometry",
  byHead: true,
  lede: "A score is cos θ · ‖q‖ · ‖k‖: how far a key reaches in the query's direction. Drag a tip, and attention follows.",
  async show(root, { about, ask, set, say, state, live }) {
    describe([["← →", "the query before, the next"], ["Tab", "to a tip; arrows then move it"]]);
    const rows = about.query_tokens.length;
    const chips = h("div", { class: "tokens", role: "group", "aria-label": "Query" });
    const left = h("div", { class: "card" });
    const right = h("div", { class: "card" });
    const table = h("div", { class: "card scroll-x" });
    root.append(chips, h("div", { class: "planes" }, left, right, table));
    const head = place(state(), "head", about.heads);
    let asked = 0;
    let drawn = null; // {found, query}
    let scale = null; // how much of the plane is seen: stays while something is dragged

    async function update(now) {
      const mine = ++asked;
      const query = place(now, "query", rows);
      fill(chips, about.query_tokens.slice(0, 200).map((name, i) =>
        h("button", { type: "button", "aria-pressed": String(i === query), onclick: () => set({ query: i }) }, name)));
      const found = await ask("/geometry", { query, head: head || null });
      if (mine !== asked) return;
      scale = { keys: reach([found.query, ...found.keys]), values: reach([found.output, ...found.values]) };
      draw(found, query);
    }

    function draw(found, query) {
      drawn = { found, query };
      const best = found.weights.map(value).reduce((top, w, j, all) => (w > all[top] ? j : top), 0);
      say(`${about.query_tokens[query]} attends most to ${about.tokens[best]}, ${two(found.weights[best])}`);
      fill(left, h("h2", {}, "Query and keys"), keysPlane(found, query),
        h("p", { class: "muted" }, `Along a dashed line the score is the same; along a circle the length is, and only the angle counts. ${kept(found.share)}`));
      fill(right, h("h2", {}, "Values and output"), valuesPlane(found, query), h("p", { class: "muted" }, `The output is where the values pull it, each by its weight. ${kept(found.value_share)}`));
      fill(table, h("h2", {}, "Scores"), numbers(found));
    }

    const kept = (share) => `This plane keeps ${two(100 * share)} % of the variance.${live ? "" : " Dragging needs the live page."}`;
    const reach = (points) => points.flat().reduce((most, x) => Math.max(most, Math.abs(value(x))), 1e-9) * 1.25;

    function plane(label, ...children) {
      return s("svg", { class: "plane", viewBox: `0 0 ${SIDE} ${SIDE}`, role: "group", "aria-label": label },
        s("line", { class: "axis", x1: 0, x2: SIDE, y1: HALF, y2: HALF }), s("line", { class: "axis", y1: 0, y2: SIDE, x1: HALF, x2: HALF }), children);
    }

    const onto = (most) => ([x, y]) => [HALF + (value(x) / most) * HALF, HALF - (value(y) / most) * HALF];

    /** Keys by weight, the largest first. */
    const ranked = (weights) => weights.map((_, j) => j).sort((a, b) => value(weights[b]) - value(weights[a]) || a - b);

    /** A maker of arrows whose names stand clear of one another. */
    function arrows() {
      const taken = [];
      return ([x, y], name, kind, { width = 2, faint = false } = {}) => {
        const angle = Math.atan2(y - HALF, x - HALF);
        const wing = (turn) => `${x + 10 * Math.cos(angle + turn)} ${y + 10 * Math.sin(angle + turn)}`;
        const down = y < HALF ? -15 : 15;
        const wide = 9 * [...name].length;
        const far = x + 10 + wide > SIDE;
        const left = far ? x - 8 - wide : x + 10;
        let at = y + (y < HALF ? -6 : 16);
        while (name && taken.some((one) => Math.abs(one.at - at) < 14 && one.left < left + wide && left < one.left + one.wide)) at += down;
        if (name) taken.push({ at, left, wide });
        return s("g", { class: `arrow ${kind}` },
          s("line", { class: faint ? "faint" : null, x1: HALF, y1: HALF, x2: x, y2: y, "stroke-width": width }),
          s("path", { class: faint ? "faint" : null, d: `M${wing(2.7)} L${x} ${y} L${wing(-2.7)}`, "stroke-width": width, fill: "none" }),
          name && s("text", { class: faint ? "gone" : null, x: far ? x - 8 : left, y: at, "text-anchor": far ? "end" : "start" }, name));
      };
    }

    function keysPlane(found, query) {
      const most = scale.keys;
      const to = onto(most);
      const tip = to(found.query);
      const angle = Math.atan2(tip[1] - HALF, tip[0] - HALF);
      const gone = (j) => found.allowed && !found.allowed[j];
      const first = ranked(found.weights);
      const named = new Set(first.slice(0, MOST_NAMED));
      const shown = first.slice(0, MOST_DRAWN).sort((a, b) => a - b).map((j) => [to(found.keys[j]), j]);
      const circles = shown.filter(([, j]) => !gone(j) && named.has(j)).map(([, j]) => s("circle", { class: "level", cx: HALF, cy: HALF, r: (HALF * value(found.radii[j])) / most }));
      const levels = shown.filter(([, j]) => !gone(j) && named.has(j)).map(([[x, y]]) => s("line", {
        class: "level dashed", x1: x - SIDE * Math.sin(angle), y1: y + SIDE * Math.cos(angle), x2: x + SIDE * Math.sin(angle), y2: y - SIDE * Math.cos(angle),
      }));
      const arrow = arrows();
      const asking = arrow(tip, `q: ${about.query_tokens[query]}`, "query", { width: 3 });
      const keys = shown.map(([at, j]) => [
        gone(j) ? null : s("circle", { class: "share", cx: at[0], cy: at[1], r: 4 + 30 * value(found.weights[j]) }),
        arrow(at, named.has(j) ? about.tokens[j] : "", "key", { faint: gone(j) || !named.has(j) }),
      ]);
      const drawing = plane("Arrows of the query and the keys", circles, levels, keys, asking);
      if (live) handles(drawing, [[tip, `query ${about.query_tokens[query]}`], ...shown.filter(([, j]) => named.has(j)).map(([at, j]) => [at, `key ${about.tokens[j]}`, j])], most, query);
      return drawing;
    }

    /** What can be taken hold of: the tips, by pointer or by arrow keys. */
    function handles(drawing, tips, most, query) {
      let held = null;
      const inside = (event) => {
        const area = drawing.getBoundingClientRect();
        const [x, y] = [((event.clientX - area.left) * SIDE) / area.width, ((event.clientY - area.top) * SIDE) / area.height];
        return [((x - HALF) / HALF) * most, ((HALF - y) / HALF) * most];
      };
      tips.forEach(([[x, y], label, i = -1]) => drawing.append(s("circle", {
        class: "handle", cx: x, cy: y, r: 13, tabindex: 0, role: "button", "aria-label": `Tip of ${label}; arrows move it`,
        onpointerdown: (event) => { held = i; drawing.setPointerCapture(event.pointerId); event.preventDefault(); },
        onkeydown: (event) => {
          const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
          if (!by) return;
          event.preventDefault();
          event.stopPropagation();
          const from = i < 0 ? drawn.found.query : drawn.found.keys[i];
          move(i, value(from[0]) + by[0] * NUDGE * most, value(from[1]) + by[1] * NUDGE * most, query, true);
        },
      })));
      drawing.addEventListener("pointermove", (event) => held !== null && move(held, ...inside(event), query, false));
      drawing.addEventListener("pointerup", (event) => {
        if (held === null) return;
        const i = held;
        held = null;
        move(i, ...inside(event), query, true);
      });
    }

    let waiting = null;
    let busy = false;

    /** Ask where a tip leads to, one question at a time, the last one always; `done` keeps it in the address. */
    async function move(i, x, y, query, done) {
      waiting = { i, x, y, query, done };
      if (busy) return;
      busy = true;
      while (waiting) {
        const now = waiting;
        waiting = null;
        const name = now.i < 0 ? "q" : "k";
        try {
          const found = await ask("/drag", { name, row: now.i < 0 ? null : now.i, x: now.x, y: now.y, query: now.query, head: head || null });
          if (now.done) set({ edits: found.edits });
          else redraw(found, now.query);
        } catch (error) {
          say(error.message);
        }
      }
      busy = false;
    }

    /** While a tip is held its drawing has to stay, so what it draws is put into it. */
    function redraw(found, query) {
      const held = left.querySelector("svg");
      drawn = { found, query };
      const fresh = keysPlane(found, query);
      held.replaceChildren(...fresh.childNodes);
      right.querySelector("svg").replaceWith(valuesPlane(found, query));
      fill(table, h("h2", {}, "Scores"), numbers(found));
    }

    function valuesPlane(found, query) {
      const to = onto(scale.values);
      const arrow = arrows();
      const given = arrow(to(found.output), `output of ${about.query_tokens[query]}`, "output", { width: 3 });
      return plane("Arrows of the values and the output",
        ranked(found.weights).slice(0, MOST_DRAWN).map((j, at) => arrow(to(found.values[j]), at < MOST_NAMED ? about.tokens[j] : "", "key", { faint: !(value(found.weights[j]) > 0), width: 1 + 5 * value(found.weights[j]) })), given);
    }

    function numbers(found) {
      const headings = ["key", "cos θ", "· ‖q‖", "· ‖k‖", "= q · k", `× ${two(found.scale)}`, "weight"];
      const lines = about.tokens.slice(0, 200).map((name, j) => {
        const gone = found.allowed && !found.allowed[j];
        const cells = [found.cosines[j], found.length, found.norms[j], found.dots[j], found.scaled[j]];
        return h("tr", {}, h("th", { scope: "row" }, name), cells.map((one) => h("td", { title: full(one) }, two(one))), h("td", { title: gone ? null : full(found.weights[j]) }, gone ? "hidden" : two(found.weights[j])));
      });
      return h("table", {}, h("thead", {}, h("tr", {}, headings.map((one) => h("th", { scope: "col" }, one)))), h("tbody", {}, lines));
    }

    const step = (by) => set({ query: Math.min(rows - 1, Math.max(0, place(state(), "query", rows) + by)) }, { quiet: true });
    return {
      update,
      shown: () => update(state()),
      exports: () => {
        const { found, query } = drawn;
        return {
          name: `geometry-${about.query_tokens[query]}`,
          picture: root,
          rows: [["key", "cos θ", "‖q‖", "‖k‖", "q · k", "scaled", "weight", "x", "y"],
            ...about.tokens.map((name, j) => [name, found.cosines[j], found.length, found.norms[j], found.dots[j], found.scaled[j], found.weights[j], ...found.keys[j]].map((one, i) => (i ? full(one) : one)))],
          python: `steps = ch.trace(q, k, v, query=${query}${about.heads > 1 ? `, head=${head}` : ""}${about.options})\nrow = steps.row\nprint(row.dots / np.linalg.norm(row.q) / np.linalg.norm(row.k, axis=-1))  # cos θ\nprint(row.weights, row.output)`,
        };
      },
      keys: { ArrowLeft: () => step(-1), ArrowRight: () => step(1) },
    };
  },
};
