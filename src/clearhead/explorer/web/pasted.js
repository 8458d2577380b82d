// A function of one's own, pasted or loaded, held against the library by `check`; behind a switch, since it runs code.

import { post } from "./ask.js";
import { fill, h } from "./dom.js";

const KEPT = "clearhead.pasted";
const MARKS = { passed: "✓", failed: "✗", noted: "!", skipped: "–" };
const FIRST = `import numpy as np

def attention(q, k, v):
    scores = q @ k.swapaxes(-1, -2)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v
`;

/** {element, update, exports}: the editor, its switch, and what was found. */
export function pasted({ set, say, live }) {
  const area = h("textarea", { class: "editor", rows: 14, spellcheck: "false", autocomplete: "off", "aria-label": "Your function, in Python", oninput: keep }, kept() ?? FIRST);
  const file = h("input", { type: "file", accept: ".py,text/x-python", "aria-label": "Load a file", onchange: load });
  const allow = h("input", { type: "checkbox", onchange: () => turn(allow.checked) });
  const run = h("button", { type: "button", class: "strong", disabled: true, onclick: check }, "Check it");
  const note = h("p", { class: "muted", role: "status" });
  const found = h("div", { class: "card", "aria-live": "polite" }, h("h2", {}, "What is found"), h("p", { class: "muted" }, "Nothing yet. The function above forgets something: switch it on and check it."));
  const element = [
    h("div", { class: "card" },
      h("h2", {}, "Your function"),
      h("p", { class: "muted" }, "Paste or load one that takes q, k and v, in NumPy, PyTorch or JAX. The last one defined is checked."),
      area,
      h("div", { class: "controls" },
        h("label", { class: "switch" }, allow, "Let this page run Python code on this machine"), run, file),
      note),
    found,
  ];
  let last = null;

  if (live) post("switch", {}).then(stand, (error) => tell(error.message));
  else {
    allow.disabled = file.disabled = true;
    tell("Checking needs the live page: clearhead explore.");
  }

  function stand({ on, may }) {
    allow.checked = on;
    allow.disabled = !may;
    run.disabled = !on;
    tell(may ? (on ? "On: what is checked runs with your rights, for at most a minute." : "Off: nothing is run.") : "This server was started so that it runs no code.");
  }

  function tell(words) {
    note.textContent = words;
  }

  async function turn(on) {
    try {
      stand(await post("switch", { on }));
    } catch (error) {
      allow.checked = false;
      tell(error.message);
    }
  }

  async function load() {
    const [chosen] = file.files;
    if (!chosen) return;
    if (chosen.size > 64_000) return tell("That file is too long: expected at most 64,000 bytes.");
    area.value = await chosen.text();
    keep();
  }

  function keep() {
    try {
      sessionStorage.setItem(KEPT, area.value);
    } catch {
      // a page without storage: it is kept as long as the view is
    }
  }

  async function check() {
    run.disabled = true;
    tell("Checking …");
    try {
      last = await post("check", { source: area.value });
      show(last);
      tell("Checked.");
      say(last.verdict);
    } catch (error) {
      last = null;
      fill(found, h("h2", {}, "What is found"), h("p", { class: "bad", role: "alert" }, error.message));
      tell("");
      say(error.message);
    }
    run.disabled = !allow.checked;
  }

  function show(report) {
    fill(found,
      h("h2", {}, "What is found"),
      h("p", { class: report.right ? "verdict good" : "verdict bad" }, report.verdict),
      report.findings.map((one) => h("section", { class: "finding" },
        h("h3", {}, one.title),
        h("p", {}, one.why),
        h("p", {}, h("strong", {}, "Mend: "), one.mend),
        one.lines.length ? h("pre", {}, one.lines.join("\n")) : null,
        one.cell ? h("button", { type: "button", class: "strong", onclick: () => open(one.cell) }, "Open the failing cell") : null)),
      h("details", {}, h("summary", {}, `${report.checks.length} checks`), h("ul", { class: "checks" }, report.checks.map((one) =>
        h("li", {}, h("span", { class: one.outcome === "failed" ? "bad" : one.outcome === "passed" ? "good" : "muted" }, MARKS[one.outcome]), ` ${one.name}: ${one.words}`)))));
  }

  function open({ given, query, key, head }) {
    set({ view: "heat", given, query, key, head: head ?? null, pinned: "1", edits: null, mask: null, scale: null, softcap: null, layer: null, what: null });
  }

  return {
    element,
    update: () => undefined,
    exports: () => ({
      name: "checked",
      rows: [["check", "outcome", "words"], ...(last?.checks ?? []).map((one) => [one.name, one.outcome, one.words])],
      python: `${area.value}\nprint(ch.check(${name(area.value)}))`,
    }),
  };
}

/** The last function or class that a text defines, by its lines. */
function name(source) {
  return [...source.matchAll(/^(?:def|class)\s+(\w+)/gm)].at(-1)?.[1] ?? "attention";
}

function kept() {
  try {
    return sessionStorage.getItem(KEPT);
  } catch {
    return null;
  }
}
