// Every multiplication, addition, exponential and division, one at a time; or predict the next number first.

import { choice, fill, h } from "../dom.js";
import { full, two, value } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

const PACES = [[1600, "slow"], [900, "steady"], [350, "fast"]]; // milliseconds of a step while it plays
const PHASES = { score: "products", scale: "scale", softcap: "softcap", bias: "bias", mask: "mask", largest: "largest", exponential: "exponentials", total: "total", weight: "weights", dropout: "dropout", output: "output" };

export const walk = {
  id: "walk",
  title: "Walk",
  byHead: true,
  lede: "Every single operation, in order, for every query. Step through them, let them play, or predict each number first.",
  async show(root, { about, ask, set, say, state }) {
    describe([["→ n", "the next step"], ["← b", "the step before"], ["space", "play and pause"], ["p", "predict first"], ["Home End", "the first step, the last"]]);
    const head = place(state(), "head", about.heads);
    const steps = await ask("/walk", { head: head || null });
    const begins = about.query_tokens.map((_, i) => steps.findIndex((one) => one.query === i));
    const sentence = h("p", { class: "sentence" });
    const detail = h("p", { class: "muted" });
    const where = h("p", { class: "muted where" });
    const phases = h("div", { class: "phases", role: "group", "aria-label": "Parts of this query" });
    const board = h("div", { class: "card scroll-x board" });
    const list = h("ol", { class: "history", "aria-label": "Steps so far" });
    const scrubber = h("input", { type: "range", class: "scrubber", min: 0, max: steps.length - 1, "aria-label": "Step", oninput: (event) => set({ at: event.target.value }, { quiet: true }) });
    const number = h("input", { type: "number", step: "any", "aria-label": "The next number" });
    const guess = h("form", { class: "controls", hidden: true, onsubmit: guessed }, h("label", {}, "The next number?", number), h("button", { class: "strong" }, "Check"), h("button", { type: "button", onclick: () => move(1) }, "Show me"));
    const verdict = h("p", { role: "status" });
    const play = h("button", { type: "button", onclick: () => toggle() }, "Play");
    const predict = h("button", { type: "button", "aria-pressed": "false", onclick: () => set({ guess: state().guess ? null : "1" }) }, "Predict first");
    const pace = choice("speed", PACES, PACES[1][0], () => timer !== null && toggle(true));
    const jump = choice("query", about.query_tokens.map((name, i) => [i, name]), 0, (i) => set({ at: begins[i] }));
    root.append(
      h("div", { class: "card" },
        h("div", { class: "controls" },
          h("button", { type: "button", onclick: () => move(-1) }, "Back"), play, h("button", { type: "button", class: "strong", onclick: () => move(1) }, "Next"), jump, pace, predict),
        scrubber, where, phases, sentence, detail, guess, verdict),
      h("div", { class: "walk" }, board, h("div", { class: "card" }, h("h2", {}, "So far"), list)));
    let timer = null;

    const at = () => place(state(), "at", steps.length);

    function move(by) {
      set({ at: Math.min(steps.length - 1, Math.max(0, at() + by)) }, { quiet: true });
    }

    function toggle(on = timer === null) {
      clearInterval(timer);
      const wait = Number(pace.querySelector("select").value);
      timer = on ? setInterval(() => (at() + 1 < steps.length ? move(1) : toggle(false)), wait) : null;
      play.textContent = on ? "Pause" : "Play";
      if (on) set({ guess: null });
    }

    function guessed(event) {
      event.preventDefault();
      const step = steps[at()];
      const right = number.value !== "" && (two(step.value) === two(Number(number.value)) || full(step.value) === number.value);
      verdict.className = right ? "good" : "bad";
      verdict.textContent = right ? `Yes: ${step.sentence}` : number.value === "" ? "Type a number first." : `Not ${number.value}: ${step.sentence}`;
      say(verdict.textContent);
      if (right) {
        number.value = "";
        move(1);
      }
    }

    function update(now) {
      const i = at();
      const step = steps[i];
      const guessing = Boolean(now.guess) && Number.isFinite(value(step.value));
      scrubber.value = i;
      scrubber.setAttribute("aria-valuetext", `Step ${i + 1} of ${steps.length}`);
      predict.setAttribute("aria-pressed", String(Boolean(now.guess)));
      guess.hidden = !guessing;
      if (!now.guess) verdict.textContent = "";
      jump.querySelector("select").value = step.query;
      where.textContent = `Step ${i + 1} of ${steps.length} · query ${about.query_tokens[step.query]} · ${step.kind}`;
      const first = begins[step.query];
      const mine = steps.slice(first).findIndex((one) => one.query !== step.query);
      const all = steps.slice(first, mine < 0 ? steps.length : first + mine);
      fill(phases, Object.entries(PHASES).filter(([id]) => all.some((one) => one.phase === id)).map(([id, words]) =>
        h("button", { type: "button", class: "quiet", "aria-current": id === step.phase ? "step" : null, onclick: () => set({ at: first + all.findIndex((one) => one.phase === id) }) }, words)));
      const cut = step.sentence.lastIndexOf("=");
      sentence.textContent = guessing && cut > 0 ? `${step.sentence.slice(0, cut)}= ?` : step.sentence;
      sentence.title = guessing ? "" : full(step.value);
      detail.textContent = guessing ? "" : (step.detail ?? "");
      const from = Math.max(0, i - 40);
      fill(list, steps.slice(from, guessing ? i : i + 1).map((one, n) => h("li", { "aria-current": from + n === i ? "step" : null }, one.sentence)));
      list.scrollTop = list.scrollHeight;
      fill(board, table(step, steps.slice(first, guessing ? i : i + 1)));
      say(sentence.textContent);
    }

    /** Where on the whole one is: q over its keys, what has been found for each, the output over its values. */
    function table(step, done) {
      const ours = (name) => about[name]?.[Math.floor((head * about[name].length) / about.heads)];
      const [q, k, v] = ["q", "k", "v"].map(ours);
      if (!q || !k || !v) return null;
      const found = {};
      for (const one of done) (found[one.phase] ??= {})[one.phase === "output" ? one.feature : (one.key ?? "")] = one.value;
      const seen = (phase, j) => found[phase]?.[j];
      const score = (j) => seen("mask", j) ?? seen("bias", j) ?? seen("softcap", j) ?? seen("scale", j);
      const lit = (phases, j) => (phases.includes(step.phase) && (j === undefined || step.key === j) ? "lit" : null);
      const cell = (x, mark) => h("td", { class: mark, title: x === undefined ? null : full(x) }, x === undefined ? "·" : two(x));
      const products = (j, c) => lit(["score"], j) && step.feature === c && "lit";
      const averaged = (j, c) => lit(["output"], j) && step.feature === c && "lit";
      const of = about.query_tokens[step.query];
      return h("table", {},
        h("thead", {},
          h("tr", {}, h("td", {}), h("th", { colspan: k[0].length, scope: "colgroup" }, "q over keys K"), ["q · k", "score", "e^", "weight"].map((one) => h("th", { scope: "col" }, one)), h("th", { colspan: v[0].length, scope: "colgroup" }, "output over values V")),
          h("tr", { class: "first" }, h("th", { scope: "row" }, of), q[step.query].map((x, c) => cell(x, step.phase === "score" && step.feature === c && "lit")),
            h("td", {}), cell(seen("largest", ""), lit(["largest"])), cell(Object.values(found.total ?? {}).at(-1), lit(["total"])), h("td", {}),
            v[0].map((_, c) => cell(seen("output", c), step.phase === "output" && step.feature === c && "lit")))),
        h("tbody", {}, k.map((vector, j) => h("tr", {},
          h("th", { scope: "row" }, about.tokens[j]),
          vector.map((x, c) => cell(x, products(j, c))),
          cell(seen("score", j), lit(["score", "scale"], j)), cell(score(j), lit(["scale", "mask", "bias", "softcap", "exponential"], j)),
          cell(seen("exponential", j), lit(["exponential", "total", "weight"], j)), cell(seen("dropout", j) ?? seen("weight", j), lit(["weight", "dropout", "output"], j)),
          v[j].map((x, c) => cell(x, averaged(j, c)))))));
    }

    return {
      update,
      shown: () => update(state()),
      end: () => toggle(false),
      found: (kind, i) => {
        const now = steps[at()].query;
        set({ at: kind === "query" ? begins[i] : Math.max(0, steps.findIndex((one) => one.query === now && one.key === i)) });
      },
      exports: () => ({
        rows: [["step", "query", "kind", "sentence", "value"], ...steps.map((one, i) => [i + 1, about.query_tokens[one.query], one.kind, one.sentence, full(one.value)])],
        picture: root,
        python: `for i in range(${about.query_tokens.length}):\n    for step in ch.trace(q, k, v, query=i${about.heads > 1 ? `, head=${head}` : ""}${about.options}).walk():\n        print(step)`,
      }),
      keys: {
        ArrowRight: () => move(1), n: () => move(1), ArrowLeft: () => move(-1), b: () => move(-1), " ": () => toggle(),
        p: () => set({ guess: state().guess ? null : "1" }), Home: () => set({ at: 0 }), End: () => set({ at: steps.length - 1 }),
        Escape: () => toggle(false),
      },
    };
  },
};
