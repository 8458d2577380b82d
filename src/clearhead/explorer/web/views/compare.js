// The same numbers under several mechanisms, side by side, and how far their outputs are from one of them.

import { choice, fill, h } from "../dom.js";
import { full, two } from "../format.js";
import { grid } from "../grid.js";
import { describe } from "../keys.js";

export const compare = {
  id: "compare",
  title: "Compare",
  byHead: true,
  lede: "One sentence, several mechanisms. Each card shows who reads whom, and how its output differs from the one chosen.",
  async show(root, { about, ask, set, say, state }) {
    describe([["← →", "hold the others against another one"]]);
    const cards = h("div", { class: "ways" });
    const controls = h("div", { class: "controls" });
    root.append(controls, cards);
    let asked = 0;
    let drawn = null;

    async function update(now) {
      const mine = ++asked;
      const found = await ask("/compare", { head: now.head || null, to: now.to === "full" ? null : now.to });
      if (mine !== asked) return;
      drawn = found;
      const names = found.pooled ? {} : { rows: about.query_tokens, columns: about.tokens };
      const most = found.ways.reduce((top, way) => Math.max(top, way.largest ?? 0), 0);
      fill(controls, choice("difference from", found.ways.map((way) => [way.name, way.name]), found.to, (to) => set({ to })),
        h("span", { class: "muted" }, `Shades of weights go from 0 to 1, of differences from 0 to ${two(most)}.`));
      say(`Outputs held against ${found.to}`);
      fill(cards, found.ways.map((way) => card(way, found, names, most)));
    }

    function card(way, found, names, most) {
      const title = h("h2", {}, way.name);
      const says = h("p", { class: "muted" }, `${way.says}.`);
      if (way.refused) return h("section", { class: "card" }, title, says, h("p", { class: "bad" }, way.refused));
      const yardstick = way.name === found.to;
      return h("section", { class: "card", "aria-current": String(yardstick) }, title, says,
        way.weights ? grid(way.weights, { label: `Weights of ${way.name}`, names, low: 0, high: 1, hidden: (i, j) => way.weights[i][j] === 0, width: 300 }) : h("p", { class: "muted" }, "It has no weights to show."),
        h("p", { class: "caption" }, yardstick ? "its output" : `its output − that of ${found.to}`),
        yardstick || !way.differences
          ? grid(way.output, { label: `Output of ${way.name}`, names: names.rows ? { rows: names.rows } : {}, width: 300, signed: true })
          : grid(way.differences, { label: `Differences of ${way.name} from ${found.to}`, names: names.rows ? { rows: names.rows } : {}, low: 0, high: most, width: 300, signed: true }),
        h("p", { class: "fact", title: way.largest === undefined ? null : full(way.largest) }, yardstick ? "what the others are held against" : way.largest === undefined ? "another size of output" : `differs by at most ${two(way.largest)}`),
        way.entropy === undefined ? null : h("p", { class: "muted", title: full(way.entropy) }, `mean entropy ${two(way.entropy)}`));
    }

    function step(by) {
      const names = drawn.ways.map((way) => way.name);
      set({ to: names[Math.min(names.length - 1, Math.max(0, names.indexOf(drawn.to) + by))] }, { quiet: true });
    }

    return {
      update,
      shown: () => update(state()),
      exports: () => ({
        picture: root,
        rows: [["mechanism", "query", "feature", "output", `minus ${drawn.to}`],
          ...drawn.ways.filter((way) => way.output).flatMap((way) => way.output.flatMap((row, i) => row.map((x, c) => [way.name, about.query_tokens[i], c + 1, full(x), way.differences ? full(way.differences[i][c]) : ""])))],
        python: [drawn.begin, ...drawn.ways.filter((way) => !way.refused).map((way) => `# ${way.name}: ${way.says}\n${way.python}`)].filter(Boolean).join("\n"),
      }),
      keys: { ArrowLeft: () => step(-1), ArrowRight: () => step(1) },
    };
  },
};
