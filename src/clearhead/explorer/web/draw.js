// Small pictures on a canvas: numbers to shades, linearly; hatching for what is hidden.

import { rgb } from "./colour.js";
import { h } from "./dom.js";
import { value } from "./format.js";

/** The colours of the page now, by the names in style.css. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

/** A canvas for so many CSS pixels, and its pen; sharp on any screen. */
export function sheet(width, height, attributes = {}) {
  const canvas = h("canvas", attributes);
  const dpr = devicePixelRatio || 1;
  canvas.width = Math.round(width * dpr);
  canvas.height = Math.round(height * dpr);
  canvas.style.width = `${width}px`;
  canvas.style.height = "auto";
  const pen = canvas.getContext("2d");
  pen.setTransform(dpr, 0, 0, dpr, 0, 0);
  return { canvas, pen };
}

/** Diagonal lines, for what a mask hides. */
export function hatching(pen, line, ground) {
  const tile = new OffscreenCanvas(6, 6);
  const small = tile.getContext("2d");
  small.fillStyle = ground;
  small.fillRect(0, 0, 6, 6);
  small.strokeStyle = line;
  small.beginPath();
  small.moveTo(-1, 7);
  small.lineTo(7, -1);
  small.stroke();
  return pen.createPattern(tile, "repeat");
}

/** Rows of numbers as a picture of `side` pixels; `hidden(i, j)` is hatched. */
export function picture(rows, { side = 240, low = null, high = null, hidden = () => false, label }) {
  const numbers = rows.map((row) => Array.from(row, value));
  const seen = numbers.flatMap((row, i) => row.filter((x, j) => Number.isFinite(x) && !hidden(i, j)));
  const least = low ?? seen.reduce((a, b) => Math.min(a, b), Infinity);
  const most = high ?? seen.reduce((a, b) => Math.max(a, b), -Infinity);
  const [count, width] = [rows.length, rows[0].length];
  const size = Math.max(1, Math.min(side / width, (side * 1.5) / count));
  const { canvas, pen } = sheet(width * size, count * size, { role: "img", "aria-label": label });
  const colour = colours();
  const hatched = hatching(pen, colour("line"), colour("card"));
  for (let i = 0; i < count; i++) {
    for (let j = 0; j < width; j++) {
      const x = numbers[i][j];
      const shade = Math.round((254 * (Math.min(most, Math.max(least, x)) - least)) / (most - least || 1));
      pen.fillStyle = hidden(i, j) || !Number.isFinite(x) ? hatched : `rgb(${rgb(shade).join(" ")})`;
      pen.fillRect(j * size, i * size, size + 0.5, size + 0.5);
    }
  }
  return { canvas, size, low: least, high: most };
}

/** The cell of a picture under the pointer. */
export function under(event, canvas, columns, rows) {
  const area = canvas.getBoundingClientRect();
  const j = Math.floor(((event.clientX - area.left) / area.width) * columns);
  const i = Math.floor(((event.clientY - area.top) / area.height) * rows);
  return i >= 0 && j >= 0 && i < rows && j < columns ? [i, j] : null;
}
