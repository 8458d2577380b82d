// An element of the page as the text of an SVG: boxes, borders and words where they stand; canvases as images.

const ROUND = (x) => Math.round(x * 100) / 100;
const MARGIN = 24; // pixels around what is taken along
// what a style sheet gives to a drawing, and what a drawing has without one
const PAINT = { fill: "rgb(0, 0, 0)", "fill-opacity": "1", stroke: "none", "stroke-width": "1px", "stroke-dasharray": "none", opacity: "1" };
const LETTERS = ["font-family", "font-size", "font-weight", "text-anchor"];
const LEFT_OUT = ".give, .passing, dialog, select, input[type=range], input[type=file], script, style";

/** What is seen of an element, and nothing of what only serves to change it. */
export function pictured(element) {
  const seen = element.getBoundingClientRect();
  const area = { left: seen.left - MARGIN, top: seen.top - MARGIN };
  const [width, height] = [Math.ceil(seen.width) + 2 * MARGIN, Math.ceil(Math.max(seen.height, element.scrollHeight)) + 2 * MARGIN];
  const ground = getComputedStyle(document.documentElement).getPropertyValue(element instanceof HTMLCanvasElement ? "--card" : "--ground").trim();
  const parts = [];
  drawn(element, area, parts);
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">` +
    `<rect width="100%" height="100%" fill="${escaped(ground)}"/>${parts.join("")}</svg>`;
}

function drawn(element, area, parts) {
  if (!element.checkVisibility() || element.matches(LEFT_OUT)) return;
  const box = element.getBoundingClientRect();
  const [x, y] = [ROUND(box.left - area.left), ROUND(box.top - area.top)];
  if (element instanceof HTMLCanvasElement) {
    parts.push(`<image x="${x}" y="${y}" width="${ROUND(box.width)}" height="${ROUND(box.height)}" href="${element.toDataURL()}"/>`);
    return;
  }
  if (element instanceof SVGSVGElement) {
    parts.push(inlined(element, x, y, box));
    return;
  }
  const style = getComputedStyle(element);
  boxed(style, x, y, box, parts);
  const typed = element instanceof HTMLInputElement || element instanceof HTMLTextAreaElement;
  if (typed && element.type !== "checkbox") {
    const right = style.textAlign === "right" || style.textAlign === "end";
    words(element.value, { left: right ? x + box.width - 7 : x + 8, top: y, height: Math.min(box.height, 36), anchor: right ? "end" : "start" }, style, parts);
  }
  for (const child of element.childNodes) {
    if (child.nodeType === Node.TEXT_NODE) lines(child, area, style, parts);
    else if (child.nodeType === Node.ELEMENT_NODE && !typed) drawn(child, area, parts);
  }
}

/** The ground and the border of a box, where it has any. */
function boxed(style, x, y, box, parts) {
  const filled = !/^rgba\(.*, 0\)$|^transparent$/.test(style.backgroundColor);
  const edge = (side) => Number.parseFloat(style[`border${side}Width`]) || 0;
  const bordered = edge("Left") && edge("Top") && edge("Right") && edge("Bottom");
  if (filled || bordered) {
    const stroke = bordered ? ` stroke="${style.borderLeftColor}" stroke-width="${edge("Left")}"` : "";
    parts.push(`<rect x="${x}" y="${y}" width="${ROUND(box.width)}" height="${ROUND(box.height)}" rx="${Number.parseFloat(style.borderRadius) || 0}" fill="${filled ? style.backgroundColor : "none"}"${stroke}/>`);
  } else if (edge("Top")) {
    parts.push(`<rect x="${x}" y="${y}" width="${ROUND(box.width)}" height="${edge("Top")}" fill="${style.borderTopColor}"/>`);
  }
}

/** A text as the lines in which it stands. */
function lines(node, area, style, parts) {
  const range = document.createRange();
  let line = null;
  const end = () => line && words(line.text, line, style, parts);
  for (const found of node.textContent.matchAll(/\S+\s*|\s+/g)) {
    range.setStart(node, found.index);
    range.setEnd(node, found.index + found[0].length);
    const box = range.getClientRects()[0];
    if (!box || !box.width) continue;
    const at = { left: ROUND(box.left - area.left), top: ROUND(box.top - area.top), height: box.height };
    if (line && Math.abs(line.top - at.top) < 2) line.text += found[0];
    else {
      end();
      line = { ...at, text: found[0] };
    }
  }
  end();
}

function words(text, { left, top, height, anchor = "start" }, style, parts) {
  if (!text.trim()) return;
  const family = escaped(style.fontFamily.replaceAll('"', "'"));
  const size = Number.parseFloat(style.fontSize);
  parts.push(`<text x="${left}" y="${ROUND(top + height / 2 + size * 0.35)}" font-family="${family}" font-size="${size}" font-weight="${style.fontWeight}" text-anchor="${anchor}" fill="${style.color}" xml:space="preserve">${escaped(text.trimEnd())}</text>`);
}

/** An SVG of the page, with the style that its sheet gives it written into it. */
function inlined(element, x, y, box) {
  const copy = element.cloneNode(true);
  const [from, to] = [[element, ...element.querySelectorAll("*")], [copy, ...copy.querySelectorAll("*")]];
  from.forEach((one, i) => {
    const style = getComputedStyle(one);
    for (const [name, usual] of Object.entries(PAINT)) {
      const value = style.getPropertyValue(name);
      if (value === usual) to[i].removeAttribute(name);
      else to[i].setAttribute(name, value);
    }
    if (one.tagName === "text") for (const name of LETTERS) to[i].setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "style", "tabindex", "role", "aria-label"]) to[i].removeAttribute(name);
  });
  for (const [name, value] of Object.entries({ x, y, width: ROUND(box.width), height: ROUND(box.height) })) copy.setAttribute(name, value);
  return new XMLSerializer().serializeToString(copy);
}

/** Text inside SVG. */
export function escaped(text) {
  return String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}
