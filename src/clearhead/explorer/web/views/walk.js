// Every multiplication, addition, exponential and division, one at a time; or guess the next number first.

import { fill, h } from "../dom.js";
import { full, two, value } from "../format.js";
import { describe } from "../keys.js";
import { place } from "../state.js";

const PACE = 900; // milliseconds of a step while it plays

export const walk = {
  id: "walk",
  title: "Walk",
  lede: "Every single operation, in order. Next, Back, or let it play; or guess each number before it is shown.",
  async show(root, { about, ask, set, say, state }) {
    describe([["→ n", "the next step"], ["← b", "the step before"], ["space", "play and pause"], ["p", "guess first"]]);
    const head = place(state(), "head", about.heads);
    const steps = await ask("/walk", { head: head || null });
    const sentence = h("p", { class: "sentence" });
    const where = h("p", { class: "muted" });
    const list = h("ol", { class: "history", "aria-label": "Steps" });
    const scrubber = h("input", { type: "range", class: "scrubber", min: 0, max: steps.length - 1, "aria-label": "Step", oninput: (event) => set({ at: event.target.value }, { quiet: true }) });
    const guess = h("form", { class: "controls", hidden: true, onsubmit: guessed });
    const number = h("input", { type: "number", step: "any", "aria-label": "The next number" });
    guess.append(h("label", {}, "The next number?", number), h("button", {}, "Check"));
    const verdict = h("p", { role: "status" });
    const play = h("button", { type: "button", onclick: () => toggle() }, "Play");
    const predict = h("button", { type: "button", "aria-pressed": "false", onclick: () => set({ guess: state().guess ? null : "1" }) }, "Guess first");
    const jump = h("label", {}, "query", h("select", { onchange: (event) => set({ at: steps.findIndex((one) => one.query === Number(event.target.value)) }) },
      about.query_tokens.map((name, i) => h("option", { value: i }, name))));
    root.append(h("div", { class: "card" },
      h("div", { class: "controls" },
        h("button", { type: "button", onclick: () => move(-1) }, "Back"), play, h("button", { type: "button", onclick: () => move(1) }, "Next"), jump, predict),
      scrubber, where, sentence, guess, verdict, list));
    let timer = null;

    function at() {
      return place(state(), "at", steps.length);
    }

    function move(by) {
      set({ at: Math.min(steps.length - 1, Math.max(0, at() + by)) }, { quiet: true });
    }

    function toggle(on = timer === null) {
      clearInterval(timer);
      timer = on ? setInterval(() => (at() + 1 < steps.length ? move(1) : toggle(false)), PACE) : null;
      play.textContent = on ? "Pause" : "Play";
    }

    function guessed(event) {
      event.preventDefault();
      const step = steps[at()];
      const right = two(step.value) === two(Number(number.value)) || full(step.value) === number.value;
      verdict.className = right ? "good" : "bad";
      verdict.textContent = right ? `Yes: ${step.sentence}` : `Not ${number.value}: ${step.sentence}`;
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
      predict.setAttribute("aria-pressed", String(Boolean(now.guess)));
      guess.hidden = !guessing;
      jump.querySelector("select").value = step.query;
      where.textContent = `Step ${i + 1} of ${steps.length} · query ${about.query_tokens[step.query]} · ${step.kind}`;
      const cut = step.sentence.lastIndexOf("=");
      sentence.textContent = guessing && cut > 0 ? `${step.sentence.slice(0, cut)}= ?` : step.sentence;
      sentence.title = full(step.value);
      const first = Math.max(0, i - 8);
      fill(list, ...steps.slice(first, guessing ? i : i + 1).map((one, n) =>
        h("li", { "aria-current": first + n === i ? "step" : null }, one.sentence)));
      list.scrollTop = list.scrollHeight;
      say(sentence.textContent);
    }

    return {
      update,
      shown: () => update(state()),
      end: () => toggle(false),
      keys: {
        ArrowRight: () => move(1), n: () => move(1), ArrowLeft: () => move(-1), b: () => move(-1), " ": () => toggle(),
        p: () => set({ guess: state().guess ? null : "1" }), Home: () => set({ at: 0 }), End: () => set({ at: steps.length - 1 }),
        Escape: () => toggle(false),
      },
    };
  },
};
