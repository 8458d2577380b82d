// The frame around every view: where one is, how to get elsewhere, what is said aloud.

import { ask, live } from "./ask.js";
import { choice, fill, h } from "./dom.js";
import { taking } from "./exports.js";
import { find } from "./finding.js";
import { help, listenToKeys } from "./keys.js";
import { call, listen, place, set, state, whenRefused } from "./state.js";
import { invite, tour } from "./tour.js";
import { code } from "./views/code.js";
import { compare } from "./views/compare.js";
import { geometry } from "./views/geometry.js";
import { heads } from "./views/heads.js";
import { heat } from "./views/heat.js";
import { long } from "./views/long.js";
import { masks } from "./views/masks.js";
import { pipeline } from "./views/pipeline.js";
import { scaling } from "./views/scaling.js";
import { walk } from "./views/walk.js";

/**
 * In the order of the digits that open them. A view: {id, title, lede, byHead, show(root, context)}, where show gives
 * {update, shown, keys, end, found, exports}, any of which may be missing: what to do when the address changes, when it
 * is on the page, when a key is pressed, when it goes, when a token is found; and what can be taken along (exports.js).
 * A view that is `byHead` is shown anew for another head, and has a choice of them.
 */
export const VIEWS = [pipeline, heat, walk, scaling, geometry, masks, heads, long, code, compare];

const offered = (about) => VIEWS.filter((view) => (about?.views ? about.views.includes(view.id) : view.of !== "model" || about?.layers));
const CHANGED = ["edits", "mask", "scale", "softcap", "given"];
let about = null;

const root = document.getElementById("view");
let shown = null; // {id, called, ends}
let turn = 0;

/** Say something to who cannot see it. */
export function say(words) {
  document.getElementById("live").textContent = words;
}

let listed = null; // what the navigation shows: it is made anew only when that changes

function navigation(now) {
  const same = JSON.stringify([offered(about).map((view) => view.id), now.view]);
  if (same === listed) return;
  listed = same;
  const nav = document.getElementById("nav");
  const links = offered(about).map((view, i) =>
    h(
      "a",
      { href: `#/${view.id}`, "aria-current": view.id === now.view ? "page" : null, onclick: (event) => go(event, view.id) },
      view.short ?? view.title,
      h("kbd", { "aria-hidden": "true" }, String((i + 1) % 10)),
    ),
  );
  fill(nav, ...links);
  const current = nav.querySelector("[aria-current]");
  if (current && nav.scrollWidth > nav.clientWidth) nav.scrollLeft = current.offsetLeft - nav.clientWidth / 2 + current.clientWidth / 2;
}

function go(event, view) {
  event?.preventDefault();
  set({ view });
}

function tools(about) {
  const one = (words, label, onclick) => h("button", { type: "button", "aria-label": label, title: label, onclick }, words);
  const changed = CHANGED.some((name) => name in call());
  const back = () => set({ ...Object.fromEntries(CHANGED.map((name) => [name, null])), pinned: null });
  fill(document.getElementById("tools"),
    changed ? h("button", { type: "button", class: "strong", onclick: back }, "given" in call() ? "Back to my call" : "Undo edits") : null,
    h("button", { type: "button", onclick: () => find(about, shown, set), title: "Find a token (/)" }, "Find"),
    h("button", { type: "button", onclick: () => tour(about, offered(about), set) }, "Tour"),
    one("◐", "Light or dark", turnTheme),
    one("?", "Keys", help));
}

function turnTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  say(document.documentElement.dataset.theme);
  refresh(true);
}

/** Choices of what every view of one head looks at. */
function which(view, now) {
  const numbered = (name, count, word) => Array.from({ length: count }, (_, i) => [i, `${word} ${i}`]);
  const heads = view.byHead && about.heads > 1;
  const layers = view.byHead && about.layers?.length > 1;
  return [
    layers && choice("layer", numbered("layer", about.layers.length, "layer"), place(now, "layer", about.layers.length), (layer) => set({ layer })),
    heads && choice("head", numbered("head", about.heads, "head"), place(now, "head", about.heads), (head) => set({ head })),
  ];
}

function failed(error) {
  say(error.message);
  return h("div", { class: "card error", role: "alert" }, h("p", {}, error.message));
}

/** What a view does, and where that cannot be done the reason, above what is seen already. */
async function guarded(act) {
  const begun = turn;
  root.querySelector("section > .passing")?.remove();
  try {
    await act();
  } catch (error) {
    if (begun !== turn) return; // another view is shown by now
    const said = failed(error);
    said.classList.add("passing");
    root.querySelector("section > .lede")?.after(said);
  }
}

/** A view that is drawn anew keeps the focus where it was, by the name of what has it. */
function refocused(label) {
  if (!label || (document.activeElement && document.activeElement !== document.body)) return;
  [...root.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === label)?.focus();
}

async function refresh(anew = false) {
  const now = state();
  const view = VIEWS.find((one) => one.id === now.view) ?? VIEWS[0];
  const called = JSON.stringify([call(now), view.byHead ? now.head : null]);
  navigation({ ...now, view: view.id });
  if (!anew && shown && shown.id === view.id && shown.called === called && shown.update) {
    const begun = turn;
    await guarded(() => shown.update(now));
    if (begun === turn) document.documentElement.dataset.ready = view.id;
    return;
  }
  const mine = ++turn;
  let body;
  let made = {};
  try {
    about = await ask("/about", call(now));
    if (mine !== turn) return;
    if (about.views && !about.views.includes(view.id)) return set({ view: about.views[0] }, { quiet: true }); // observations alone
    navigation({ ...now, view: view.id });
    document.title = `${view.title} · ${about.name} · clearhead`;
    document.getElementById("formula").textContent = about.formula;
    tools(about);
    const bar = h("div", { class: "bar" });
    body = h("section", {}, h("div", { class: "heading" }, h("h1", {}, view.title), bar), h("p", { class: "lede" }, view.lede));
    made = (await view.show(body, { about, ask: (path, params) => ask(path, { ...call(), ...params }), set, say, live, state })) ?? {};
    fill(bar, which(view, now), taking(view, made.exports ?? (() => ({})), about, say));
  } catch (error) {
    body = h("section", {}, h("h1", {}, view.title), failed(error));
    if (about === null) tools({ tokens: [], query_tokens: [] });
  }
  if (mine !== turn) return made.end?.();
  const focused = root.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  shown?.end?.();
  shown = { id: view.id, called, ...made };
  fill(root, body);
  await guarded(() => made.shown?.());
  if (mine !== turn) return;
  refocused(focused);
  document.documentElement.dataset.ready = view.id;
}

/** Keys that mean the same in every view; a view's own come first. */
function everywhere(key) {
  if (about === null) return null;
  const step = (name, count, by) => {
    if (!(count > 1)) return null;
    const to = Math.min(count - 1, Math.max(0, place(state(), name, count) + by));
    return () => {
      set({ [name]: to });
      say(`${name} ${to}`);
    };
  };
  return {
    "/": () => find(about, shown, set),
    t: () => tour(about, offered(about), set),
    "[": step("layer", about.layers?.length, -1),
    "]": step("layer", about.layers?.length, 1),
    ",": step("head", about.heads, -1),
    ".": step("head", about.heads, 1),
  }[key];
}

listen(() => refresh());
whenRefused((words) => guarded(() => Promise.reject(new Error(words))));
listenToKeys({ views: () => offered(about), go: (view) => set({ view }), current: () => shown, everywhere });
await refresh();
invite(() => tour(about, offered(about), set));
