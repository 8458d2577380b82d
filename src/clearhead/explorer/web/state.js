// What is looked at, kept in the address after #: a link reproduces what is seen.

const listeners = new Set();
const LONGEST = 60_000; // characters of an address: browsers take more, the server does not
let refused = () => {};
let held = null; // the same where a page has no address of its own, as in a notebook's frame
const CALL = ["edits", "mask", "scale", "softcap", "layer", "text", "given"];

/** {view, …parameters}, all text. */
export function state() {
  const [view, query = ""] = (held ?? location.hash).replace(/^#\/?/, "").split("?");
  return { view: view || "heat", ...Object.fromEntries(new URLSearchParams(query)) };
}

/** Change some of it; null forgets. What only moves the pointer makes no entry in the browser's history. */
export function set(changes, { quiet = false } = {}) {
  const { view, ...params } = { ...state(), ...changes };
  const said = Object.entries(params).filter(([, one]) => one !== null && one !== undefined && one !== "");
  const query = new URLSearchParams(said).toString();
  const hash = `#/${view}${query ? `?${query}` : ""}`;
  if (hash === (held ?? location.hash)) return;
  if (hash.length > LONGEST) return refused(`This is too long: ${hash.length.toLocaleString("en")} characters, expected at most ${LONGEST.toLocaleString("en")}.`);
  try {
    history[quiet ? "replaceState" : "pushState"](null, "", hash);
  } catch {
    held = hash;
  }
  for (const listener of listeners) listener(state());
}

/** What to do with what is too long to be kept in the address. */
export function whenRefused(act) {
  refused = act;
}

export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

addEventListener("popstate", () => listeners.forEach((listener) => listener(state())));

/** The parameters that make the call another one: edited cells, a mask, a scale. */
export function call(now = state()) {
  return Object.fromEntries(CALL.filter((name) => now[name] && !(name === "layer" && now[name] === "0")).map((name) => [name, now[name]]));
}

/** The number that a parameter says, within 0 … count − 1. */
export function place(now, name, count, otherwise = 0) {
  const number = Number.parseInt(now[name] ?? "", 10);
  return Number.isInteger(number) && number >= 0 && number < count ? number : otherwise;
}
