// A matrix of few cells as a drawing: names on its sides, numbers in its cells, hatching where a mask hides.

import { css, ink, rgb } from "./colour.js";
import { h, s } from "./dom.js";
import { full, two, value } from "./format.js";

const MOST_NUMBERED = 14; // columns that have room for numbers
const NAMES = 64; // rows or columns that have names
const MOST_DRAWN = 3000; // cells that are each an element; more are pixels

/**
 * `rows` of numbers; `names` = {rows, columns}; `hidden(i, j)` is hatched; shades go from `low` to `high`. A cell tells
 * `point(i, j)` that it is pointed at or clicked; `at` = [i, j] is framed. `signed` shades by distance from zero.
 */
export function grid(rows, { label, names = {}, low = null, high = null, hidden = () => false, point = null, at = null, signed = false, width = 320, numbers = true }) {
  const [count, columns] = [rows.length, rows[0]?.length ?? 0];
  const shown = rows.map((row) => Array.from(row, value));
  const size = (x) => (signed ? Math.abs(x) : x);
  const seen = shown.flatMap((row, i) => row.filter((x, j) => Number.isFinite(x) && !hidden(i, j)).map(size));
  const least = low ?? (signed ? 0 : seen.reduce((a, b) => Math.min(a, b), Infinity));
  const most = high ?? seen.reduce((a, b) => Math.max(a, b), -Infinity);
  const shadeOf = (x) => Math.round((254 * (Math.min(most, Math.max(least, size(x))) - least)) / (most - least || 1));
  if (count * columns > MOST_DRAWN) return pixels(shown, { label, hidden, point, at, width, shadeOf });
  const named = Boolean(names.rows) && count <= NAMES && columns <= NAMES;
  const left = named ? 12 + 7 * Math.min(9, longest(names.rows)) : 0;
  const top = named && names.columns ? (columns <= MOST_NUMBERED ? 22 : 12 + 6 * Math.min(9, longest(names.columns))) : 0;
  const cell = Math.max(3, Math.min(56, (width - left) / Math.max(columns, 1)));
  const tall = Math.min(cell, 44, Math.max(3, 400 / count));
  const hatch = `hatch-${++hatches}`;
  const drawing = s("svg", { class: "matrix", viewBox: `0 0 ${left + columns * cell} ${top + count * tall}`, width: left + columns * cell, role: "img", "aria-label": label },
    s("pattern", { id: hatch, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, s("rect", { width: 6, height: 6, class: "ground" }), s("rect", { width: 1, height: 6, class: "hatch" })));
  for (let i = 0; i < count; i++) {
    for (let j = 0; j < columns; j++) {
      const x = shown[i][j];
      const gone = hidden(i, j) || !Number.isFinite(x);
      const shade = shadeOf(x);
      const [px, py] = [left + j * cell, top + i * tall];
      drawing.append(s("rect", {
        class: point ? "cell clickable" : "cell", x: px, y: py, width: cell, height: tall, fill: gone ? `url(#${hatch})` : css(shade),
        onpointerenter: point && (() => point(i, j, false)), onclick: point && (() => point(i, j, true)),
      }, s("title", {}, `${names.rows?.[i] ?? i} → ${names.columns?.[j] ?? j}: ${gone ? "hidden" : full(rows[i][j])}`)));
      if (numbers && !gone && cell >= 34) {
        drawing.append(s("text", { class: "number", x: px + cell / 2, y: py + tall / 2 + 4, "text-anchor": "middle", fill: ink(shade) }, two(rows[i][j])));
      }
    }
  }
  if (named) {
    names.rows.slice(0, count).forEach((name, i) => drawing.append(s("text", { class: "name", x: left - 6, y: top + (i + 0.5) * tall + 4, "text-anchor": "end" }, cut(name))));
    (names.columns ?? []).slice(0, columns).forEach((name, j) => {
      const x = left + (j + 0.5) * cell;
      const flat = columns <= MOST_NUMBERED;
      drawing.append(s("text", { class: "name", x, y: top - 6, "text-anchor": flat ? "middle" : "start", transform: flat ? null : `rotate(-90 ${x + 4} ${top - 6})` }, cut(name, flat ? Math.floor(cell / 7) : 9)));
    });
  }
  if (at && at[0] >= 0 && at[1] >= 0 && at[0] < count && at[1] < columns) {
    drawing.append(s("rect", { class: "frame", x: left + at[1] * cell + 1, y: top + at[0] * tall + 1, width: cell - 2, height: tall - 2 }));
  }
  return drawing;
}

let hatches = 0;

/** The same for many cells: a pixel each, what is hidden left open to the hatching beneath. */
function pixels(rows, { label, hidden, point, at, width, shadeOf }) {
  const [count, columns] = [rows.length, rows[0].length];
  const canvas = h("canvas", { class: point ? "pixels-of clickable" : "pixels-of", width: columns, height: count, role: "img", "aria-label": label });
  canvas.style.width = `${width}px`;
  const image = new ImageData(columns, count);
  rows.forEach((row, i) => row.forEach((x, j) => {
    if (!hidden(i, j) && Number.isFinite(x)) image.data.set([...rgb(shadeOf(x)), 255], 4 * (i * columns + j));
  }));
  const pen = canvas.getContext("2d");
  pen.putImageData(image, 0, 0);
  if (at && at[0] >= 0 && at[1] >= 0) {
    pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--frame");
    pen.strokeRect(at[1] - 1.5, at[0] - 1.5, 4, 4);
  }
  canvas.addEventListener("click", (event) => {
    const area = canvas.getBoundingClientRect();
    const [i, j] = [Math.floor(((event.clientY - area.top) / area.height) * count), Math.floor(((event.clientX - area.left) / area.width) * columns)];
    if (point && i >= 0 && j >= 0 && i < count && j < columns) point(i, j, true);
  });
  return canvas;
}

function longest(names) {
  return names.slice(0, NAMES).reduce((most, name) => Math.max(most, [...name].length), 1);
}

function cut(name, most = 9) {
  const signs = [...name];
  return signs.length > most ? `${signs.slice(0, Math.max(1, most - 1)).join("")}…` : name;
}

/** Rows of an array that came as {shape, data}. */
export function rowsOf({ shape, data }) {
  return Array.from({ length: shape[0] }, (_, i) => Array.from(data.subarray(i * shape[1], (i + 1) * shape[1])));
}
