// Why scores are divided by √d: the same queries and keys with the division and without, as d and σ grow.

import { ask } from "../ask.js"; // as it is: nothing here is of the call that is explored
import { choice, fill, h, s, segment } from "../dom.js";
import { full, two, value } from "../format.js";
import { describe } from "../keys.js";

const STOPS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
const BETWEEN = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024];
const SIGMAS = [0.25, 0.5, 1, 2, 4];
const FINER = [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4];
const BOTH = [["both", "both"], ["unscaled", "without 1/√d"], ["scaled", "with 1/√d"]];
const LINES = [["gradient", "gradient"], ["entropy", "entropy"], ["largest", "largest weight"], ["norm", "gradient norm"], ["saturated", "saturated queries"], ["deviation", "spread of scores"]];
const TITLES = { unscaled: "Without the scale", scaled: "Divided by √d" };

export const scaling = {
  id: "scaling",
  title: "Scaling",
  lede: "Queries and keys of d random numbers. Without 1/√d one key takes all as d grows, and nothing is left to learn from.",
  async show(root, { set, say, state, live }) {
    describe([["← →", "less d, more d"], ["↓ ↑", "less σ, more σ"]]);
    const [stops, sigmas] = live ? [BETWEEN, FINER] : [STOPS, SIGMAS];
    const range = (name, all, label) => h("input", { type: "range", class: "scrubber", min: 0, max: all.length - 1, step: 1, "aria-label": label, oninput: (event) => set({ [name]: all[event.target.value] }, { quiet: true }) });
    const slider = range("d", stops, "d, the number of features");
    const spread = range("sigma", sigmas, "σ, the spread of each number");
    const exactly = h("input", { type: "number", min: 1, max: 1024, step: 1, "aria-label": "d, exactly", disabled: !live, onchange: (event) => set({ d: event.target.value }) });
    const says = h("output", { class: "value" });
    const controls = h("div", { class: "controls" });
    const both = h("div", { class: "halves" });
    const curve = h("div", { class: "card" });
    root.append(
      h("div", { class: "card" }, h("div", { class: "sliders" }, h("label", {}, "d", slider, exactly), h("label", {}, "σ", spread, says)), controls),
      both, curve);
    let asked = 0;
    let drawn = null;

    const near = (all, x) => all.reduce((best, one, i) => (Math.abs(one - x) < Math.abs(all[best] - x) ? i : best), 0);
    const chosen = (now) => {
      const d = Number(now.d ?? 64);
      const sigma = Number(now.sigma ?? 1);
      return { d: live ? (now.d ?? 64) : stops[near(stops, d)], sigma: live ? (now.sigma ?? 1) : sigmas[near(sigmas, sigma)] };
    };

    async function update(now) {
      const mine = ++asked;
      const { d, sigma } = chosen(now);
      slider.value = near(stops, Number(d));
      slider.setAttribute("aria-valuetext", `d = ${d}`);
      spread.value = near(sigmas, Number(sigma));
      spread.setAttribute("aria-valuetext", `σ = ${sigma}`);
      exactly.value = d;
      says.textContent = String(sigma);
      const view = BOTH.some(([one]) => one === now.show) ? now.show : "both";
      const axis = now.axis === "own" ? "own" : "shared";
      const line = LINES.some(([one]) => one === now.curve) ? now.curve : "gradient";
      fill(controls, segment("What is shown", BOTH, view, (one) => set({ show: one })),
        segment("Axes of scores", [["shared", "same axis"], ["own", "own axes"]], axis, (one) => set({ axis: one })));
      const [found, along] = await Promise.all([ask("/scaling", { d, sigma }), ask("/curve", { sigma })]);
      if (mine !== asked) return;
      drawn = { found, along, line };
      say(`d ${found.d}: entropy ${two(found.unscaled.entropy)} without, ${two(found.scaled.entropy)} with the scale`);
      fill(both, ["unscaled", "scaled"].filter((one) => view === "both" || view === one).map((name) => one(found, name, axis)));
      fill(curve, h("div", { class: "heading" }, h("h2", {}, "As d grows"), choice("", LINES, line, (one) => set({ curve: one }))), lines(along, line, found.d), h("p", { class: "muted" }, along.verdict));
      curve.querySelector("select").setAttribute("aria-label", "What is drawn as d grows");
    }

    function one(found, name, axis) {
      const { deviation, predicted, entropy, largest, gradient, norm, saturated } = found[name];
      const facts = [
        ["spread of scores", deviation, `theory ${two(predicted)}`],
        ["entropy", entropy, `at most ${two(found.uniform)}`],
        ["largest weight", largest, "on average"],
        ["gradient", gradient, "Σ ∂w/∂s: how far weights answer"],
        ["gradient norm", norm, "of the softmax's Jacobian"],
        ["saturated", saturated, "share of queries above 0.99"],
      ];
      const rows = facts.map(([what, number, words]) =>
        h("tr", {}, h("th", { scope: "row" }, what), h("td", { title: full(number) }, two(number)), h("td", { class: "muted" }, words)));
      return h("section", { class: "card" }, h("h2", {}, TITLES[name]), h("p", { class: "caption" }, "scores of 64 queries and keys"), histogram(found.drawn[name][axis], name),
        h("p", { class: "caption" }, "weights of one query over 16 keys"), bars(found.drawn[name].weights), h("table", { class: "facts" }, h("tbody", {}, rows)));
    }

    function histogram({ counts, limit }, name) {
      const most = counts.reduce((a, b) => Math.max(a, b), 1);
      const wide = 480 / counts.length;
      return s("svg", { class: "chart", viewBox: "0 0 480 128", role: "img", "aria-label": `${TITLES[name]}: scores between ${two(-limit)} and ${two(limit)}` },
        counts.map((count, i) => s("rect", { class: "bar", x: i * wide, y: 104 - (100 * count) / most, width: wide - 1.5, height: (100 * count) / most }, s("title", {}, `${count}`))),
        s("line", { class: "axis", x1: 0, x2: 480, y1: 104.5, y2: 104.5 }),
        s("text", { x: 0, y: 122 }, two(-limit)), s("text", { x: 240, y: 122, "text-anchor": "middle" }, "0"), s("text", { x: 480, y: 122, "text-anchor": "end" }, two(limit)));
    }

    function bars(weights) {
      const wide = 480 / weights.length;
      return s("svg", { class: "chart", viewBox: "0 0 480 84", role: "img", "aria-label": `Weights: ${weights.map(two).join(", ")}` },
        weights.map((weight, i) => [
          s("rect", { class: "track", x: i * wide, y: 0, width: wide - 4, height: 80, rx: 2 }),
          s("rect", { class: "bar", x: i * wide, y: 80 - 80 * value(weight), width: wide - 4, height: 80 * value(weight), rx: 2 }, s("title", {}, full(weight))),
        ]));
    }

    function lines({ rows }, line, d) {
      const most = rows.reduce((top, row) => Math.max(top, value(row.unscaled[line]), value(row.scaled[line])), 1e-9);
      const wide = Math.max(320, Math.min(900, (document.getElementById("view").clientWidth || 900) - 80)); // letters stay as large as they are
      const right = wide - 96;
      const x = (i) => 40 + ((right - 40) * i) / (rows.length - 1);
      const y = (number) => 150 - (130 * value(number)) / most;
      const at = rows.findIndex((row) => row.d_k >= d);
      const path = (name) => rows.map((row, i) => `${i ? "L" : "M"}${x(i)} ${y(row[name][line])}`).join("");
      return s("svg", { class: "chart", viewBox: `0 0 ${wide} 180`, role: "img", "aria-label": `${line} from d = 1 to 1,024, with the scale and without` },
        s("line", { class: "axis", x1: 40, x2: right, y1: 150.5, y2: 150.5 }),
        s("line", { class: "mark", x1: x(at), x2: x(at), y1: 10, y2: 150 }),
        ["unscaled", "scaled"].map((name) => [
          s("path", { class: `line ${name}`, d: path(name) }),
          rows.map((row, i) => s("circle", { class: `dot ${name}`, cx: x(i), cy: y(row[name][line]), r: 4 }, s("title", {}, `d = ${row.d_k}: ${full(row[name][line])}`))),
          s("text", { class: `label ${name}`, x: right + 10, y: y(rows.at(-1)[name][line]) + 4 }, name === "scaled" ? "with 1/√d" : "without"),
        ]),
        rows.map((row, i) => (wide < 600 && i % 2 ? null : s("text", { x: x(i), y: 170, "text-anchor": "middle" }, String(row.d_k)))),
        s("text", { x: 34, y: 24, "text-anchor": "end" }, two(most)), s("text", { x: 34, y: 154, "text-anchor": "end" }, "0"));
    }

    function step(name, all, by) {
      const now = chosen(state());
      set({ [name]: all[Math.min(all.length - 1, Math.max(0, near(all, Number(now[name])) + by))] }, { quiet: true });
    }

    return {
      update,
      shown: () => update(state()),
      exports: () => ({
        name: `scaling-d-${drawn.found.d}`,
        picture: root,
        rows: [["d", "scale", ...LINES.map(([, words]) => words)], ...drawn.along.rows.flatMap((row) => ["unscaled", "scaled"].map((name) => [row.d_k, name, ...LINES.map(([id]) => full(row[name][id]))]))],
        python: `print(ch.scaling(${drawn.found.d}, keys=64, queries=64, sigma=${drawn.found.sigma}))`,
      }),
      keys: { ArrowLeft: () => step("d", stops, -1), ArrowRight: () => step("d", stops, 1), ArrowDown: () => step("sigma", sigmas, -1), ArrowUp: () => step("sigma", sigmas, 1) },
    };
  },
};
