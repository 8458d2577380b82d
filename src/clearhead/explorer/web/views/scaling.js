// Why scores are divided by √d: the same queries and keys with the division and without, as d grows.

import { fill, h, segment } from "../dom.js";
import { colours, sheet } from "../draw.js";
import { full, two } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

const STOPS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
const SIGMAS = [[0.5, "σ ½"], [1, "σ 1"], [2, "σ 2"]];

export const scaling = {
  id: "scaling",
  title: "Scaling",
  lede: "Queries and keys of d random numbers. Move the slider: without 1/√d one key takes all, and nothing is left to learn from.",
  async show(root, { ask, set, say, state }) {
    describe([["← →", "half of d, twice d"]]);
    const slider = h("input", { type: "range", class: "scrubber", min: 0, max: STOPS.length - 1, "aria-label": "d, the number of features", oninput: (event) => set({ stop: event.target.value }, { quiet: true }) });
    const says = h("p", { class: "pair" });
    const sigmas = h("div", { class: "controls" });
    const both = h("div", { class: "matrices" });
    root.append(h("div", { class: "card" }, sigmas, says, slider), both);
    let asked = 0;

    async function update(now) {
      const mine = ++asked;
      const stop = place(now, "stop", STOPS.length, 6);
      const sigma = SIGMAS.some(([one]) => String(one) === now.sigma) ? Number(now.sigma) : 1;
      slider.value = stop;
      slider.setAttribute("aria-valuetext", `d = ${STOPS[stop]}`);
      fill(sigmas, segment("Spread of the numbers", SIGMAS, sigma, (one) => set({ sigma: one })));
      says.textContent = `d = ${STOPS[stop]}`;
      const found = await ask("/scaling", { d: STOPS[stop], sigma });
      if (mine !== asked) return;
      say(`d ${found.d}: entropy ${two(found.unscaled.entropy)} without, ${two(found.scaled.entropy)} with the scale`);
      fill(both, one("Without the scale", found, "unscaled"), one("Divided by √d", found, "scaled"));
    }

    function one(title, found, name) {
      const { deviation, predicted, entropy, largest, gradient } = found[name];
      const facts = [
        ["spread of scores", deviation, `theory: ${two(predicted)}`],
        ["entropy", entropy, `at most ${two(found.uniform)}`],
        ["largest weight", largest, ""],
        ["gradient", gradient, "how much weights move when scores do"],
      ];
      const lines = facts.map(([what, number, words]) =>
        h("tr", {}, h("th", { scope: "row" }, what), h("td", { title: full(number) }, two(number)), h("td", { class: "muted" }, words)));
      return h("section", { class: "card" }, h("h2", {}, title), h("p", { class: "muted" }, "scores"), histogram(found.drawn[name]),
        h("p", { class: "muted" }, "weights of one query over 16 keys"), bars(found.drawn[name].weights), h("table", {}, h("tbody", {}, lines)));
    }

    function histogram({ counts, limit }) {
      const { canvas, pen } = sheet(380, 110, { role: "img", "aria-label": `Scores between ${two(-limit)} and ${two(limit)}` });
      const colour = colours();
      const most = Math.max(...counts);
      pen.fillStyle = colour("accent");
      counts.forEach((count, i) => pen.fillRect((i * 380) / counts.length, 92 - (90 * count) / most, 380 / counts.length - 1, (90 * count) / most));
      pen.fillStyle = colour("soft");
      pen.font = "12px sans-serif";
      pen.fillText(two(-limit), 0, 107);
      pen.textAlign = "center";
      pen.fillText("0", 190, 107);
      pen.textAlign = "right";
      pen.fillText(two(limit), 380, 107);
      return canvas;
    }

    function bars(weights) {
      const { canvas, pen } = sheet(380, 90, { role: "img", "aria-label": `Weights: ${weights.map(two).join(", ")}` });
      const colour = colours();
      weights.forEach((weight, i) => {
        pen.fillStyle = colour("line");
        pen.fillRect((i * 380) / weights.length, 0, 380 / weights.length - 3, 88);
        pen.fillStyle = colour("accent");
        pen.fillRect((i * 380) / weights.length, 88 - 88 * weight, 380 / weights.length - 3, 88 * weight);
      });
      return canvas;
    }

    const step = (by) => set({ stop: Math.min(STOPS.length - 1, Math.max(0, place(state(), "stop", STOPS.length, 6) + by)) }, { quiet: true });
    return { update, shown: () => update(state()), keys: { ArrowLeft: () => step(-1), ArrowRight: () => step(1) } };
  },
};
