"""The style and the script of the page that `seen.html()` gives: they show numbers, and compute none of attention's."""

STYLE = """
:root{--ink:#1c2430;--soft:#5b6571;--line:#d9dee5;--back:#fff;--panel:#f6f8fa;--hue:#1769aa;--low:255,255,255;
 --high:8,69,130;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#98a3b0;--line:#39424e;--back:#161b22;--panel:#1d242d;
 --hue:#6cb6ff;--low:22,27,34;--high:142,205,255}}
*{box-sizing:border-box}
body{margin:0;font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back)}
main{max-width:90rem;margin:0 auto;padding:1rem 1.25rem;display:grid;gap:1rem 2rem;
 grid-template-columns:minmax(0,1fr)}
@media(min-width:60rem){main{grid-template-columns:minmax(0,1fr) minmax(0,34rem)}header{grid-column:1/-1}
 #one{position:sticky;top:1rem;align-self:start}}
h1{font-size:1.25rem;margin:0}h2{font-size:1rem;margin:0;overflow-wrap:anywhere}
p{margin:.15rem 0;color:var(--soft)}
section{min-width:0}
#heads{overflow-x:auto}
.row{display:flex;gap:.35rem;align-items:center;margin:.2rem 0}
.row span{flex:0 0 3.2rem;color:var(--soft);font-variant-numeric:tabular-nums;text-align:right;padding-right:.4rem}
button{padding:2px;border:1px solid var(--line);border-radius:4px;background:var(--back);cursor:pointer;line-height:0;
 flex:0 0 auto}
button:focus-visible{outline:2px solid var(--hue);outline-offset:1px}
button[aria-pressed=true]{border-color:var(--hue);box-shadow:0 0 0 1px var(--hue)}
canvas{image-rendering:pixelated}
button canvas{width:44px;height:44px}
#one{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:1rem;min-width:0}
#map{display:grid;grid-template-columns:auto minmax(0,1fr);gap:2px 6px;margin:.75rem 0}
#large{width:100%;aspect-ratio:1;border:1px solid var(--line);grid-column:2;grid-row:1}
#down{display:grid;font-size:11px;line-height:1;color:var(--soft);text-align:right;grid-column:1;grid-row:1;
 height:0;min-height:100%}
#across{display:grid;font-size:11px;line-height:1;color:var(--soft);grid-column:2;grid-row:2}
#down span,#across span{overflow:hidden;white-space:nowrap;text-overflow:ellipsis;max-width:7em;align-self:center}
#across span{writing-mode:vertical-rl;max-width:none;max-height:8em;justify-self:center;align-self:start}
#says{min-height:3em;color:var(--ink);font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
""".strip()

SCRIPT = """
"use strict";
const seen = JSON.parse(document.getElementById("numbers").textContent);
const large = document.getElementById("large"), says = document.getElementById("says");
const buttons = [];
let chosen = null;
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).split(",").map(Number);
function unpacked(text, most) {                // 16 bits a weight, in parts of the largest, little end first
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer), found = new Float64Array(bytes.length / 2);
  for (let i = 0; i < found.length; i++) found[i] = view.getUint16(2 * i, true) / 65535 * most;
  return found;
}
function paint(canvas, call, head) {
  head.weights = head.weights || unpacked(head.data, head.most);
  canvas.width = call.columns; canvas.height = call.rows;
  const low = colour("--low"), high = colour("--high"), most = head.most || 1;
  const drawing = canvas.getContext("2d"), image = drawing.createImageData(call.columns, call.rows);
  head.weights.forEach((weight, i) => {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = low[c] + (high[c] - low[c]) * Math.min(weight / most, 1);
    image.data[4 * i + 3] = 255;
  });
  drawing.putImageData(image, 0, 0);
}
function label(place, names, count) {          // every name where there is room, and else every so many
  place.replaceChildren();
  const step = Math.ceil(count / (innerWidth < 600 ? 16 : 24));
  place.style[place.id === "down" ? "gridTemplateRows" : "gridTemplateColumns"] = `repeat(${count}, minmax(0,1fr))`;
  for (let i = 0; i < count && (!i || 2 * (count - i) >= step); i += step) {
    const one = document.createElement("span"), where = `${i + 1} / span ${Math.min(step, count - i)}`;
    one.style[place.id === "down" ? "gridRow" : "gridColumn"] = where;
    one.textContent = one.title = names[i];
    place.append(one);
  }
}
function pick(call, head, button) {
  chosen = {call, head};
  buttons.forEach(other => other.setAttribute("aria-pressed", other === button));
  document.getElementById("name").textContent = `${call.name}, head ${head.head}`;
  document.getElementById("facts").textContent = head.facts;
  paint(large, call, head);
  label(document.getElementById("down"), call.queries, call.rows);
  label(document.getElementById("across"), call.keys, call.columns);
  says.textContent = call.pooled || "Point at a cell to read its weight.";
}
function point(event) {
  if (!chosen) return;
  const {call, head} = chosen, box = large.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / box.width * call.columns);
  const row = Math.floor((event.clientY - box.top) / box.height * call.rows);
  if (column < 0 || row < 0 || column >= call.columns || row >= call.rows) return;
  const weight = head.weights[row * call.columns + column];
  const number = weight < 0.001 ? weight.toExponential(2) : weight.toFixed(4);
  says.textContent = `${call.queries[row]} \\u2192 ${call.keys[column]}: ${number}` +
    (call.pooled ? ` on average. ${call.pooled}` : "");
}
const grid = document.getElementById("heads");
for (const call of seen) {
  const row = document.createElement("div"), title = document.createElement("span");
  row.className = "row"; title.textContent = call.title; title.title = call.name;
  row.append(title);
  for (const head of call.heads) {
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    button.type = "button"; button.title = `${call.name}, head ${head.head}`;
    button.setAttribute("aria-label", button.title);
    button.append(canvas);
    button.addEventListener("click", () => pick(call, head, button));
    row.append(button); buttons.push(button);
    button.again = () => paint(canvas, call, head);
    button.again();
  }
  grid.append(row);
}
large.addEventListener("pointermove", point);
large.addEventListener("pointerdown", point);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  buttons.forEach(button => button.again());
  if (chosen) paint(large, chosen.call, chosen.head);
});
if (buttons.length) buttons[0].click();
""".strip()
