// Every head of a model: a thumbnail each; sorted; one opened as a map, as lines between tokens, as coloured text.

import { css, ink, rgb } from "../colour.js";
import { choice, fill, h, segment } from "../dom.js";
import { picture, sheet, colours } from "../draw.js";
import { full, two } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

const SORTS = [["layer", "by layer"], ["entropy", "lowest entropy"], ["distance", "nearest"], ["first", "most on the first token"], ["like", "like what you drew"]];
const FORMS = [["map", "map"], ["lines", "lines"], ["text", "coloured text"]];
const WHICH = [["head", "this head"], ["mean", "mean of all heads"], ["rollout", "rollout"]];

export const heads = {
  id: "heads",
  title: "Heads of a model",
  lede: "One thumbnail for each head. Open one, sort them, or draw the pattern that you look for.",
  of: "model",
  async show(root, { about, ask, set, say, state, live }) {
    describe([["[ ]", "the layer before, the next"], [", .", "the head before, the next"]]);
    const typed = h("input", { type: "text", value: about.text, disabled: !about.reads || !live, "aria-label": "Text", onchange: (event) => set({ text: event.target.value, query: null, key: null }) });
    const other = h("input", { type: "text", value: state().other ?? "", disabled: !about.reads || !live, placeholder: "a second text, to compare", "aria-label": "Second text", onchange: (event) => set({ other: event.target.value }) });
    const controls = h("div", { class: "controls" });
    const board = h("div", { class: "card atlas" });
    const panel = h("div", { class: "halves" });
    const drawing = h("div", { class: "card" });
    root.append(h("div", { class: "card controls" }, h("label", {}, "text", typed), h("label", {}, "beside", other), about.reads && live ? null : h("p", { class: "muted" }, "Other texts need the live page.")), controls, board, panel, drawing);
    // of all layers: the layer that is looked at is no part of the question
    const words = (now) => ({ layer: null, text: about.reads && live && now.text ? now.text : null });
    let asked = 0;

    async function update(now) {
      const mine = ++asked;
      const [facts, atlas] = await Promise.all([ask("/heads", words(now)), ask("/atlas", words(now))]);
      const drawn = (now.drawn ?? "").length === 64 ? now.drawn : null;
      const like = drawn && live ? (await ask("/like", { ...words(now), drawn })).like : null;
      if (mine !== asked) return;
      const [layers, count] = atlas.shape;
      const layer = place(now, "layer", layers), head = place(now, "head", count);
      const sort = SORTS.some(([one]) => one === now.sort) ? now.sort : "layer";
      fill(controls, choice("order", SORTS.filter(([one]) => one !== "like" || like), sort, (one) => set({ sort: one })),
        segment("Shown as", FORMS, now.form ?? "map", (one) => set({ form: one })),
        choice("of", WHICH, now.which ?? "head", (one) => set({ which: one })),
        h("label", {}, h("input", { type: "checkbox", checked: now.merged === "1", onchange: (event) => set({ merged: event.target.checked ? "1" : null }) }), "whole words"));
      fill(board, thumbnails(atlas, facts, like, sort, layer, head));
      fill(drawing, board8(drawn));
      const shown = [await opened(now, layer, head, words(now), about.text)];
      if (now.other && about.reads && live) shown.push(await opened(now, layer, head, { text: now.other }, now.other));
      if (mine !== asked) return;
      fill(panel, shown);
      say(`Layer ${facts.layers[layer]}, head ${head}: entropy ${two(facts.entropy[layer][head])}`);
    }

    function thumbnails(atlas, facts, like, sort, layer, head) {
      const [layers, count, height, width] = atlas.shape;
      const all = Array.from({ length: layers * count }, (_, i) => i);
      const number = (i) => {
        const [l, n] = [Math.floor(i / count), i % count];
        return sort === "layer" ? i : sort === "first" ? -facts.first[l][n] : sort === "like" ? -(like?.[l][n] ?? 0) : facts[sort][l][n];
      };
      all.sort((a, b) => number(a) - number(b));
      return all.map((i) => {
        const [l, n] = [Math.floor(i / count), i % count];
        const image = new ImageData(width, height);
        const start = i * height * width;
        for (let c = 0; c < height * width; c++) image.data.set([...rgb(atlas.data[start + c]), 255], 4 * c);
        const canvas = h("canvas", { width, height, "aria-hidden": "true" });
        canvas.getContext("2d").putImageData(image, 0, 0);
        return h("button", {
          type: "button", class: "thumb", "aria-pressed": String(l === layer && n === head), title: `entropy ${two(facts.entropy[l][n])}, distance ${two(facts.distance[l][n])}, first token ${two(facts.first[l][n])}`,
          onclick: () => set({ layer: l || null, head: n || null }),
        }, canvas, h("span", {}, `${facts.layers[l]}·${n}`));
      });
    }

    async function opened(now, layer, head, text, title) {
      const which = now.which ?? "head";
      const found = which === "head" && now.merged !== "1"
        ? await wholeHead(layer, head, text)
        : await ask("/words", { ...text, which, merged: now.merged === "1" ? 1 : null, ...(which === "head" ? { layer: layer || null, head: head || null } : {}) });
      const form = now.form ?? "map";
      const body = form === "lines" ? lines(found) : form === "text" ? coloured(found, place(now, "query", found.query_tokens.length, 0)) : mapped(found);
      return h("section", { class: "card" }, h("h2", {}, title), body);
    }

    async function wholeHead(layer, head, text) {
      const said = { ...text, layer: layer || null, head: head || null };
      const [about, array] = await Promise.all([ask("/about", { ...text, layer: layer || null }), ask("/matrix", { ...said, what: "weights" })]);
      const width = array.shape[1];
      const weights = Array.from({ length: array.shape[0] }, (_, i) => Array.from(array.data.subarray(i * width, (i + 1) * width)));
      return { weights, tokens: about.tokens, query_tokens: about.query_tokens };
    }

    function mapped(found) {
      const shown = picture(found.weights, { side: 380, low: 0, label: "Weights, queries down, keys across" });
      const says = h("p", { class: "muted", role: "status" }, "queries down, keys across");
      shown.canvas.addEventListener("pointermove", (event) => {
        const area = shown.canvas.getBoundingClientRect();
        const j = Math.floor(((event.clientX - area.left) / area.width) * found.tokens.length);
        const i = Math.floor(((event.clientY - area.top) / area.height) * found.query_tokens.length);
        const weight = found.weights[i]?.[j];
        if (weight === undefined) return;
        says.textContent = `${found.query_tokens[i]} → ${found.tokens[j]}: ${two(weight)}`;
        says.title = full(weight);
      });
      return [shown.canvas, says];
    }

    function lines(found) {
      const step = 22;
      const count = Math.max(found.tokens.length, found.query_tokens.length);
      const { canvas, pen } = sheet(420, count * step + 8, { role: "img", "aria-label": "Lines from each query to the keys it attends to, as thick as weights" });
      const colour = colours();
      pen.strokeStyle = colour("accent");
      found.weights.forEach((row, i) => row.forEach((weight, j) => {
        if (weight < 0.04) return;
        pen.globalAlpha = Math.min(1, weight + 0.1);
        pen.lineWidth = 0.5 + 5 * weight;
        pen.beginPath();
        pen.moveTo(140, (i + 0.5) * step);
        pen.lineTo(280, (j + 0.5) * step);
        pen.stroke();
      }));
      pen.globalAlpha = 1;
      pen.fillStyle = colour("ink");
      pen.font = "13px sans-serif";
      pen.textBaseline = "middle";
      pen.textAlign = "right";
      found.query_tokens.forEach((name, i) => pen.fillText(name, 132, (i + 0.5) * step, 128));
      pen.textAlign = "left";
      found.tokens.forEach((name, j) => pen.fillText(name, 288, (j + 0.5) * step, 128));
      return canvas;
    }

    function coloured(found, query) {
      const most = Math.max(...found.weights[query], 1e-12);
      const spans = found.tokens.map((name, j) => {
        const shade = Math.round((254 * found.weights[query][j]) / most);
        const button = h("button", { type: "button", class: "word", title: full(found.weights[query][j]), "aria-pressed": String(j === query), onclick: () => set({ query: j }) }, name);
        button.style.background = css(shade);
        button.style.color = ink(shade);
        return button;
      });
      return [h("p", { class: "muted" }, `What ${found.query_tokens[query]} attends to; click another word.`), h("p", { class: "text" }, spans)];
    }

    function board8(drawn) {
      if (!live) return h("p", { class: "muted" }, "Finding heads by a drawing needs the live page.");
      const cells = Array.from(drawn ?? "0".repeat(64), (one, i) =>
        h("button", { type: "button", class: "pixel", "aria-pressed": String(one === "1"), "aria-label": `row ${Math.floor(i / 8) + 1}, column ${(i % 8) + 1}`,
          onclick: () => {
            const now = Array.from(drawn ?? "0".repeat(64));
            now[i] = now[i] === "1" ? "0" : "1";
            const any = now.includes("1");
            set({ drawn: any ? now.join("") : null, sort: any ? "like" : null });
          } }));
      return [h("h2", {}, "Draw a pattern"), h("p", { class: "muted" }, "Click cells: heads that look like it come first."), h("div", { class: "pixels" }, cells)];
    }

    const turn = (name, count, by) => set({ [name]: Math.min(count - 1, Math.max(0, place(state(), name, count) + by)) });
    return {
      update,
      shown: () => update(state()),
      keys: {
        "[": () => turn("layer", about.layers.length, -1), "]": () => turn("layer", about.layers.length, 1),
        ",": () => turn("head", about.heads, -1), ".": () => turn("head", about.heads, 1),
      },
    };
  },
};
