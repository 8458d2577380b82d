// Queries and keys as arrows in a plane: drag one, and scores, weights and the output move.

import { fill, h } from "../dom.js";
import { colours, sheet } from "../draw.js";
import { full, two, value } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

const SIDE = 440;

export const geometry = {
  id: "geometry",
  title: "Geometry",
  lede: "A score is how long a key is in the query's direction. Drag an arrow's tip; the shares of attention follow.",
  async show(root, { about, ask, set, say, state, live }) {
    describe([["← →", "the query before, the next"]]);
    const rows = about.query_tokens.length;
    const columns = about.tokens.length;
    const chips = h("div", { class: "tokens", role: "group", "aria-label": "Query" });
    const left = h("div", { class: "card" });
    const right = h("div", { class: "card" });
    const table = h("div", { class: "card scroll" });
    root.append(chips, h("div", { class: "matrices" }, left, right, table));
    const head = () => place(state(), "head", about.heads);
    let asked = 0;

    async function update(now) {
      const mine = ++asked;
      const query = place(now, "query", rows);
      fill(chips, about.query_tokens.slice(0, 200).map((name, i) =>
        h("button", { type: "button", "aria-pressed": String(i === query), onclick: () => set({ query: i }) }, name)));
      const found = await ask("/geometry", { query, head: head() || null });
      if (mine !== asked) return;
      const best = found.weights.map(value).reduce((top, w, j, all) => (w > all[top] ? j : top), 0);
      say(`${about.query_tokens[query]} attends most to ${about.tokens[best]}, ${two(found.weights[best])}`);
      fill(left, h("h2", {}, "Query and keys"), keysPlane(found, query), note(found.share, "of their length is seen in this plane"));
      fill(right, h("h2", {}, "Values and output"), valuesPlane(found, query), note(found.value_share, "of their length is seen in this plane"));
      fill(table, numbers(found));
    }

    function note(share, words) {
      const more = live ? "" : " Dragging needs the live page.";
      return h("p", { class: "muted" }, `${two(100 * share)} % ${words}.${more}`);
    }

    function frame(points) {
      const most = Math.max(1e-9, ...points.flat().map((x) => Math.abs(value(x)))) * 1.25;
      const to = ([x, y]) => [SIDE / 2 + (value(x) / most) * (SIDE / 2), SIDE / 2 - (value(y) / most) * (SIDE / 2)];
      const from = (x, y) => [((x - SIDE / 2) / (SIDE / 2)) * most, ((SIDE / 2 - y) / (SIDE / 2)) * most];
      return { to, from };
    }

    function axes(pen, colour) {
      pen.strokeStyle = colour("line");
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(0, SIDE / 2);
      pen.lineTo(SIDE, SIDE / 2);
      pen.moveTo(SIDE / 2, 0);
      pen.lineTo(SIDE / 2, SIDE);
      pen.stroke();
    }

    function arrow(pen, [x, y], name, paint, width = 2) {
      const angle = Math.atan2(y - SIDE / 2, x - SIDE / 2);
      pen.strokeStyle = pen.fillStyle = paint;
      pen.lineWidth = width;
      pen.beginPath();
      pen.moveTo(SIDE / 2, SIDE / 2);
      pen.lineTo(x, y);
      for (const turn of [2.7, -2.7]) {
        pen.moveTo(x, y);
        pen.lineTo(x + 9 * Math.cos(angle + turn), y + 9 * Math.sin(angle + turn));
      }
      pen.stroke();
      pen.font = "13px sans-serif";
      pen.textAlign = x > SIDE - 60 ? "right" : "left";
      pen.fillText(name, x + (x > SIDE - 60 ? -8 : 8), y + (y < SIDE / 2 ? -6 : 14));
    }

    function keysPlane(found, query) {
      const { canvas, pen } = sheet(SIDE, SIDE, { role: "img", "aria-label": "Arrows of the query and the keys" });
      const colour = colours();
      const { to, from } = frame([found.query, ...found.keys]);
      axes(pen, colour);
      const tip = to(found.query);
      // keys on one line across the query's direction have one score
      const angle = Math.atan2(tip[1] - SIDE / 2, tip[0] - SIDE / 2);
      pen.setLineDash([4, 4]);
      found.keys.forEach((key, j) => {
        if (found.allowed && !found.allowed[j]) return;
        const [x, y] = to(key);
        pen.strokeStyle = colour("line");
        pen.beginPath();
        pen.moveTo(x - SIDE * Math.sin(angle), y + SIDE * Math.cos(angle));
        pen.lineTo(x + SIDE * Math.sin(angle), y - SIDE * Math.cos(angle));
        pen.stroke();
      });
      pen.setLineDash([]);
      found.keys.forEach((key, j) => {
        const gone = found.allowed && !found.allowed[j];
        const at = to(key);
        pen.globalAlpha = 0.35;
        pen.fillStyle = colour("accent");
        pen.beginPath();
        pen.arc(at[0], at[1], gone ? 0 : 4 + 28 * value(found.weights[j]), 0, 2 * Math.PI);
        pen.fill();
        pen.globalAlpha = gone ? 0.35 : 1;
        arrow(pen, at, about.tokens[j], colour("accent"));
        pen.globalAlpha = 1;
      });
      arrow(pen, tip, `q: ${about.query_tokens[query]}`, colour("bad"), 3);
      if (live) dragging(canvas, [found.query, ...found.keys].map(to), from, query);
      return canvas;
    }

    function dragging(canvas, tips, from, query) {
      let held = null;
      const at = (event) => {
        const area = canvas.getBoundingClientRect();
        return [((event.clientX - area.left) * SIDE) / area.width, ((event.clientY - area.top) * SIDE) / area.height];
      };
      canvas.style.touchAction = "none";
      canvas.addEventListener("pointerdown", (event) => {
        const [x, y] = at(event);
        held = tips.findIndex(([tx, ty]) => Math.abs(tx - x) < 16 && Math.abs(ty - y) < 16);
        if (held >= 0) canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointerup", async (event) => {
        if (held === null || held < 0) return;
        const [x, y] = from(...at(event));
        const name = held === 0 ? "q" : "k";
        const moved = await ask("/drag", { name, row: held === 0 ? null : held - 1, x, y, query, head: head() || null });
        const fresh = moved.edits.split(";");
        const same = fresh.map((one) => one.split(".").slice(0, 4).join("."));
        const others = (state().edits ?? "").split(";").filter((one) => one && !same.includes(one.split(".").slice(0, 4).join(".")));
        held = null;
        set({ edits: [...others, ...fresh].join(";") });
      });
    }

    function valuesPlane(found, query) {
      const { canvas, pen } = sheet(SIDE, SIDE, { role: "img", "aria-label": "Arrows of the values and the output" });
      const colour = colours();
      const { to } = frame([found.output, ...found.values]);
      axes(pen, colour);
      found.values.forEach((one, j) => {
        pen.globalAlpha = 0.25 + 0.75 * value(found.weights[j]);
        arrow(pen, to(one), about.tokens[j], colour("accent"), 1 + 4 * value(found.weights[j]));
      });
      pen.globalAlpha = 1;
      arrow(pen, to(found.output), `output of ${about.query_tokens[query]}`, colour("good"), 3);
      return canvas;
    }

    function numbers(found) {
      const headings = ["key", "cos θ", "‖q‖ ‖k‖", "score", "weight"];
      const lines = about.tokens.slice(0, 200).map((name, j) => {
        const gone = found.allowed && !found.allowed[j];
        const cells = [found.cosines[j], `${two(found.length)} · ${two(found.norms[j])}`, found.scaled[j], gone ? "hidden" : found.weights[j]];
        return h("tr", {}, h("th", { scope: "row" }, name), cells.map((one) => (typeof one === "string" && !["nan", "inf", "-inf"].includes(one) ? h("td", {}, one) : h("td", { title: full(one) }, two(one)))));
      });
      return h("table", {}, h("thead", {}, h("tr", {}, headings.map((one) => h("th", { scope: "col" }, one)))), h("tbody", {}, lines));
    }

    const step = (by) => set({ query: Math.min(rows - 1, Math.max(0, place(state(), "query", rows) + by)) }, { quiet: true });
    return { update, shown: () => update(state()), keys: { ArrowLeft: () => step(-1), ArrowRight: () => step(1) } };
  },
};
