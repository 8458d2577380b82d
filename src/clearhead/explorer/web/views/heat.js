// The matrix of one head: a cell for each query and key; point at one to see its whole computation.

import { ifThere } from "../ask.js";
import { css } from "../colour.js";
import { choice, fill, h, segment } from "../dom.js";
import { bitmap, timed } from "../draw.js";
import { field } from "../field.js";
import { full, two } from "../format.js";
import { describe } from "../keys.js";
import { legend } from "../legend.js";
import { escaped } from "../pictured.js";
import { place } from "../state.js";

const WHAT = [["weights", "weights"], ["contributions", "contribution"], ["scores", "masked scores"], ["scaled", "scaled"], ["dots", "raw q · k"]];
const SAYS = { weights: "weight", contributions: "length of weight × value", scores: "score after the mask", scaled: "scaled score", dots: "raw q · k" };
const SHADES = [["linear", "linear"], ["log", "log"], ["no sink", "without the sink"]];
const MOST_NUMBERS = 512 * 512; // cells whose numbers are asked for together; past it each is, when it is pointed at
const MOST_RECTS = 40_000; // cells of an SVG that are shapes; past it they are one image

export const heat = {
  id: "heat",
  title: "Heat map",
  lede: "Each row is a query, each column a key. Point at a cell, or move with the arrows, to see how it came to be.",
  async show(root, { about, ask, set, say, state }) {
    describe([["arrows", "the next cell"], ["+ −", "larger, smaller; drag to move"]]);
    const rows = about.query_tokens.length;
    const columns = about.tokens.length;
    const panel = h("aside", { class: "card panel", "aria-label": "The cell pointed at" });
    const controls = h("div", { class: "controls" });
    const plot = field({
      rows,
      columns,
      label: `Heat map of ${rows} queries and ${columns} keys`,
      point: (at) => (state().pinned ? passing(at) : set(at, { quiet: true })),
      pick: (at) => set({ ...at, pinned: "1" }),
      moved: ({ zoom, x, y }) => set(zoom > 1.001 ? { zoom: short(zoom), x: short(x), y: short(y) } : { zoom: null, x: null, y: null }, { quiet: true }),
    });
    root.append(controls, h("div", { class: "split" }, h("div", { class: "card" }, plot.canvas), panel));
    const short = (x) => String(Math.round(x * 1000) / 1000);
    const what = (now) => (!about.views && WHAT.some(([one]) => one === now.what) ? now.what : "weights");
    let drawn = null; // {key, what, head, numbers, shades, margins, content}

    async function load(now) {
      const head = place(now, "head", about.heads);
      const scale_of = SHADES.some(([one]) => one === now.scale_of) ? now.scale_of : "linear";
      const key = JSON.stringify([head, what(now), scale_of]);
      if (drawn?.key === key) return;
      const asked = { what: what(now), head: head || null };
      const [numbers, shades, margins] = await Promise.all([
        rows * columns <= MOST_NUMBERS ? ifThere(ask("/matrix", asked)) : null,
        ask("/shade", { ...asked, scale_of }),
        ask("/margins", asked),
      ]);
      const painted = timed("heat");
      drawn = { key, head, what: what(now), scale_of, numbers: numbers?.data, shades: shades.data, margins };
      drawn.content = {
        picture: bitmap(shades.data, rows, columns),
        hidden: shades.data.includes(255),
        names: [about.query_tokens, about.tokens],
        shade: (i, j) => shades.data[i * columns + j],
        number: numbers && ((i, j) => numbers.data[i * columns + j]),
        beside: [{ title: "entropy", values: margins.entropy }, { title: "Σ row", values: margins.rows }],
        below: { title: "Σ column", values: margins.columns },
      };
      drawn.painted = painted;
      fill(controls,
        about.views ? null : segment("What is shown", WHAT, drawn.what, (one) => set({ what: one })),
        choice("shades", SHADES, scale_of, (one) => set({ scale_of: one })),
        about.heads > 1 ? choice("head", Array.from({ length: about.heads }, (_, i) => [i, `head ${i}`]), head, (one) => set({ head: one })) : null,
        h("span", { class: "segment", role: "group", "aria-label": "Size" },
          h("button", { type: "button", "aria-label": "Smaller", onclick: () => plot.zoom(0.5) }, "−"),
          h("button", { type: "button", "aria-label": "Larger", onclick: () => plot.zoom(2) }, "+")),
        legend(margins[scale_of === "no sink" ? "spread_but_first" : "spread"], scale_of),
      );
    }

    const pointed = (now) => ({ query: place(now, "query", rows, -1), key: place(now, "key", columns, -1), pinned: now.pinned === "1" });

    function draw(now) {
      const number = (name) => Number.parseFloat(now[name] ?? "") || 0;
      plot.show(drawn.content, { zoom: number("zoom") || 1, x: number("x"), y: number("y") }, pointed(now));
      drawn.painted?.();
      drawn.painted = null;
    }

    let looking = false;
    let next = null;

    /** The cell that is pointed at last; those in between are passed over. */
    async function look(now) {
      next = now;
      if (looking) return;
      looking = true;
      try {
        while (next) {
          const one = next;
          next = null;
          await told(one);
        }
      } finally {
        looking = false;
      }
    }

    async function told(now) {
      const { query, key, pinned } = pointed(now);
      if (query < 0 || key < 0) {
        fill(panel, h("h2", {}, "No cell yet"), h("p", { class: "muted" }, "Point at one: its arithmetic appears here."));
        return;
      }
      const at = { head: drawn.head || null, query, key };
      const { what, shades } = drawn;
      const hidden = shades[query * columns + key] === 255;
      const number = drawn.numbers ? drawn.numbers[query * columns + key] : (await ifThere(ask("/number", { ...at, what })))?.number;
      const pair = `${about.query_tokens[query]} → ${about.tokens[key]}`;
      let work = null;
      try {
        if (!about.views) work = h("ol", { class: "work" }, (await ask("/cell", at)).lines.map((line) => h("li", {}, line)));
      } catch (error) {
        work = h("p", { class: "muted" }, error.message);
      }
      const known = number !== undefined;
      say(`${pair}: ${hidden ? "hidden by the mask" : known ? two(number) : "its number needs the live page"}`);
      fill(panel,
        h("p", { class: "pair" }, pair),
        known ? h("p", { class: "big", title: full(number) }, two(number)) : null,
        known ? h("p", { class: "muted" }, `${SAYS[what]}, exactly ${full(number)}`) : null,
        hidden ? h("p", { class: "muted" }, "The mask hides this key from this query.") : null,
        work,
        pinned ? h("p", { class: "muted passed" }, "Pinned: Esc lets go.") : null,
      );
    }

    /** While one cell is pinned, another that the pointer passes is named below it. */
    function passing({ query, key }) {
      const line = panel.querySelector(".passed");
      if (!line || !drawn?.numbers) return;
      line.textContent = `Pinned: Esc lets go. Below the pointer: ${about.query_tokens[query]} → ${about.tokens[key]}, ${two(drawn.numbers[query * columns + key])}`;
    }

    function step(dq, dk, to = {}) {
      const now = { ...state(), ...to };
      const query = Math.min(rows - 1, Math.max(0, place(now, "query", rows, 0) + dq));
      const key = Math.min(columns - 1, Math.max(0, place(now, "key", columns, 0) + dk));
      set({ query, key, ...within(query, key) }, { quiet: true });
    }

    /** The part that has a cell in it: a cell that is moved to is seen. */
    function within(query, key) {
      const { zoom, x, y } = plot.view();
      const { size, width, height } = plot.box();
      if (zoom <= 1.001) return {};
      const [wide, tall] = [width / size, height / size];
      const held = (first, seen, to) => (to < first ? to : to + 1 > first + seen ? to + 1 - seen : first);
      return { zoom: short(zoom), x: short(held(x, wide, key)), y: short(held(y, tall, query)) };
    }

    function svg() {
      const size = 24, left = 120, top = 120;
      const rects = [];
      for (let i = 0; i < rows; i++) {
        for (let j = 0; j < columns; j++) {
          const shade = drawn.shades[i * columns + j];
          const number = drawn.numbers ? `<title>${escaped(full(drawn.numbers[i * columns + j]))}</title>` : "";
          rects.push(`<rect x="${left + j * size}" y="${top + i * size}" width="${size}" height="${size}" fill="${shade === 255 ? "url(#hidden)" : css(shade)}">${number}</rect>`);
        }
      }
      const names = [
        ...about.query_tokens.map((name, i) => `<text x="${left - 6}" y="${top + (i + 0.65) * size}" text-anchor="end">${escaped(name)}</text>`),
        ...about.tokens.map((name, j) => `<text transform="translate(${left + (j + 0.65) * size} ${top - 6}) rotate(-90)">${escaped(name)}</text>`),
      ];
      const hatch = '<pattern id="hidden" width="6" height="6" patternUnits="userSpaceOnUse"><path d="M-1 7L7 -1" stroke="#9aa3b5" stroke-width="0.75"/></pattern>';
      const [width, height] = [left + columns * size + 8, top + rows * size + 8];
      return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="12"><defs>${hatch}</defs>${rects.join("")}${names.join("")}</svg>`;
    }

    async function numbered() {
      const found = drawn.numbers ?? (await ask("/matrix", { what: drawn.what, head: drawn.head || null })).data;
      const lines = about.query_tokens.map((name, i) => [name, ...Array.from(found.subarray(i * columns, (i + 1) * columns), full)]);
      return [["", ...about.tokens], ...lines];
    }

    const GIVES = { weights: "weights=True).weights", contributions: "weights=True).weights" };
    const exports = () => ({
      name: `heat-${drawn.what}`,
      rows: numbered(),
      python: about.views ? null : drawn.what in GIVES
        ? `weights = ch.observe(q, k, v${about.options}, ${GIVES[drawn.what]}${drawn.what === "weights" ? "" : "\ncontributions = weights * np.linalg.norm(v, axis=-1)[..., None, :]"}`
        : `rows = [ch.trace(q, k, v, query=i, head=${drawn.head}${about.options}).row.${drawn.what} for i in range(q.shape[-2])]`,
      picture: rows * columns <= MOST_RECTS ? svg() : plot.canvas,
    });

    async function update(now) {
      await load(now);
      draw(now);
      await look(now);
    }

    await load(state());
    return {
      update,
      exports,
      shown: () => update(state()),
      end: plot.end,
      found: (kind, i) => step(0, 0, { [kind]: i }),
      keys: {
        ArrowLeft: () => step(0, -1),
        ArrowRight: () => step(0, 1),
        ArrowUp: () => step(-1, 0),
        ArrowDown: () => step(1, 0),
        "+": () => plot.zoom(2),
        "-": () => plot.zoom(0.5),
        Enter: () => set({ pinned: "1" }),
        Escape: () => set({ pinned: null, query: null, key: null }),
        ",": () => set({ head: Math.max(0, place(state(), "head", about.heads) - 1) }),
        ".": () => set({ head: Math.min(about.heads - 1, place(state(), "head", about.heads) + 1) }),
      },
    };
  },
};
