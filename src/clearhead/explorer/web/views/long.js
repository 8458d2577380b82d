// Any length: the matrix pooled to a screenful; a click zooms in, down to exact cells; what keys received runs below.

import { rgb } from "../colour.js";
import { fill, h } from "../dom.js";
import { colours, sheet, under } from "../draw.js";
import { full, two } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

const SIDE = 512; // pixels
const CLOSER = 4; // each click shows a fourth of what was seen

export const long = {
  id: "long",
  title: "Long context",
  lede: "The whole matrix, pooled: each cell shows the largest weight in it. Click to zoom in, Esc to come back.",
  async show(root, { about, ask, set, say, state }) {
    describe([["click", "zoom in"], ["Esc", "zoom out"], [", .", "the head before, the next"]]);
    const rows = about.query_tokens.length;
    const columns = about.tokens.length;
    const map = h("div", { class: "card" });
    const side = h("aside", { class: "card panel" });
    root.append(h("div", { class: "split" }, map, side));
    const head = () => place(state(), "head", about.heads);
    let asked = 0;

    function seen(now) {
      const q0 = place(now, "q0", rows), k0 = place(now, "k0", columns);
      return { q0, q1: place(now, "q1", rows + 1, rows), k0, k1: place(now, "k1", columns + 1, columns) };
    }

    async function update(now) {
      const mine = ++asked;
      const part = seen(now);
      const all = part.q0 === 0 && part.k0 === 0 && part.q1 === rows && part.k1 === columns;
      const shown = head() || null;
      const [cells, got] = await Promise.all([ask("/pooled", all ? { head: shown } : { ...part, head: shown }), ask("/received", { head: shown })]);
      if (mine !== asked) return;
      const [height, width] = cells.shape;
      const { canvas, pen } = sheet(SIDE, Math.max(64, Math.min(SIDE, (SIDE * height) / width)), {
        tabindex: 0, role: "application", "aria-label": `Queries ${part.q0} to ${part.q1 - 1}, keys ${part.k0} to ${part.k1 - 1}`,
      });
      paint(pen, canvas, cells);
      canvas.addEventListener("click", (event) => closer(under(event, canvas, width, height), part, cells.shape));
      const exact = part.q1 - part.q0 === height && part.k1 - part.k0 === width;
      const words = `queries ${part.q0} … ${part.q1 - 1}, keys ${part.k0} … ${part.k1 - 1}, ${exact ? "every cell" : "pooled"}`;
      const hover = h("p", { class: "muted", role: "status" }, words);
      canvas.addEventListener("pointermove", (event) => {
        const at = under(event, canvas, width, height);
        if (!at) return;
        const query = part.q0 + Math.floor((at[0] * (part.q1 - part.q0)) / height);
        const key = part.k0 + Math.floor((at[1] * (part.k1 - part.k0)) / width);
        const number = cells.data[at[0] * width + at[1]];
        hover.textContent = `${about.query_tokens[query]} (${query}) → ${about.tokens[key]} (${key}): ${exact ? "" : "at most "}${two(number)}`;
        hover.title = full(number);
      });
      fill(map, h("div", { class: "controls" }, minimap(part), h("button", { type: "button", disabled: all, onclick: out }, "Whole map")), canvas, along(got), hover);
      fill(side, h("h2", {}, "Received most"),
        h("p", { class: "muted" }, got.sink ? `${got.most[0].token} is a sink: it takes ${two(100 * got.most[0].share)} % of all attention.` : "No key takes a third of all attention."),
        h("table", {}, h("tbody", {}, got.most.map((one) =>
          h("tr", {}, h("th", { scope: "row" }, `${one.token} (${one.key})`), h("td", { title: full(one.received) }, two(one.received)), h("td", {}, `${two(100 * one.share)} %`))))),
        h("p", { class: "muted" }, `mean entropy ${two(got.entropy)} nats`));
      say(words);
    }

    function paint(pen, canvas, { shape: [height, width], data }) {
      const most = data.reduce((a, b) => Math.max(a, b), 1e-12);
      const image = new ImageData(width, height);
      for (let i = 0; i < data.length; i++) image.data.set([...rgb(Math.round((254 * data[i]) / most)), 255], 4 * i);
      const small = new OffscreenCanvas(width, height);
      small.getContext("2d").putImageData(image, 0, 0);
      pen.imageSmoothingEnabled = false;
      const dpr = devicePixelRatio || 1;
      pen.drawImage(small, 0, 0, canvas.width / dpr, canvas.height / dpr);
    }

    function along(got) {
      const { canvas, pen } = sheet(SIDE, 56, { role: "img", "aria-label": "Attention that keys received, along the sequence" });
      const most = Math.max(...got.along, 1e-12);
      pen.fillStyle = colours()("accent");
      got.along.forEach((one, i) => pen.fillRect((i * SIDE) / got.along.length, 54 - (52 * one) / most, Math.max(1, SIDE / got.along.length - 0.5), (52 * one) / most));
      return canvas;
    }

    function minimap(part) {
      const { canvas, pen } = sheet(48, 48, { role: "img", "aria-label": "Where on the whole this is" });
      const colour = colours();
      pen.strokeStyle = colour("line");
      pen.strokeRect(0.5, 0.5, 47, 47);
      pen.fillStyle = colour("accent");
      pen.fillRect((48 * part.k0) / columns, (48 * part.q0) / rows, Math.max(2, (48 * (part.k1 - part.k0)) / columns), Math.max(2, (48 * (part.q1 - part.q0)) / rows));
      return canvas;
    }

    function closer(at, part, [height, width]) {
      if (!at) return;
      const narrowed = (first, last, count, cell, cells) => {
        const size = Math.max(Math.min(16, count), Math.floor((last - first) / CLOSER));
        const middle = first + Math.floor(((cell + 0.5) * (last - first)) / cells);
        const from = Math.max(0, Math.min(count - size, middle - Math.floor(size / 2)));
        return [from, from + size];
      };
      const [q0, q1] = narrowed(part.q0, part.q1, rows, at[0], height);
      const [k0, k1] = narrowed(part.k0, part.k1, columns, at[1], width);
      set({ q0, q1, k0, k1 });
    }

    const out = () => set({ q0: null, q1: null, k0: null, k1: null });
    return {
      update,
      shown: () => update(state()),
      keys: {
        Escape: out,
        ",": () => set({ head: Math.max(0, head() - 1) }),
        ".": () => set({ head: Math.min(about.heads - 1, head() + 1) }),
      },
    };
  },
};
