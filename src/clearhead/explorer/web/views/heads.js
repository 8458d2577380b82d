// Every head of a model: a thumbnail each; sorted; one opened as a map, as lines between tokens, as coloured text.

import { ifThere } from "../ask.js";
import { css, ink } from "../colour.js";
import { choice, fill, h, segment } from "../dom.js";
import { bitmap, colours, shaded, sheet, timed } from "../draw.js";
import { field } from "../field.js";
import { full, two } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

const SORTS = [["layer", "by layer"], ["entropy", "lowest entropy"], ["distance", "nearest"], ["first", "most on the first token"], ["like", "like what you drew"]];
const FORMS = [["map", "map"], ["lines", "lines"], ["text", "coloured text"]];
const WHICH = [["head", "this head"], ["mean", "mean of all heads"], ["chosen", "mean of chosen heads"], ["rollout", "rollout"]];
const CLICKS = [["open", "click opens"], ["choose", "click chooses"]];
const GRID = 8; // rows and columns of what is drawn
const PATTERNS = [
  ["itself", (i, j) => i === j],
  ["before", (i, j) => i === j + 1],
  ["after", (i, j) => j === i + 1],
  ["first", (i, j) => j === 0],
];
const THUMB = 72; // pixels of a thumbnail, at most
const LABEL = 20; // below it
const GAP = 8;
const FAINT = 0.04; // weights below it have no line

export const heads = {
  id: "heads",
  title: "Heads of a model",
  short: "Heads",
  lede: "One thumbnail for each head. Open one, sort them, or draw the pattern that you look for.",
  of: "model",
  async show(root, { about, ask, set, say, state, live }) {
    describe([["[ ]", "the layer before, the next"], [", .", "the head before, the next"], ["x", "choose this head, or not"]]);
    const reads = about.reads && live;
    const input = (label, value, hint, act) => h("input", { type: "text", value, disabled: !reads, placeholder: hint, "aria-label": label, onchange: (event) => act(event.target.value) });
    const typed = input("Text", about.text, "", (text) => set({ text, query: null, key: null }));
    const other = input("Second text", state().other ?? "", "a second text, to compare", (text) => set({ other: text }));
    const controls = h("div", { class: "controls" });
    const board = h("div", { class: "atlas" });
    const panel = h("div", { class: "halves opened" });
    const drawing = h("aside", { class: "card panel" });
    root.append(
      about.text ? h("div", { class: "card controls" }, h("label", {}, "text", typed), h("label", {}, "beside", other), reads ? null : h("p", { class: "muted" }, "Other texts need the live page.")) : "",
      controls,
      h("div", { class: "split wide" }, h("div", { class: "card scroll" }, board), drawing),
      panel,
    );
    // of all layers: the layer that is looked at is no part of the question
    const words = (now) => ({ layer: null, text: reads && now.text ? now.text : null });
    const chosen = (now) => (now.chosen ?? "").split(",").filter((one) => /^\d+\.\d+$/.test(one));
    const sorts = (facts, like) => SORTS.filter(([one]) => one === "layer" || (one === "like" ? like : facts[one]));
    let asked = 0;
    let ended = [];
    let opened = []; // {title, found}
    let maps = null; // {atlas, layers: a bitmap of each layer}
    let last = null; // what the atlas was drawn from

    async function update(now) {
      const mine = ++asked;
      const [facts, atlas] = await Promise.all([ask("/heads", words(now)), ask("/atlas", words(now))]);
      const drawn = (now.drawn ?? "").length === GRID * GRID ? now.drawn : null;
      const like = drawn && live ? (await ask("/like", { ...words(now), drawn })).like : null;
      const [layers, count] = atlas.shape;
      const layer = place(now, "layer", layers), head = place(now, "head", count);
      const texts = [[words(now), about.text], ...(now.other && reads ? [[{ text: now.other }, now.other]] : [])];
      const found = await Promise.all(texts.map(async ([text, title]) => ({ title, found: await weights(now, layer, head, text) })));
      if (mine !== asked) return;
      const painted = timed("heads");
      const sort = sorts(facts, like).some(([one]) => one === now.sort) ? now.sort : "layer";
      const which = WHICH.some(([one]) => one === now.which) && about.whole !== false ? now.which : "head";
      fill(controls,
        choice("order", sorts(facts, like), sort, (one) => set({ sort: one })),
        about.whole === false ? null : [
          segment("Shown as", FORMS, now.form ?? "map", (one) => set({ form: one })),
          choice("of", WHICH.filter(([one]) => one !== "chosen" || chosen(now).length), which, (one) => set({ which: one })),
          h("label", {}, h("input", { type: "checkbox", checked: now.merged === "1", onchange: (event) => set({ merged: event.target.checked ? "1" : null }) }), "whole words"),
          segment("A click on a head", CLICKS, now.click ?? "open", (one) => set({ click: one === "open" ? null : one })),
          chosen(now).length ? h("button", { type: "button", onclick: () => set({ chosen: null, which: now.which === "chosen" ? null : now.which }) }, `Forget ${chosen(now).length} chosen`) : null,
        ]);
      if (maps?.atlas !== atlas) {
        const [, , height, width] = atlas.shape;
        maps = { atlas, layers: Array.from({ length: layers }, (_, l) => bitmap(atlas.data, count * height, width, l * count * height * width)) };
      }
      last = { facts, like, sort, layer, head, now };
      thumbnails();
      fill(drawing, sketch(drawn));
      opened = found;
      const before = ended;
      ended = [];
      fill(panel, found.map((one, n) => card(now, one, n === 0)));
      for (const show of ended) show.start?.();
      before.forEach((one) => one.end?.());
      painted();
      const named = which === "head" ? `Layer ${facts.layers[layer]}, head ${head}: entropy ${two(facts.entropy[layer][head])}` : WHICH.find(([one]) => one === which)[1];
      say(named);
    }

    /** All thumbnails on one canvas, and over each of them a button. */
    function thumbnails() {
      const { facts, like, sort, layer, head, now } = last;
      const [layers, count, height, width] = maps.atlas.shape;
      const number = (i) => {
        const [l, n] = [Math.floor(i / count), i % count];
        return sort === "layer" ? i : sort === "first" ? -facts.first[l][n] : sort === "like" ? -like[l][n] : facts[sort][l][n];
      };
      const order = Array.from({ length: layers * count }, (_, i) => i).sort((a, b) => number(a) - number(b));
      const room = Math.max(200, board.parentElement.clientWidth - 34);
      const matrix = sort === "layer" && count * 48 <= room; // a row for each layer
      const across = matrix ? count : Math.max(3, Math.floor(room / (THUMB + GAP)));
      const side = Math.min(THUMB, Math.floor(room / across) - GAP);
      const [wide, tall] = [side + GAP, side + LABEL + GAP];
      const down = Math.ceil(order.length / across);
      const { canvas, pen } = sheet(across * wide, down * tall, { role: "img", "aria-label": `Maps of ${order.length} heads` });
      pen.imageSmoothingEnabled = side < width;
      const picked = new Set(chosen(now));
      const buttons = order.map((i, at) => {
        const [l, n] = [Math.floor(i / count), i % count];
        const [x, y] = [(at % across) * wide, Math.floor(at / across) * tall];
        pen.drawImage(maps.layers[l], 0, n * height, width, height, x + GAP / 2, y + GAP / 2, side, side);
        const said = [["entropy", facts.entropy], ["distance", facts.distance], ["first token", facts.first], ["likeness", like]].filter(([, all]) => all);
        const button = h("button", {
          type: "button", class: `thumb${picked.has(`${l}.${n}`) ? " chosen" : ""}`, "aria-pressed": String(l === layer && n === head),
          title: said.map(([name, all]) => `${name} ${two(all[l][n])}`).join(", "),
          onclick: (event) => (now.click === "choose" || event.shiftKey ? choose(l, n) : set({ layer: l || null, head: n || null, which: null })),
        }, `${facts.layers[l]}·${n}`);
        Object.assign(button.style, { left: `${x}px`, top: `${y}px`, width: `${wide - 2}px`, height: `${tall - 2}px` });
        return button;
      });
      canvas.style.height = `${down * tall}px`;
      board.style.height = `${down * tall}px`;
      fill(board, canvas, buttons);
    }

    function choose(l, n) {
      const now = chosen(state());
      const one = `${l}.${n}`;
      const all = now.includes(one) ? now.filter((name) => name !== one) : [...now, one];
      set({ chosen: all.join(",") || null, which: all.length ? "chosen" : null });
    }

    /** What is opened: {rows, tokens, query_tokens}, with shades alone where a saved file has no more. */
    async function weights(now, layer, head, text) {
      if (about.whole === false) return ask("/tones", tones(layer, head)).then((found) => ({ shades: found, pooled: true }), (error) => ({ error }));
      const which = WHICH.some(([one]) => one === now.which) ? now.which : "head";
      const merged = now.merged === "1" ? 1 : null;
      const at = { layer: layer || null, head: head || null };
      try {
        if (which !== "head" || merged) {
          const found = await ask("/words", { ...text, which, merged, ...(which === "head" ? at : {}), chosen: which === "chosen" ? chosen(now).join(",") : null });
          return { ...found, rows: found.weights };
        }
        const [named, numbers] = await Promise.all([
          ask("/about", { ...text, layer: at.layer }),
          ifThere(ask("/matrix", { ...text, ...at, what: "weights" })),
        ]);
        if (!numbers) return { shades: await ask("/shade", { ...text, ...at, scale_of: "linear", what: "weights" }), tokens: named.tokens, query_tokens: named.query_tokens };
        const width = numbers.shape[1];
        const rows = Array.from({ length: numbers.shape[0] }, (_, i) => numbers.data.subarray(i * width, (i + 1) * width));
        return { rows, tokens: named.tokens, query_tokens: named.query_tokens };
      } catch (error) {
        return { error };
      }
    }

    const tones = (layer, head) => ({ layer: layer || null, head: head || null, side: about.side });

    function card(now, { title, found }, first) {
      const elsewhere = (view, words) => h("button", { type: "button", onclick: () => set({ view }) }, words);
      const where = !first || (now.which ?? "head") !== "head" || now.merged === "1" ? null : about.whole === false ? elsewhere("long", "Open in Long context") : elsewhere("heat", "Open in the heat map");
      const form = now.form ?? "map";
      const body = found.error ? h("p", { class: "muted" }, found.error.message)
        : found.pooled ? pooled(found.shades)
          : form === "map" ? mapped(found)
            : !found.rows ? h("p", { class: "muted" }, "This needs the live page: clearhead explore.")
              : form === "lines" ? lines(found, place(now, "query", found.query_tokens.length, -1)) : coloured(found, place(now, "query", found.query_tokens.length, 0));
      return h("section", { class: "card" }, h("div", { class: "heading" }, h("h2", {}, title || about.name), where), body);
    }

    function pooled({ shape: [height, width], data }) {
      const { canvas, pen } = sheet(384, (384 * height) / width, { role: "img", "aria-label": "The pooled map: queries down, keys across" });
      pen.imageSmoothingEnabled = false;
      pen.drawImage(bitmap(data, height, width), 0, 0, 384, (384 * height) / width);
      return [canvas, h("p", { class: "muted" }, "Pooled: each cell is the largest weight of its block, by its logarithm.")];
    }

    function mapped(found) {
      const [rows, columns] = [found.query_tokens.length, found.tokens.length];
      const shades = found.rows ? shaded(found.rows, { low: 0 }).shades : found.shades.data;
      const says = h("p", { class: "muted", role: "status" }, found.rows ? "Point at a cell." : "Shades alone: numbers need the live page.");
      const plot = field({
        rows, columns, tallest: 520, label: `Weights of ${rows} queries over ${columns} keys`,
        point: ({ query, key }) => {
          if (!found.rows) return;
          says.textContent = `${found.query_tokens[query]} → ${found.tokens[key]}: ${two(found.rows[query][key])}`;
          says.title = full(found.rows[query][key]);
        },
      });
      const content = { picture: bitmap(shades, rows, columns), hidden: false, names: [found.query_tokens, found.tokens], shade: (i, j) => shades[i * columns + j], number: found.rows && ((i, j) => found.rows[i][j]) };
      ended.push({ start: () => plot.show(content, null, null), end: plot.end });
      return [h("div", {}, plot.canvas), says];
    }

    function lines(found, query) {
      const step = 22, wide = 440;
      const count = Math.max(found.tokens.length, found.query_tokens.length);
      const { canvas, pen } = sheet(wide, count * step + 8, { role: "img", "aria-label": "Lines from each query, left, to the keys that it attends to, right; as thick as weights" });
      const colour = colours();
      const [from, to] = [150, wide - 150];
      pen.strokeStyle = colour("accent");
      found.rows.forEach((row, i) => row.forEach((weight, j) => {
        if (weight < FAINT) return;
        pen.globalAlpha = query >= 0 && i !== query ? 0.06 : Math.min(1, weight + 0.1);
        pen.lineWidth = 0.5 + 5 * weight;
        pen.beginPath();
        pen.moveTo(from, (i + 0.5) * step);
        pen.bezierCurveTo((from + to) / 2, (i + 0.5) * step, (from + to) / 2, (j + 0.5) * step, to, (j + 0.5) * step);
        pen.stroke();
      }));
      pen.globalAlpha = 1;
      pen.font = `${Math.round(Number.parseFloat(getComputedStyle(document.documentElement).fontSize) * 0.8125)}px ${colour("sans") || "sans-serif"}`;
      pen.textBaseline = "middle";
      pen.textAlign = "right";
      found.query_tokens.forEach((name, i) => {
        pen.fillStyle = colour(i === query ? "accent" : "ink");
        pen.fillText(name, from - 8, (i + 0.5) * step, from - 12);
      });
      pen.textAlign = "left";
      pen.fillStyle = colour("ink");
      found.tokens.forEach((name, j) => pen.fillText(name, to + 8, (j + 0.5) * step, 138));
      canvas.addEventListener("click", (event) => {
        const area = canvas.getBoundingClientRect();
        const i = Math.floor(((event.clientY - area.top) / area.height) * (count * step + 8) / step);
        if (i < found.query_tokens.length) set({ query: i === query ? null : i });
      });
      const picked = choice("lines of", [["", "all queries"], ...found.query_tokens.map((name, i) => [i, `${name} (${i})`])], query >= 0 ? query : "", (one) => set({ query: one === "" ? null : one }));
      return [h("div", { class: "controls" }, picked), canvas, h("p", { class: "muted" }, `Queries left, keys right; weights below ${two(FAINT)} have no line.`)];
    }

    function coloured(found, query) {
      const { shades } = shaded([found.rows[query]], { low: 0 });
      const same = found.tokens.length === found.query_tokens.length && found.tokens.every((name, j) => name === found.query_tokens[j]);
      const spans = found.tokens.map((name, j) => {
        const one = { class: "word", title: full(found.rows[query][j]) };
        const word = same ? h("button", { ...one, type: "button", "aria-pressed": String(j === query), onclick: () => set({ query: j }) }, name) : h("span", one, name);
        word.style.background = css(shades[j]);
        word.style.color = ink(shades[j]);
        return word;
      });
      const queries = same ? null : choice("query", found.query_tokens.map((name, i) => [i, name]), query, (one) => set({ query: one }));
      return [h("p", { class: "muted" }, `What ${found.query_tokens[query]} attends to${same ? "; click another word." : "."}`), queries, h("p", { class: "text" }, spans)];
    }

    function sketch(drawn) {
      if (!live) return [h("h2", {}, "Draw a pattern"), h("p", { class: "muted" }, "Finding heads by a drawing needs the live page.")];
      const draw = (cells) => set({ drawn: cells.includes("1") ? cells.join("") : null, sort: cells.includes("1") ? "like" : null });
      const now = Array.from(drawn ?? "0".repeat(GRID * GRID));
      const cells = now.map((one, i) =>
        h("button", { type: "button", class: "pixel", "aria-pressed": String(one === "1"), "aria-label": `row ${Math.floor(i / GRID) + 1}, column ${(i % GRID) + 1}`,
          onclick: () => draw(now.with(i, one === "1" ? "0" : "1")) }));
      const preset = ([name, is]) => h("button", { type: "button", onclick: () => draw(now.map((_, i) => (is(Math.floor(i / GRID), i % GRID) ? "1" : "0"))) }, name);
      return [
        h("h2", {}, "Draw a pattern"),
        h("p", { class: "muted" }, "Queries down, keys across: heads that look like it come first."),
        h("div", { class: "pixels" }, cells),
        h("div", { class: "controls presets" }, PATTERNS.map(preset), drawn ? h("button", { type: "button", onclick: () => draw([]) }, "Clear") : null),
      ];
    }

    const PYTHON = { mean: "seen.matrix(heads='mean', layers='mean').weights", rollout: "seen.rollout()[0]" };

    function exports() {
      const { found, title } = opened[0];
      const now = state();
      const which = now.which ?? "head";
      const seen = "with ch.watch(model, want={'keep': True}, tokens=tokenizer) as seen:\n    model(**tokenizer(text, return_tensors='pt'))\n";
      const some = chosen(now).map((one) => one.split(".")).map(([l, n]) => `seen.matrix(layers=${l}, heads=${n}).weights`);
      const line = which === "chosen" ? `np.mean([${some.join(", ")}], axis=0)` : PYTHON[which] ?? `seen.matrix(layers=${place(now, "layer", about.layers.length)}, heads=${place(now, "head", about.heads)}).weights`;
      const body = found.rows?.map((row, i) => [found.query_tokens[i], ...Array.from(row, full)]);
      return {
        name: `heads-${which}`,
        rows: body ? [["", ...found.tokens], ...body] : null,
        python: about.views ? null : `text = ${JSON.stringify(title)}\n${seen}weights = ${line}`,
        picture: panel,
      };
    }

    const turn = (name, count, by) => set({ [name]: Math.min(count - 1, Math.max(0, place(state(), name, count) + by)) });
    const again = () => last && thumbnails();
    addEventListener("resize", again);
    return {
      update,
      exports,
      shown: () => update(state()),
      end: () => {
        removeEventListener("resize", again);
        ended.forEach((one) => one.end?.());
      },
      keys: {
        "[": () => turn("layer", about.layers.length, -1), "]": () => turn("layer", about.layers.length, 1),
        ",": () => turn("head", about.heads, -1), ".": () => turn("head", about.heads, 1),
        x: () => choose(place(state(), "layer", about.layers.length), place(state(), "head", about.heads)),
      },
    };
  },
};
