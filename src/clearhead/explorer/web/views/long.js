// Any length: the matrix pooled to a screenful; zoom in, down to exact cells; what keys received runs below, and what
// stands out is named. While a part is on its way, it is seen as the whole map has it.

import { ifThere } from "../ask.js";
import { choice, fill, h } from "../dom.js";
import { bitmap, colours, timed } from "../draw.js";
import { STEPS } from "../field.js";
import { full, two } from "../format.js";
import { describe } from "../keys.js";
import { legend } from "../legend.js";
import { looksAt, outstanding } from "../outstanding.js";
import { place } from "../state.js";

const CLOSER = 4; // each click shows a fourth of what was seen
const LEAST = 16; // rows and columns that are seen, at least
const LEFT = 84; // pixels for names of queries
const TOP = 22; // for the marks of sinks
const ALONG = 56; // for what keys received
const FOOT = 22; // for names of keys
const MINI = 132;
const CLICK = 4;
const SCREENFUL = 64; // rows and columns that are seen around what is named

export const long = {
  id: "long",
  title: "Long context",
  lede: "The whole matrix, pooled: each cell shows the largest weight in it. Click to zoom in, drag to move, Esc to come back.",
  async show(root, { about, ask, set, say, state }) {
    describe([["click", "zoom in; on exact cells, name the query"], ["+ −", "zoom in, out"], ["arrows", "move"], ["Esc", "the whole map"], [", .", "the head before, the next"]]);
    const rows = about.query_tokens.length;
    const columns = about.tokens.length;
    const controls = h("div", { class: "controls" });
    const canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": `Pooled map of ${rows} queries and ${columns} keys` });
    const hover = h("p", { class: "muted", role: "status" });
    const mini = h("canvas", { role: "img", "aria-label": "Where on the whole this is; drag to move" });
    const facts = h("div", {});
    root.append(controls, h("div", { class: "split" }, h("div", { class: "card" }, canvas, hover), h("aside", { class: "card panel" }, h("h2", {}, "The whole"), mini, facts)));
    const pen = canvas.getContext("2d");
    const head = () => place(state(), "head", about.heads);
    const said = () => ({ head: head() || null });
    let whole = null; // {picture, shape} of all queries and keys
    let sharp = null; // {part, picture, shape, tones, numbers, along, exact}
    let found = null; // what stands out
    let edges = null;
    let part = null;
    let box = null;
    let asked = 0;
    let held = null;

    const seen = (now) => {
      const q0 = place(now, "q0", rows), k0 = place(now, "k0", columns);
      const q1 = place(now, "q1", rows + 1, rows), k1 = place(now, "k1", columns + 1, columns);
      return q1 > q0 && k1 > k0 ? { q0, q1, k0, k1 } : { q0: 0, q1: rows, k0: 0, k1: columns };
    };
    const all = (one) => one.q0 === 0 && one.k0 === 0 && one.q1 === rows && one.k1 === columns;
    const same = (a, b) => a && b && ["q0", "q1", "k0", "k1"].every((name) => a[name] === b[name]);

    async function update(now) {
      const mine = ++asked;
      part = seen(now);
      const everything = { ...said(), side: about.side };
      const [tones, received, along, levels] = await Promise.all([ifThere(ask("/tones", everything).catch(none)), ask("/received", said()), ifThere(ask("/along", everything).catch(none)), ask("/edges", { layer: null, text: null })]);
      if (mine !== asked) return;
      const painted = timed("long");
      edges = levels.data;
      found = received;
      whole = tones && { picture: bitmap(tones.data, ...tones.shape), shape: tones.shape, tones: tones.data, along: along?.data };
      sharp = null;
      if (whole && all(part)) sharp = { part, ...whole, numbers: null, exact: whole.shape[0] === rows && whole.shape[1] === columns };
      draw();
      tell(now);
      painted();
      await sharpened(mine);
      await named_query(now, mine);
    }

    /** What was not observed is no mistake: the rest is shown. */
    function none(error) {
      if (about.views) return null;
      throw error;
    }

    async function sharpened(mine) {
      const shown = part;
      const where = all(shown) ? said() : { ...said(), ...shown };
      const [tones, numbers, along] = await Promise.all([
        all(shown) || !whole ? null : ifThere(ask("/tones", where)),
        whole ? ifThere(ask("/pooled", where)) : null,
        all(shown) ? null : ifThere(ask("/along", { ...said(), k0: shown.k0, k1: shown.k1 }).catch(none)),
      ]);
      if (mine !== asked || !whole) return;
      if (tones) sharp = { part: shown, picture: bitmap(tones.data, ...tones.shape), shape: tones.shape, tones: tones.data, along: along?.data };
      else if (!all(shown)) {
        note();
        return;
      }
      sharp.numbers = numbers && numbers.data.length === sharp.tones.length ? numbers.data : null;
      sharp.exact = sharp.shape[0] === shown.q1 - shown.q0 && sharp.shape[1] === shown.k1 - shown.k0;
      draw();
      note();
    }

    function note() {
      const { q0, q1, k0, k1 } = part;
      const how = sharp?.exact ? "every cell" : sharp ? "pooled" : "pooled; closer cells need the live page";
      const words = `queries ${q0.toLocaleString("en")} … ${(q1 - 1).toLocaleString("en")}, keys ${k0.toLocaleString("en")} … ${(k1 - 1).toLocaleString("en")}: ${how}`;
      hover.textContent = words;
      say(words);
    }

    function draw() {
      const room = Math.max(240, (canvas.parentElement?.clientWidth || 800) - 34);
      const left = Math.min(LEFT, room / 4);
      const width = Math.min(room - left - 8, 760);
      const height = Math.max(96, Math.min(640, (width * (part.q1 - part.q0)) / (part.k1 - part.k0)));
      box = { left, top: TOP, width, height };
      const dpr = devicePixelRatio || 1;
      const [wide, tall] = [left + width + 8, TOP + height + ALONG + FOOT];
      canvas.width = Math.round(wide * dpr);
      canvas.height = Math.round(tall * dpr);
      canvas.style.width = `${wide}px`;
      canvas.style.touchAction = all(part) ? "pan-y" : "none";
      const colour = colours();
      pen.setTransform(dpr, 0, 0, dpr, 0, 0);
      pen.fillStyle = colour("card");
      pen.fillRect(0, 0, wide, tall);
      const text = Math.round(Number.parseFloat(getComputedStyle(document.documentElement).fontSize) * 0.75);
      pen.font = `${text}px ${colour("sans") || "sans-serif"}`;
      pen.imageSmoothingEnabled = false;
      if (whole) {
        const [down, across] = whole.shape;
        pen.drawImage(whole.picture, (part.k0 * across) / columns, (part.q0 * down) / rows, ((part.k1 - part.k0) * across) / columns, ((part.q1 - part.q0) * down) / rows, left, TOP, width, height);
      } else {
        pen.fillStyle = colour("soft");
        pen.fillText("No map was observed.", left + 12, TOP + 28);
      }
      if (sharp && same(sharp.part, part)) pen.drawImage(sharp.picture, left, TOP, width, height);
      names(colour, text);
      marks(colour);
      bars(colour);
      minimap(colour);
    }

    const across = (key) => box.left + ((key - part.k0) * box.width) / (part.k1 - part.k0);
    const down = (query) => box.top + ((query - part.q0) * box.height) / (part.q1 - part.q0);

    function names(colour, text) {
      pen.fillStyle = colour("soft");
      pen.textBaseline = "middle";
      const ticks = (first, last, room, each) => {
        const step = STEPS.find((one) => (one * room) / (last - first) >= each) ?? STEPS.at(-1);
        const from = Math.ceil(first / step) * step;
        return Array.from({ length: Math.max(0, Math.ceil((last - from) / step)) }, (_, n) => from + n * step);
      };
      pen.textAlign = "right";
      const named = (tokens, i, many) => (many || tokens[i] === String(i) ? `${tokens[i]}` : `${tokens[i]} ${i}`);
      for (const i of ticks(part.q0, part.q1, box.height, text * 2)) pen.fillText(named(about.query_tokens, i, part.q1 - part.q0 < 40), box.left - 8, Math.max(box.top + text / 2, down(i + 0.5)), box.left - 12);
      pen.textAlign = "center";
      for (const j of ticks(part.k0, part.k1, box.width, 64)) pen.fillText(named(about.tokens, j, part.k1 - part.k0 < 16), Math.max(box.left + 12, across(j + 0.5)), box.top + box.height + ALONG + FOOT / 2, 60);
    }

    /** Sinks above the map, queries that find something beside it. */
    function marks(colour) {
      pen.fillStyle = colour("accent");
      const triangle = (x, y, dx, dy) => {
        pen.beginPath();
        pen.moveTo(x, y);
        pen.lineTo(x - dx - dy / 1.6, y - dy - dx / 1.6);
        pen.lineTo(x - dx + dy / 1.6, y - dy + dx / 1.6);
        pen.fill();
      };
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      let free = 0;
      for (const one of found.sinks ?? []) {
        if (one.key < part.k0 || one.key >= part.k1) continue;
        const x = across(one.key + 0.5);
        triangle(x, box.top - 2, 0, 8);
        if (x + 8 > free) {
          pen.fillText(`${one.token} is a sink`, x + 8, box.top - 9, 160);
          free = x + 8 + Math.min(160, pen.measureText(`${one.token} is a sink`).width) + 12;
        }
      }
      for (const one of found.found ?? []) if (one.query >= part.q0 && one.query < part.q1) triangle(box.left - 1, down(one.query + 0.5), 6, 0);
    }

    function bars(colour) {
      const ready = sharp && same(sharp.part, part) && sharp.along;
      const values = ready ? sharp.along : whole?.along;
      if (!values) return;
      const [first, last] = ready ? [part.k0, part.k1] : [0, columns];
      const most = found.ceiling || 1e-12;
      const base = box.top + box.height + 6;
      pen.save();
      pen.beginPath();
      pen.rect(box.left, base, box.width, ALONG);
      pen.clip();
      pen.fillStyle = colour("accent");
      values.forEach((one, n) => {
        const [a, b] = [across(first + (n * (last - first)) / values.length), across(first + ((n + 1) * (last - first)) / values.length)];
        pen.fillRect(a, base, Math.max(0.75, b - a - 0.5), (ALONG - 12) * Math.min(1, one / most)); // sinks are cut off
      });
      pen.restore();
      pen.fillStyle = colour("soft");
      pen.textAlign = "right";
      pen.fillText("received", box.left - 8, base + 8, box.left - 12);
    }

    function minimap(colour) {
      const tall = Math.max(32, Math.min(2 * MINI, (MINI * rows) / columns));
      const dpr = devicePixelRatio || 1;
      mini.width = Math.round(MINI * dpr);
      mini.height = Math.round(tall * dpr);
      mini.style.width = `${MINI}px`;
      const small = mini.getContext("2d");
      small.setTransform(dpr, 0, 0, dpr, 0, 0);
      small.fillStyle = colour("line");
      small.fillRect(0, 0, MINI, tall);
      small.imageSmoothingEnabled = true;
      if (whole) small.drawImage(whole.picture, 0, 0, MINI, tall);
      const rect = [(MINI * part.k0) / columns, (tall * part.q0) / rows, Math.max(4, (MINI * (part.k1 - part.k0)) / columns), Math.max(4, (tall * (part.q1 - part.q0)) / rows)];
      small.lineWidth = 4;
      small.strokeStyle = colour("card");
      small.strokeRect(...rect);
      small.lineWidth = 2;
      small.strokeStyle = colour("accent");
      small.strokeRect(...rect);
    }

    function tell(now) {
      const count = about.layers?.length ?? 0;
      fill(controls,
        count > 1 ? choice("layer", about.layers.map((number, i) => [i, `layer ${number}`]), place(now, "layer", count), (one) => set({ layer: one === "0" ? null : one })) : null,
        about.heads > 1 ? choice("head", Array.from({ length: about.heads }, (_, i) => [i, `head ${i}`]), head(), (one) => set({ head: one === "0" ? null : one })) : null,
        h("span", { class: "segment", role: "group", "aria-label": "Size" },
          h("button", { type: "button", "aria-label": "Smaller", disabled: all(part), onclick: () => closer(1 / CLOSER) }, "−"),
          h("button", { type: "button", "aria-label": "Larger", onclick: () => closer(CLOSER) }, "+")),
        h("button", { type: "button", disabled: all(part), onclick: out }, "Whole map"),
        whole ? legend([edges[0], edges.at(-1)], "by their logarithm") : null);
      fill(facts, outstanding(found, (query, key) => set({ ...around(query, key), ...(query === null ? {} : { query }) })));
    }

    /** A screenful around a pair; all queries where none is said. */
    function around(query, key) {
      const window = (middle, count) => {
        const size = Math.min(count, SCREENFUL);
        const from = Math.max(0, Math.min(count - size, middle - size / 2));
        return [from, from + size];
      };
      const [k0, k1] = window(key, columns);
      const [q0, q1] = query === null ? [0, rows] : window(Math.min(query, rows - 1), rows);
      return { q0, q1, k0, k1 };
    }

    async function named_query(now, mine) {
      const query = place(now, "query", rows, -1);
      if (query < 0) return;
      const row = await ifThere(ask("/query", { ...said(), query })).catch(() => null);
      if (mine !== asked || !row) return;
      fill(facts.querySelector(".row-of"), looksAt(about.query_tokens[query], query, row));
    }

    function at(event) {
      const area = canvas.getBoundingClientRect();
      const scale = area.width / (canvas.width / (devicePixelRatio || 1)) || 1;
      const [x, y] = [((event.clientX - area.left) / scale - box.left) / box.width, ((event.clientY - area.top) / scale - box.top) / box.height];
      if (x < 0 || y < 0 || x >= 1 || y >= 1) return null;
      return { x, y, query: part.q0 + Math.floor(y * (part.q1 - part.q0)), key: part.k0 + Math.floor(x * (part.k1 - part.k0)) };
    }

    function named(event) {
      const found = at(event);
      if (!found) return;
      const shown = sharp && same(sharp.part, part) ? sharp : whole;
      if (!shown) return;
      const [q0, q1, k0, k1] = shown === whole ? [0, rows, 0, columns] : [part.q0, part.q1, part.k0, part.k1];
      const [i, j] = [Math.floor(((found.query - q0) * shown.shape[0]) / (q1 - q0)), Math.floor(((found.key - k0) * shown.shape[1]) / (k1 - k0))];
      const place = i * shown.shape[1] + j;
      const number = shown.numbers ? shown.numbers[place] : edges[shown.tones[place]];
      const bound = shown.numbers && shown.exact ? "" : "at most ";
      hover.textContent = `${about.query_tokens[found.query]} (${found.query}) → ${about.tokens[found.key]} (${found.key}): ${bound}${two(number)}`;
      hover.title = full(number);
    }

    /** A part of the same shape, larger or smaller, around a place of what is seen. */
    function resized(by, x = 0.5, y = 0.5) {
      const one = (first, last, count, at) => {
        const size = Math.round(Math.max(Math.min(LEAST, count), Math.min(count, (last - first) / by)));
        const middle = first + at * (last - first);
        const from = Math.max(0, Math.min(count - size, Math.round(middle - at * size)));
        return [from, from + size];
      };
      const [q0, q1] = one(part.q0, part.q1, rows, y);
      const [k0, k1] = one(part.k0, part.k1, columns, x);
      return { q0, q1, k0, k1 };
    }

    function moved(dx, dy) {
      const one = (first, last, count, by) => {
        const from = Math.max(0, Math.min(count - (last - first), Math.round(first + by)));
        return [from, from + last - first];
      };
      const [q0, q1] = one(part.q0, part.q1, rows, dy);
      const [k0, k1] = one(part.k0, part.k1, columns, dx);
      return { q0, q1, k0, k1 };
    }

    const shown = (one) => (all(one) ? { q0: null, q1: null, k0: null, k1: null } : one);
    const closer = (by, x, y) => set(shown(resized(by, x, y)));
    const out = () => set({ q0: null, q1: null, k0: null, k1: null, query: null });
    const step = (dx, dy) => set(shown(moved((dx * (part.k1 - part.k0)) / 4, (dy * (part.q1 - part.q0)) / 4)), { quiet: true });
    let waiting = 0;

    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, y: event.clientY, part, far: false };
      if (!all(part)) canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!box) return;
      if (held && (Math.abs(event.clientX - held.x) > CLICK || Math.abs(event.clientY - held.y) > CLICK)) held.far = true;
      if (!held?.far || all(held.part)) return named(event);
      part = held.part;
      part = moved(((held.x - event.clientX) * (part.k1 - part.k0)) / box.width, ((held.y - event.clientY) * (part.q1 - part.q0)) / box.height);
      waiting ||= requestAnimationFrame(() => {
        waiting = 0;
        draw();
      });
    });
    canvas.addEventListener("pointerup", (event) => {
      const [drag, found] = [held, box && at(event)];
      held = null;
      if (drag?.far) return all(part) ? null : set(shown(part));
      if (!drag || !found) return;
      set(sharp?.exact && part.q1 - part.q0 <= SCREENFUL ? { query: found.query } : shown(resized(CLOSER, found.x, found.y)));
    });
    canvas.addEventListener("wheel", (event) => {
      if (!box || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      const found = at(event);
      if (found) closer(event.deltaY < 0 ? 2 : 0.5, found.x, found.y);
    }, { passive: false });

    function middle(event) {
      const area = mini.getBoundingClientRect();
      const [x, y] = [(event.clientX - area.left) / area.width, (event.clientY - area.top) / area.height];
      return moved(x * columns - (part.k0 + part.k1) / 2, y * rows - (part.q0 + part.q1) / 2);
    }
    mini.addEventListener("pointerdown", (event) => {
      mini.setPointerCapture(event.pointerId);
      part = middle(event);
      draw();
    });
    mini.addEventListener("pointermove", (event) => {
      if (!event.buttons) return;
      part = middle(event);
      draw();
    });
    mini.addEventListener("pointerup", () => set(shown(part)));

    function numbers() {
      const one = sharp ?? whole;
      if (!one) return [["key", "token", "received", "share"], ...(found.most ?? []).map((n) => [n.key, n.token, full(n.received), full(n.share)])];
      const [height, width] = one.shape;
      const place = (n, count, first, last) => first + Math.ceil((n * (last - first)) / count);
      const heading = ["query \\ key", ...Array.from({ length: width }, (_, j) => place(j, width, part.k0, part.k1))];
      return [heading, ...Array.from({ length: height }, (_, i) => [place(i, height, part.q0, part.q1), ...Array.from({ length: width }, (_, j) => full(one.numbers ? one.numbers[i * width + j] : edges[one.tones[i * width + j]]))])];
    }

    const exports = () => ({
      name: "long",
      rows: numbers(),
      python: about.views ? null : all(part) ? `seen = ch.observe(q, k, v${about.options}, map=(256, 256), received=True, top=2)\nseen.map.max[${head()}]`
        : `seen = ch.observe(q, k, v${about.options}, queries=range(${part.q0}, ${part.q1}))\nseen.queries.weights[..., ${part.k0}:${part.k1}]`,
      picture: canvas,
    });

    const again = () => part && draw();
    addEventListener("resize", again);
    return {
      update,
      exports,
      shown: () => update(state()),
      end: () => removeEventListener("resize", again),
      found: (kind, i) => set(kind === "query" ? { ...around(i, i), query: i } : around(null, i)),
      keys: {
        Escape: out,
        "+": () => closer(CLOSER),
        "-": () => closer(1 / CLOSER),
        ArrowLeft: () => step(-1, 0),
        ArrowRight: () => step(1, 0),
        ArrowUp: () => step(0, -1),
        ArrowDown: () => step(0, 1),
        ",": () => set({ head: Math.max(0, head() - 1) || null }),
        ".": () => set({ head: Math.min(about.heads - 1, head() + 1) }),
      },
    };
  },
};
