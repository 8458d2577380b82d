// The same numbers under several mechanisms, side by side, and how far their outputs are from full attention's.

import { h } from "../dom.js";
import { picture } from "../draw.js";
import { full, two } from "../format.js";
import { describe } from "../keys.js";

export const compare = {
  id: "compare",
  title: "Compare",
  lede: "One sentence, several mechanisms. Below each: how far its output is from full attention's, at most.",
  async show(root, { about, ask }) {
    describe([]);
    const ways = await ask("/compare", {});
    const cards = () => ways.map((way) => {
      const hidden = (i, j) => way.weights[i][j] === 0;
      return h("section", { class: "card" }, h("h2", {}, way.name), h("p", { class: "muted" }, way.says),
        picture(way.weights, { side: 240, low: 0, high: 1, hidden, label: `Weights of ${way.name}` }).canvas,
        h("p", { title: full(way.difference) }, way.name === "full" ? "the yardstick" : `output differs by at most ${two(way.difference)}`));
    });
    const box = h("div", { class: "matrices" });
    root.append(h("p", { class: "muted" }, `Rows are queries, columns keys: ${about.tokens.slice(0, 12).join(" ")}`), box);
    return { shown: () => box.replaceChildren(...cards()) };
  },
};
