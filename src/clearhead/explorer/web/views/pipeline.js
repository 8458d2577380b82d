// From one query to its output, stage after stage; every number of q, k and v can be changed in place.

import { fill, h } from "../dom.js";
import { full, two, value } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

export const pipeline = {
  id: "pipeline",
  title: "Pipeline",
  lede: "One query on its way to an output. Choose a token, point at a box, change any number below.",
  async show(root, { about, ask, set, say, state, live }) {
    describe([["↑ ↓", "the key before, the next"], ["← →", "the query before, the next"]]);
    const rows = about.query_tokens.length;
    const columns = about.tokens.length;
    const chips = h("div", { class: "tokens", role: "group", "aria-label": "Query" });
    const stages = h("div", { class: "stages" });
    const panel = h("aside", { class: "card panel", "aria-label": "The pair pointed at" });
    const head = () => place(state(), "head", about.heads);
    root.append(chips, h("div", { class: "split" }, h("div", { class: "card" }, stages), panel), inputs());
    let asked = 0;

    async function update(now) {
      const mine = ++asked;
      const query = place(now, "query", rows);
      const key = place(now, "key", columns, -1);
      const row = await ask("/row", { query, head: head() || null });
      if (mine !== asked) return;
      fill(chips, 
        ...about.query_tokens.slice(0, 200).map((name, i) =>
          h("button", { type: "button", "aria-pressed": String(i === query), onclick: () => set({ query: i }) }, name),
        ),
      );
      fill(stages, ...columnsOf(row, key));
      if (key < 0) {
        const words = `Output of ${about.query_tokens[query]}`;
        fill(panel, h("h2", {}, words), vector(row.output), h("p", { class: "muted" }, "Point at a box to see its arithmetic."));
        return;
      }
      const cell = await ask("/cell", { query, key, head: head() || null });
      if (mine !== asked) return;
      const pair = `${about.query_tokens[query]} → ${about.tokens[key]}`;
      say(`${pair}: weight ${two(cell.weight)}`);
      fill(panel, 
        h("p", { class: "pair" }, pair),
        h("p", { class: "big", title: full(cell.weight) }, two(cell.weight)),
        h("p", { class: "muted" }, "of this query's attention"),
        h("ol", { class: "work" }, cell.lines.map((line) => h("li", {}, line))),
      );
    }

    function columnsOf(row, key) {
      const allowed = (j) => !row.allowed || row.allowed[j];
      const list = (numbers, { masked = false, bars = false } = {}) =>
        h("ol", {}, about.tokens.slice(0, 64).map((name, j) => {
          const gone = masked && !allowed(j);
          const width = bars && !gone ? `${100 * Math.max(0, value(numbers[j]))}%` : null;
          const fill = width && h("span", { class: "fill" });
          if (fill) fill.style.width = width;
          return h("li", {}, h("button", {
            type: "button", class: gone ? "box hidden" : "box", "aria-current": String(j === key), title: full(numbers[j]),
            onpointerenter: () => set({ key: j }, { quiet: true }), onfocus: () => set({ key: j }, { quiet: true }),
          }, h("span", { class: "name" }, name), h("span", {}, gone ? "hidden" : two(numbers[j])), fill));
        }));
      const stage = (title, formula, body) => h("section", { class: "stage" }, h("h2", {}, title), h("p", {}, formula), body);
      const found = [
        stage("Raw scores", "q · k", list(row.dots)),
        stage("Scaled", `× ${two(row.scale)}`, list(row.scaled)),
      ];
      if (row.allowed) found.push(stage("Masked", about.mask ?? "mask", list(row.scores, { masked: true })));
      found.push(
        stage("Exponentials", `e^(s − ${two(row.shift)})`, list(row.exponentials, { masked: true })),
        stage("Weights", `/ ${two(row.total)}`, list(row.weights, { masked: true, bars: true })),
        stage("Output", "Σ weight · v", vector(row.output)),
      );
      return found;
    }

    function vector(numbers) {
      return h("ol", { class: "work" }, numbers.slice(0, 64).map((one, c) => h("li", { title: full(one) }, `${c + 1}: ${two(one)}`)));
    }

    function inputs() {
      if (!about.q || !about.k || !about.v || about.tokens.length > 24) return null;
      const blocks = ["q", "k", "v"].map((name) => {
        const names = name === "q" ? about.query_tokens : about.tokens;
        const first = about[name][Math.min(head(), about[name].length - 1)];
        if (first[0].length > 12) return null;
        const lines = first.map((numbers, i) =>
          h("tr", {}, h("th", { scope: "row" }, names[i]), numbers.map((one, c) =>
            h("td", {}, h("input", {
              type: "number", step: "any", value: full(one), disabled: !live,
              "aria-label": `${name}, ${names[i]}, feature ${c + 1}`,
              onchange: (event) => edit(name, i, c, event.target.value),
            })))),
        );
        return h("section", {}, h("h2", {}, { q: "Queries Q", k: "Keys K", v: "Values V" }[name]), h("table", { class: "grid" }, h("tbody", {}, lines)));
      });
      const note = live ? null : h("p", { class: "muted" }, "Numbers can be changed on the live page: clearhead explore.");
      return h("div", {}, h("div", { class: "matrices" }, blocks), note);
    }

    function edit(name, i, c, text) {
      if (text === "" || !Number.isFinite(Number(text))) return say("That is no number.");
      const where = `${name}.${Math.min(head(), about[name].length - 1)}.${i}.${c}.`;
      const others = (state().edits ?? "").split(";").filter((one) => one && !one.startsWith(where));
      set({ edits: [...others, where + text].join(";") });
    }

    function step(dq, dk) {
      const now = state();
      set({
        query: Math.min(rows - 1, Math.max(0, place(now, "query", rows) + dq)),
        key: Math.min(columns - 1, Math.max(0, place(now, "key", columns, dk ? -1 : 0) + dk)),
      }, { quiet: true });
    }

    return {
      update,
      shown: () => update(state()),
      keys: {
        ArrowLeft: () => step(-1, 0), ArrowRight: () => step(1, 0), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1),
        Escape: () => set({ key: null }),
        ",": () => set({ head: Math.max(0, head() - 1) }),
        ".": () => set({ head: Math.min(about.heads - 1, head() + 1) }),
      },
    };
  },
};
