// Elements, made as plainly as they are written. Text is always text: nothing here reads markup.

/** An element with attributes, listeners (`onclick: f`) and children: elements, text, lists of them, or nothing. */
export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value") made.value = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false && one !== ""));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

/** The same for an element of SVG. */
export function s(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false && one !== ""));
  return made;
}

/** One choice out of a few, as buttons side by side. */
export function segment(label, choices, chosen, pick) {
  const buttons = choices.map(([value, text]) =>
    h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => pick(value) }, text),
  );
  return h("span", { class: "segment", role: "group", "aria-label": label }, buttons);
}

/** One choice out of many. */
export function choice(label, choices, chosen, pick) {
  const options = choices.map(([value, text]) => h("option", { value, selected: String(value) === String(chosen) }, text));
  return h("label", {}, label, h("select", { onchange: (event) => pick(event.target.value) }, options));
}

/** An element's children, replaced: elements, text, lists of them, or nothing. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false && one !== ""));
  return element;
}
