// The matrix of one head: a cell for each query and key; point at one to see its whole computation.

import { css, ink, rgb } from "../colour.js";
import { choice, fill, h, segment } from "../dom.js";
import { hatching } from "../draw.js";
import { escaped, exporting, field } from "../exports.js";
import { full, two } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

const WHAT = [["weights", "weights"], ["scores", "masked scores"], ["scaled", "scaled"], ["dots", "raw q · k"]];
const SHADES = [["linear", "linear"], ["log", "log"], ["no sink", "without the sink"]];
const MARGIN = 72; // pixels for entropy beside rows
const NUMBERS = 34; // pixels of a cell that has room for its number
const LABELS = 11; // pixels of a cell that has room for its token

export const heat = {
  id: "heat",
  title: "Heat map",
  lede: "Each row is a query, each column a key. Point at a cell, or move with the arrows, to see how it came to be.",
  async show(root, { about, ask, set, say, state }) {
    describe([["arrows", "the next cell"]]);
    const rows = about.query_tokens.length;
    const columns = about.tokens.length;
    const canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": `Heat map of ${rows} queries and ${columns} keys` });
    const panel = h("aside", { class: "card panel", "aria-label": "The cell pointed at" });
    const controls = h("div", { class: "controls" });
    root.append(controls, h("div", { class: "split" }, h("div", { class: "card scroll" }, canvas), panel));
    let drawn = null; // {what, scale_of, head, numbers, shades, margins, box}
    let asked = 0;

    async function load(now) {
      const head = place(now, "head", about.heads);
      const what = WHAT.some(([one]) => one === now.what) ? now.what : "weights";
      const scale_of = SHADES.some(([one]) => one === now.scale_of) ? now.scale_of : "linear";
      if (drawn && drawn.head === head && drawn.what === what && drawn.scale_of === scale_of) return;
      const shown = head || null;
      const [numbers, shades, margins] = await Promise.all([
        ask("/matrix", { what, head: shown }),
        ask("/shade", { what, scale_of, head: shown }),
        ask("/margins", { head: shown }),
      ]);
      drawn = { head, what, scale_of, numbers, shades, margins };
      fill(controls, 
        segment("What is shown", WHAT, what, (one) => set({ what: one })),
        choice("shades", SHADES, scale_of, (one) => set({ scale_of: one })),
        about.heads > 1 ? choice("head", Array.from({ length: about.heads }, (_, i) => [i, `head ${i}`]), head, (one) => set({ head: one })) : null,
        exporting({ name: `${about.name}-${what}`, canvas: () => canvas, svg, csv }),
      );
    }

    function draw(now) {
      const style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(name).trim();
      const pen = canvas.getContext("2d");
      const font = `12px ${style.getPropertyValue("--sans") || "sans-serif"}`;
      pen.font = font;
      const widest = (names) => Math.min(140, Math.ceil(Math.max(...names.slice(0, 400).map((name) => pen.measureText(name).width))));
      const room = Math.max(240, (canvas.parentElement.clientWidth || 800) - 34);
      const left = widest(about.query_tokens) + 12;
      const size = Math.max(1, Math.min(64, Math.floor(Math.min((room - left - MARGIN) / columns, 900 / rows))));
      const top = size >= LABELS ? Math.min(120, widest(about.tokens) + 12) : 8;
      const labels = size >= LABELS;
      const box = { left: labels ? left : 8, top, size };
      const width = box.left + columns * size + MARGIN;
      const height = top + rows * size + 8;
      const dpr = devicePixelRatio || 1;
      canvas.width = width * dpr;
      canvas.height = height * dpr;
      canvas.style.width = `${width}px`;
      pen.setTransform(dpr, 0, 0, dpr, 0, 0);
      pen.fillStyle = colour("--card");
      pen.fillRect(0, 0, width, height);
      cells(pen, box, colour);
      pen.font = font;
      pen.fillStyle = colour("--soft");
      if (labels) {
        pen.textAlign = "right";
        pen.textBaseline = "middle";
        about.query_tokens.forEach((name, i) => pen.fillText(name, box.left - 6, top + (i + 0.5) * size, left - 8));
        pen.textAlign = "left";
        about.tokens.forEach((name, j) => {
          pen.save();
          pen.translate(box.left + (j + 0.5) * size, top - 6);
          pen.rotate(-Math.PI / 2);
          pen.fillText(name, 0, 0, top - 8);
          pen.restore();
        });
      }
      entropy(pen, box, colour);
      const at = [place(now, "query", rows, -1), place(now, "key", columns, -1)];
      if (at[0] >= 0 && at[1] >= 0) {
        pen.lineWidth = 2;
        pen.strokeStyle = colour("--accent");
        pen.strokeRect(box.left + at[1] * size, top + at[0] * size, size, size);
      }
      drawn.box = box;
    }

    function cells(pen, { left, top, size }, colour) {
      const { shades, numbers, margins } = drawn;
      const image = new ImageData(columns, rows);
      const ground = colour("--line");
      for (let i = 0; i < rows * columns; i++) {
        image.data.set([...rgb(shades.data[i]), shades.data[i] === 255 ? 0 : 255], 4 * i);
      }
      const small = new OffscreenCanvas(columns, rows);
      small.getContext("2d").putImageData(image, 0, 0);
      pen.fillStyle = hatching(pen, ground, colour("--card"));
      pen.fillRect(left, top, columns * size, rows * size);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(small, left, top, columns * size, rows * size);
      if (size < NUMBERS) return;
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.font = "12px ui-monospace, Menlo, Consolas, monospace";
      for (let i = 0; i < rows; i++) {
        for (let j = 0; j < columns; j++) {
          const at = i * columns + j;
          if (margins.allowed && !margins.allowed[i][j]) continue;
          pen.fillStyle = ink(shades.data[at]);
          pen.fillText(two(numbers.data[at]), left + (j + 0.5) * size, top + (i + 0.5) * size, size - 4);
        }
      }
    }

    function entropy(pen, { left, top, size }, colour) {
      const most = Math.max(1e-9, ...drawn.margins.entropy.map(Number));
      const from = left + columns * size + 10;
      drawn.margins.entropy.forEach((nats, i) => {
        pen.fillStyle = colour("--line");
        pen.fillRect(from, top + (i + 0.25) * size, ((MARGIN - 18) * nats) / most, Math.max(1, size / 2));
        if (size < LABELS + 5) return;
        pen.fillStyle = colour("--soft");
        pen.textAlign = "left";
        pen.textBaseline = "middle";
        pen.fillText(two(nats), from + 2, top + (i + 0.5) * size);
      });
      if (size >= LABELS) {
        pen.fillStyle = colour("--soft");
        pen.textAlign = "left";
        pen.fillText("entropy", from, top - 10);
      }
    }

    async function look(now) {
      const query = place(now, "query", rows, -1);
      const key = place(now, "key", columns, -1);
      if (query < 0 || key < 0) {
        fill(panel, h("h2", {}, "No cell yet"), h("p", { class: "muted" }, "Point at one: its arithmetic appears here."));
        return;
      }
      const mine = ++asked;
      const pair = `${about.query_tokens[query]} → ${about.tokens[key]}`;
      const number = drawn.numbers.data[query * columns + key];
      let work;
      try {
        const cell = await ask("/cell", { head: drawn.head || null, query, key });
        work = h("ol", { class: "work" }, cell.lines.map((line) => h("li", {}, line)));
        say(`${pair}: ${cell.allowed ? two(number) : "hidden by the mask"}`);
      } catch (error) {
        work = h("p", { class: "muted" }, error.message);
      }
      if (mine !== asked) return;
      fill(panel, 
        h("p", { class: "pair" }, pair),
        h("p", { class: "big", title: full(number) }, two(number)),
        h("p", { class: "muted" }, `${WHAT.find(([one]) => one === drawn.what)[1]}, exactly ${full(number)}`),
        work,
        now.pinned ? h("p", { class: "muted" }, "Pinned: Esc lets go.") : null,
      );
    }

    function under(event) {
      const { left, top, size } = drawn.box;
      const area = canvas.getBoundingClientRect();
      const scale = canvas.clientWidth / (canvas.width / (devicePixelRatio || 1));
      const key = Math.floor(((event.clientX - area.left) / scale - left) / size);
      const query = Math.floor(((event.clientY - area.top) / scale - top) / size);
      return query >= 0 && query < rows && key >= 0 && key < columns ? { query, key } : null;
    }

    canvas.addEventListener("pointermove", (event) => {
      const at = under(event);
      if (at && !state().pinned) set(at, { quiet: true });
    });
    canvas.addEventListener("click", (event) => {
      const at = under(event);
      if (at) set({ ...at, pinned: "1" });
    });

    function step(dq, dk) {
      const now = state();
      const query = Math.min(rows - 1, Math.max(0, place(now, "query", rows, 0) + dq));
      const key = Math.min(columns - 1, Math.max(0, place(now, "key", columns, 0) + dk));
      set({ query, key }, { quiet: true });
    }

    function svg() {
      const { left, top, size } = drawn.box;
      const rects = [];
      for (let i = 0; i < rows && rows * columns <= 40_000; i++) {
        for (let j = 0; j < columns; j++) {
          const shade = drawn.shades.data[i * columns + j];
          const fill = shade === 255 ? "none" : css(shade);
          const number = escaped(full(drawn.numbers.data[i * columns + j]));
          rects.push(`<rect x="${left + j * size}" y="${top + i * size}" width="${size}" height="${size}" fill="${fill}"><title>${number}</title></rect>`);
        }
      }
      const names = [
        ...about.query_tokens.map((name, i) => `<text x="${left - 6}" y="${top + (i + 0.6) * size}" text-anchor="end">${escaped(name)}</text>`),
        ...about.tokens.map((name, j) => `<text transform="translate(${left + (j + 0.6) * size} ${top - 6}) rotate(-90)">${escaped(name)}</text>`),
      ];
      const width = left + columns * size;
      return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${top + rows * size}" font-family="sans-serif" font-size="12">${rects.join("")}${names.join("")}</svg>`;
    }

    function csv() {
      const lines = [["", ...about.tokens].map(field).join(",")];
      for (let i = 0; i < rows; i++) {
        const numbers = Array.from(drawn.numbers.data.subarray(i * columns, (i + 1) * columns), full);
        lines.push([about.query_tokens[i], ...numbers].map(field).join(","));
      }
      return `${lines.join("\r\n")}\r\n`;
    }

    async function update(now) {
      await load(now);
      draw(now);
      await look(now);
    }

    await load(state());
    const again = () => drawn && draw(state());
    addEventListener("resize", again);
    return {
      update,
      shown: () => update(state()),
      end: () => removeEventListener("resize", again),
      keys: {
        ArrowLeft: () => step(0, -1),
        ArrowRight: () => step(0, 1),
        ArrowUp: () => step(-1, 0),
        ArrowDown: () => step(1, 0),
        Enter: () => set({ pinned: "1" }),
        Escape: () => set({ pinned: null, query: null, key: null }),
        ",": () => set({ head: Math.max(0, place(state(), "head", about.heads) - 1) }),
        ".": () => set({ head: Math.min(about.heads - 1, place(state(), "head", about.heads) + 1) }),
      },
    };
  },
};
