// From one query to its output, stage after stage; every number of q, k and v can be changed in place.

import { fill, h, s } from "../dom.js";
import { full, two, value } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

const MOST_KEYS = 40; // that are shown at once, around the one pointed at
const FEW_FEATURES = 8; // of q, k and v that are shown at first
const PITCH = 2.75; // rem from a row to the next, as in style.css
const ORDER = ["q", "k", "name", "dots", "scaled", "capped", "bias", "scores", "exponentials", "weights", "v", "arrow", "output"];
const THICKEST = 18; // pixels of an arrow whose weight is 1

export const pipeline = {
  id: "pipeline",
  title: "Pipeline",
  byHead: true,
  lede: "One query on its way to an output. Point at any box to see where it comes from; change any number of Q, K or V.",
  async show(root, { about, ask, set, say, state, live }) {
    describe([["↑ ↓", "the key before, the next"], ["← →", "the query before, the next"]]);
    const rows = about.query_tokens.length;
    const columns = about.tokens.length;
    const head = place(state(), "head", about.heads);
    const chips = h("div", { class: "tokens", role: "group", "aria-label": "Query" });
    const flow = h("div", { class: "flow" });
    const panel = h("aside", { class: "card panel wide", "aria-label": "What is pointed at" });
    const note = live ? null : h("p", { class: "muted" }, "Numbers can be changed on the live page: clearhead explore.");
    root.append(chips, h("div", { class: "card scroll-x" }, flow), panel, note ?? "");
    let asked = 0;
    let drawn = null; // {query, first, all, row}
    const widths = Object.fromEntries(["q", "k", "v"].map((name) => [name, Math.max(...(about[name] ?? [[[0]]]).flat(2).map((one) => short(one).length))]));
    const count = (name) => (state().all ? about.shapes[name].at(-1) : Math.min(about.shapes[name].at(-1), about.shapes[name].at(-1) > FEW_FEATURES ? FEW_FEATURES - 2 : FEW_FEATURES));

    async function update(now) {
      const mine = ++asked;
      const query = place(now, "query", rows);
      const key = place(now, "key", columns, -1);
      const row = await ask("/row", { query, head: head || null });
      if (mine !== asked) return;
      const first = Math.max(0, Math.min(columns - MOST_KEYS, key - MOST_KEYS / 2));
      if (!drawn || drawn.query !== query || drawn.first !== first || drawn.all !== now.all) {
        drawn = { query, first, all: now.all, row };
        fill(chips, about.query_tokens.slice(0, 200).map((name, i) =>
          h("button", { type: "button", "aria-pressed": String(i === query), onclick: () => set({ query: i }) }, name)));
        fill(flow, stages(row, query, first));
      }
      light(now);
      await tell(now, row, query, key, mine);
    }

    function stages(row, query, first) {
      const shown = about.tokens.slice(first, first + MOST_KEYS);
      const allowed = (j) => !row.allowed || row.allowed[j];
      const stage = (title, under, body, more = "") => h("section", { class: `stage ${more}` }, h("h2", {}, title), h("p", {}, under), body);
      const list = (id, title, under, numbers, { masked = false, bars = false } = {}) =>
        stage(title, under, h("ol", {}, shown.map((name, at) => box(id, title, name, first + at, numbers[first + at], masked && !allowed(first + at), bars))));
      const found = [
        h("section", { class: "stage names" }, h("h2", {}, "\u00a0"), h("p", {}, about.query_tokens[query]), h("ol", {}, shown.map((name, at) => h("li", { class: "row-name", "data-stage": "name", "data-key": first + at }, name)))),
        h("section", { class: "stage vectors" }, h("h2", {}, "q over keys K"), vector("q", query, "Query"), h("ol", {}, shown.map((name, at) => h("li", {}, vector("k", first + at, name))))),
        list("dots", "Raw scores", "q · k", row.dots),
        list("scaled", "Scaled", `× ${two(row.scale)}`, row.scaled),
      ];
      if (row.capped) found.push(list("capped", "Softcap", `± ${two(row.softcap)}`, row.capped));
      if (row.bias) found.push(list("bias", "Bias", "+ by position", row.bias));
      if (row.allowed || row.bias) found.push(list("scores", row.allowed ? "Masked" : "Scores", about.mask ?? "sum", row.scores, { masked: true }));
      found.push(
        list("exponentials", "Exponentials", `e^(s − ${two(row.shift)})`, row.exponentials, { masked: true }),
        list("weights", "Weights", `÷ ${two(row.total)}`, row.weights, { masked: true, bars: true }),
        h("section", { class: "stage vectors" }, h("h2", {}, "Values V"), h("p", {}, "weight · v"), h("ol", {}, shown.map((name, at) => h("li", {}, vector("v", first + at, name))))),
        h("section", { class: "stage arrows", "aria-hidden": "true" }, h("h2", {}, "\u00a0"), h("p", {}, "\u00a0"), arrows(row, first, shown.length)),
        stage("Output", `of ${about.query_tokens[query]}`, h("ol", {}, row.output.slice(0, count("v")).map((one, c) =>
          h("li", {}, h("button", {
            type: "button", class: "box", "data-stage": "output", "data-feature": c, title: full(one), "aria-label": `Output, feature ${c + 1}: ${two(one)}`,
            onpointerenter: () => point({ box: "output", feature: c }), onfocus: () => point({ box: "output", feature: c }), onclick: () => pin({ box: "output", feature: c }),
          }, h("span", {}, two(one))))))),
      );
      return found;
    }

    function box(id, title, name, j, number, gone, bars) {
      const bar = bars && !gone ? h("span", { class: "fill" }) : null;
      if (bar) bar.style.width = `${100 * Math.max(0, value(number))}%`;
      return h("li", {}, h("button", {
        type: "button", class: gone ? "box hidden" : "box", "data-stage": id, "data-key": j, title: gone ? "hidden by the mask" : full(number),
        "aria-label": `${title}, ${name}: ${gone ? "hidden" : two(number)}`,
        onpointerenter: () => point({ box: id, key: j }), onfocus: () => point({ box: id, key: j }), onclick: () => pin({ box: id, key: j }),
      }, h("span", {}, gone ? "hidden" : two(number)), bar));
    }

    /** The numbers of one vector, each to be changed; those of many features as their first few. */
    function vector(name, i, token) {
      const all = about[name]?.[Math.floor((head * (about[name]?.length ?? 1)) / about.heads)]?.[i];
      if (!all) return h("span", { class: "muted" }, `${about.shapes[name].at(-1)} features`);
      const feature = (one, c) => h("input", {
        type: "number", step: "any", value: short(one), placeholder: two(one), title: full(one), disabled: !live, "aria-label": `${name}, ${token === "Query" ? about.query_tokens[i] : token}, feature ${c + 1}`,
        "data-stage": name, "data-key": name === "q" ? null : i, "data-feature": c,
        onfocus: (event) => { event.target.value = full(one); point(name === "q" ? { box: "q", feature: c } : { box: name, key: i, feature: c }); },
        onblur: (event) => { if (event.target.value === full(one)) event.target.value = short(one); },
        onpointerenter: () => point(name === "q" ? { box: "q", feature: c } : { box: name, key: i, feature: c }),
        onchange: (event) => edit(name, i, c, event.target.value),
      });
      const boxes = all.slice(0, count(name)).map(feature);
      for (const box of boxes) box.style.width = `${widths[name] + 2}ch`;
      const more = all.length > FEW_FEATURES && name !== "k" && (name === "q" || i === drawn.first)
        ? h("button", { type: "button", class: "more", "aria-label": state().all ? "Fewer features" : "All features", onclick: () => set({ all: state().all ? null : "1" }) }, state().all ? "−" : `+ ${all.length - boxes.length}`)
        : null;
      return h("div", { class: "vector" }, boxes, more);
    }

    function arrows(row, first, shown) {
      const middle = (count("v") * PITCH) / 2;
      const high = 16 * PITCH * Math.max(shown, count("v"));
      const drawing = s("svg", { class: "curves", viewBox: `0 0 80 ${high}` });
      [drawing.style.width, drawing.style.height] = ["5rem", `${high / 16}rem`]; // rows grow with the size of text
      for (let j = first; j < first + shown; j++) {
        const weight = value(row.weights[j]);
        if (!(weight > 0) || (row.allowed && !row.allowed[j])) continue;
        const from = 16 * (PITCH * (j - first) + PITCH / 2 - 0.125);
        const to = 16 * (middle - 0.125);
        drawing.append(s("path", { d: `M0 ${from} C40 ${from} 40 ${to} 70 ${to}`, "stroke-width": Math.max(0.75, THICKEST * weight), "data-stage": "arrow", "data-key": j }));
      }
      drawing.append(s("path", { class: "tip", d: `M68 ${16 * (middle - 0.125) - 7} l12 7 l-12 7 z` }));
      return drawing;
    }

    const point = (where) => state().pinned || set({ key: state().key, feature: null, ...where }, { quiet: true });
    const pin = (where) => set({ key: state().key, feature: null, ...where, pinned: "1" }, { quiet: true });

    /** Where one points: lit as what it is, what it came from, what it goes to. */
    function light(now) {
      const at = ORDER.includes(now.box) ? now.box : now.key ? "weights" : null;
      const key = place(now, "key", columns, -1);
      const feature = now.feature === undefined ? null : Number(now.feature);
      for (const one of flow.querySelectorAll("[data-stage]")) {
        const there = { stage: one.dataset.stage, key: one.dataset.key === undefined ? null : Number(one.dataset.key), feature: one.dataset.feature === undefined ? null : Number(one.dataset.feature) };
        const how = at ? relation({ at, key, feature }, there) : null;
        one.classList.toggle("lit", how === "self");
        one.classList.toggle("from", how === "from");
        one.classList.toggle("to", how === "to");
      }
    }

    async function tell(now, row, query, key, mine) {
      const asking = about.query_tokens[query];
      if (now.box === "output" && now.feature !== undefined) {
        const c = Math.min(row.output.length - 1, Number(now.feature));
        const parts = row.contributions.map((one, j) => [about.tokens[j], value(row.weights[j]) === 0 ? null : one[c]]).filter(([, one]) => one !== null);
        say(`Output ${c + 1} of ${asking}: ${two(row.output[c])}`);
        fill(panel, h("div", {}, h("p", { class: "pair" }, `output ${c + 1} of ${asking}`), h("p", { class: "big", title: full(row.output[c]) }, two(row.output[c])), h("p", { class: "muted" }, "each value's share, added up")),
          h("ol", { class: "work" }, parts.slice(0, 40).map(([name, one]) => h("li", { title: full(one) }, `${name} adds ${two(one)}`)), h("li", {}, `together ${full(row.output[c])}`)));
        return;
      }
      if (key < 0) {
        fill(panel, h("div", {}, h("p", { class: "pair" }, `output of ${asking}`), h("p", { class: "muted" }, `[${row.output.slice(0, 12).map(two).join(", ")}]`)), h("p", { class: "muted" }, "Point at a box: its whole arithmetic appears here."));
        return;
      }
      const cell = await ask("/cell", { query, key, head: head || null });
      if (mine !== asked) return;
      const pair = `${asking} → ${about.tokens[key]}`;
      say(`${pair}: weight ${two(cell.weight)}`);
      fill(panel,
        h("div", {}, h("p", { class: "pair" }, pair), h("p", { class: "big", title: full(cell.weight) }, two(cell.weight)), h("p", { class: "muted" }, now.pinned ? "of this query's attention. Pinned: Esc lets go." : "of this query's attention")),
        h("ol", { class: "work" }, cell.lines.map((line) => h("li", {}, line))));
    }

    function edit(name, i, c, text) {
      if (text === "" || !Number.isFinite(Number(text))) {
        const words = `${name}, feature ${c + 1}: expected a number.`;
        drawn = null;
        update(state()).then(() => {
          fill(panel, h("p", { class: "bad", role: "alert" }, words));
          say(words);
        });
        return;
      }
      const owner = Math.floor((head * about[name].length) / about.heads);
      const where = `${name}.${owner}.${i}.${c}.`;
      const others = (state().edits ?? "").split(";").filter((one) => one && !one.startsWith(where));
      set({ edits: [...others, where + text].join(";") });
    }

    function step(dq, dk) {
      const now = state();
      set({
        box: dk ? (now.box && now.box !== "output" && now.box !== "q" ? now.box : "weights") : now.box,
        query: Math.min(rows - 1, Math.max(0, place(now, "query", rows) + dq)),
        key: dk ? Math.min(columns - 1, Math.max(0, place(now, "key", columns, -1) + dk)) : now.key,
      }, { quiet: true });
    }

    function exports() {
      const { row, query } = drawn;
      const numbers = [["q · k", row.dots], ["scaled", row.scaled], ["score", row.scores], ["exponential", row.exponentials], ["weight", row.weights]];
      const lines = about.tokens.map((name, j) => [name, ...numbers.map(([, all]) => full(all[j])), ...row.contributions[j].map(full)]);
      const output = ["output", "", "", "", "", "", ...row.output.map(full)];
      return {
        name: `pipeline-${about.query_tokens[query]}`,
        picture: root,
        rows: [["key", ...numbers.map(([title]) => title), ...row.output.map((_, c) => `adds to output ${c + 1}`)], ...lines, output],
        python: `print(ch.trace(q, k, v, query=${query}${about.heads > 1 ? `, head=${head}` : ""}${about.options}))`,
      };
    }

    return {
      update,
      shown: () => update(state()),
      exports,
      keys: {
        ArrowLeft: () => step(-1, 0), ArrowRight: () => step(1, 0), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1),
        Enter: () => set({ pinned: "1" }, { quiet: true }),
        Escape: () => set({ key: null, box: null, feature: null, pinned: null }),
      },
    };
  },
};

/** What a box is to the one pointed at: itself, where it came from, where it goes to, or nothing. */
function relation({ at, key, feature }, there) {
  const same = there.key === key;
  if (there.stage === at && (there.key === null || same) && (there.feature === null || there.feature === feature)) return "self";
  if (at === "output") return there.stage === "v" ? (there.feature === feature ? "from" : null) : ["weights", "arrow"].includes(there.stage) ? "from" : null;
  if (at === "v") return there.stage === "output" ? (there.feature === feature ? "to" : null) : same && ["weights", "arrow", "name"].includes(there.stage) ? (there.stage === "arrow" ? "to" : "from") : null;
  if (at === "q") return there.stage === "k" ? (there.feature === feature ? "from" : null) : ["v", "name", "q"].includes(there.stage) ? null : "to";
  if (there.stage === "q") return at === "k" ? (there.feature === feature ? "from" : null) : "from";
  if (there.stage === "output") return "to";
  if (at === "weights" && there.stage === "exponentials") return "from"; // the total is of all of them
  if (!same) return null;
  if (there.stage === "k") return at === "k" ? null : "from";
  if (there.stage === "v" || there.stage === "name") return there.stage === "v" ? "to" : null;
  return ORDER.indexOf(there.stage) < ORDER.indexOf(at) ? "from" : "to";
}

/** A number in a narrow box: as it is where that is short, else two decimals; pointing and focus show all of it. */
function short(one) {
  return full(one).length <= 5 ? full(one) : two(one);
}
