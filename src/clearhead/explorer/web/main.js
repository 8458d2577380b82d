// The frame around every view: where one is, how to get elsewhere, what is said aloud.

import { ask, live } from "./ask.js";
import { fill, h } from "./dom.js";
import { handedOver, taking } from "./exports.js";
import { help, listenToKeys } from "./keys.js";
import { call, listen, set, state } from "./state.js";
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

/** In the order of the digits that open them. A view: {id, title, lede, show(root, context) → {keys, end}}. */
export const VIEWS = [pipeline, heat, walk, scaling, geometry, masks, heads, long, code, compare];

const offered = (about) => VIEWS.filter((view) => view.of !== "model" || about?.layers);
let about = null;

const root = document.getElementById("view");
let shown = null; // {id, called, ends}
let turn = 0;

/** Say something to who cannot see it. */
export function say(words) {
  document.getElementById("live").textContent = words;
}

function navigation(now) {
  const links = offered(about).map((view, i) =>
    h(
      "a",
      { href: `#/${view.id}`, "aria-current": view.id === now.view ? "page" : null, onclick: (event) => go(event, view.id) },
      view.title,
      h("kbd", {}, String(i + 1)),
    ),
  );
  fill(document.getElementById("nav"), ...links);
}

function go(event, view) {
  event?.preventDefault();
  set({ view });
}

function tools(about) {
  const theme = h("button", { type: "button", onclick: turnTheme, "aria-label": "Light or dark" }, "◐");
  const keys = h("button", { type: "button", onclick: help, "aria-label": "Keys" }, "?");
  const back = ["edits", "mask", "scale", "softcap"].some((name) => name in call())
    ? h("button", { type: "button", onclick: () => set({ edits: null, mask: null, scale: null, softcap: null }) }, "Undo edits")
    : null;
  fill(document.getElementById("tools"), ...[back, theme, keys].filter(Boolean));
}

function turnTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  refresh(true);
}

function failed(error) {
  say(error.message);
  return h("div", { class: "card error", role: "alert" }, h("p", {}, error.message));
}

/** What a view does, and where that cannot be done the reason, above what is seen already. */
async function guarded(act) {
  root.querySelector("section > .passing")?.remove();
  try {
    await act();
  } catch (error) {
    const said = failed(error);
    said.classList.add("passing");
    root.querySelector("section > .lede")?.after(said);
  }
}

async function refresh(anew = false) {
  const now = state();
  const view = VIEWS.find((one) => one.id === now.view) ?? VIEWS[0];
  const called = JSON.stringify(call(now));
  navigation({ ...now, view: view.id });
  if (!anew && shown && shown.id === view.id && shown.called === called && shown.update) return guarded(() => shown.update(now));
  const mine = ++turn;
  let body;
  let made = {};
  try {
    about = await ask("/about", call(now));
    if (mine !== turn) return;
    navigation({ ...now, view: view.id });
    document.title = `${view.title} · ${about.name} · clearhead`;
    document.getElementById("formula").textContent = about.formula;
    tools(about);
    const bar = h("div", { class: "bar" });
    body = h("section", {}, h("div", { class: "heading" }, h("h1", {}, view.title), bar), h("p", { class: "lede" }, view.lede));
    made = (await view.show(body, { about, ask: (path, params) => ask(path, { ...call(), ...params }), set, say, live, state })) ?? {};
    const older = handedOver();
    fill(bar, taking(view, made.exports ?? older ?? (() => ({})), about, say));
  } catch (error) {
    body = h("section", {}, h("h1", {}, view.title), failed(error));
  }
  if (mine !== turn) return made.end?.();
  shown?.end?.();
  shown = { id: view.id, called, ...made };
  fill(root, body);
  await guarded(() => made.shown?.());
  document.documentElement.dataset.ready = view.id;
}

listen(() => refresh());
listenToKeys({ views: () => offered(about), go: (view) => set({ view }), current: () => shown });
refresh();
