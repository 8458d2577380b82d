// A tour of a minute for who is here for the first time; it can be left at any step, and is not offered again.

import { live } from "./ask.js";
import { fill, h } from "./dom.js";

const REMEMBERED = "clearhead.tour";
const STEPS = [
  { view: "heat", see: "main .split > .card", words: "Each row is one token, sharing its attention among the others." },
  { view: "heat", state: { query: 0, key: 0 }, see: ".panel", words: "Point at a cell: here stands how it came to be." },
  { view: "pipeline", small: true, see: ".flow", words: "From query to output. Change any number, and all of it follows." },
  { view: "walk", small: true, see: "main .card", words: "Every product, sum and division, one step at a time." },
  { view: "heads", see: ".atlas", words: "Every head of the model. Open one, or draw what you seek." },
  { view: "scaling", see: "main .card", words: "Why scores are divided by √d: move the slider." },
  { view: "masks", see: "main .card", words: "Hide tokens with a click, in the words that Python takes." },
  { view: "code", small: true, see: "main .card", words: "The same in a dozen lines; and a doctor for yours." },
  { view: "heat", see: "#tools", words: "Press / to find a token, ? for every key." },
];

let card = null;

/** Offer the tour once. Where nothing can be remembered, do not: it is always under Tour. */
export function invite(start) {
  if (remembered() !== null || card) return;
  card = h("aside", { class: "tour", "aria-label": "Invitation" },
    h("p", {}, "New here? See it all in a minute."),
    h("div", { class: "controls" },
      h("button", { type: "button", class: "strong", onclick: () => leave() ?? start() }, "Take the tour"),
      h("button", { type: "button", onclick: () => leave() }, "No, thanks")));
  card.addEventListener("keydown", (event) => event.key === "Escape" && leave());
  document.body.append(card);
}

/** Go through the views, one sentence each. */
export function tour(about, views, set) {
  leave();
  // a saved model has no more than its maps, and a long call no walk
  const small = Boolean(about.q && about.k && about.v) && about.tokens.length <= 24 && (live || !about.layers);
  const steps = STEPS.filter((one) => views.some((view) => view.id === one.view) && (small || !one.small));
  const words = h("p", { "aria-live": "polite" });
  const where = h("p", { class: "muted" });
  const back = h("button", { type: "button", onclick: () => show(at - 1) }, "Back");
  const next = h("button", { type: "button", class: "strong", onclick: () => show(at + 1) }, "Next");
  card = h("aside", { class: "tour", role: "dialog", "aria-label": "Tour" }, where, words,
    h("div", { class: "controls" }, back, next, h("button", { type: "button", onclick: () => leave() }, "Leave")));
  card.addEventListener("keydown", (event) => {
    const act = { ArrowRight: () => show(at + 1), ArrowLeft: () => show(at - 1), Escape: leave }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  document.body.append(card);
  let at = 0;
  show(0);

  async function show(to) {
    if (to >= steps.length) return leave();
    at = Math.max(0, to);
    const step = steps[at];
    set({ view: step.view, ...step.state });
    where.textContent = `${at + 1} of ${steps.length}`;
    words.textContent = step.words;
    back.disabled = at === 0;
    fill(next, at + 1 === steps.length ? "Done" : "Next");
    next.focus();
    await opened(step.view);
    if (card) lit(document.querySelector(step.see));
  }
}

/** End it, and do not offer it again. */
function leave() {
  try {
    localStorage.setItem(REMEMBERED, "done");
  } catch {
    // a page without storage, as in a notebook: nothing is offered there
  }
  lit(null);
  card?.remove();
  card = null;
}

function remembered() {
  try {
    return localStorage.getItem(REMEMBERED);
  } catch {
    return "nothing can be";
  }
}

/** Draw a ring around what is spoken of. */
function lit(element) {
  for (const one of document.querySelectorAll(".toured")) one.classList.remove("toured");
  if (!element) return;
  element.classList.add("toured");
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  element.scrollIntoView({ behavior: still ? "auto" : "smooth", block: "nearest" });
}

async function opened(view) {
  for (let i = 0; i < 100 && document.documentElement.dataset.ready !== view; i++) await new Promise((done) => setTimeout(done, 20));
}
