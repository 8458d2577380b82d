// Pictures on a canvas: shades as a bitmap, numbers to shades, linearly; hatching for what is hidden.

import { PIXELS } from "./colour.js";
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

const tiles = new Map(); // by their colours: one is enough for every frame

/** Diagonal lines, for what a mask hides. */
export function hatching(pen, line, ground) {
  const key = `${line} ${ground}`;
  if (!tiles.has(key)) {
    const tile = new OffscreenCanvas(6, 6);
    const small = tile.getContext("2d");
    small.fillStyle = ground;
    small.fillRect(0, 0, 6, 6);
    small.strokeStyle = line;
    small.beginPath();
    small.moveTo(-1, 7);
    small.lineTo(7, -1);
    small.stroke();
    tiles.set(key, tile);
  }
  return pen.createPattern(tiles.get(key), "repeat");
}

/** Shades, a byte a cell, as a bitmap that is painted once; 255 is clear, so that what lies below it is seen. */
export function bitmap(shades, rows, columns, start = 0) {
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < pixels.length; i++) pixels[i] = PIXELS[shades[start + i]];
  const made = new OffscreenCanvas(columns, rows);
  made.getContext("2d").putImageData(image, 0, 0);
  return made;
}

/** Numbers as shades between the least and the most of them; 255 for what is hidden or not finite. */
export function shaded(rows, { low = null, high = null, hidden = null } = {}) {
  const [count, width] = [rows.length, rows[0].length];
  const numbers = new Float64Array(count * width);
  let least = Infinity;
  let most = -Infinity;
  for (let i = 0, at = 0; i < count; i++) {
    const row = rows[i];
    for (let j = 0; j < width; j++, at++) {
      const x = hidden?.(i, j) ? NaN : typeof row[j] === "number" ? row[j] : value(row[j]);
      numbers[at] = x;
      if (x < least && x > -Infinity) least = x;
      if (x > most && x < Infinity) most = x;
    }
  }
  least = low ?? least;
  most = high ?? most;
  const shades = new Uint8Array(count * width);
  const each = 254 / (most - least || 1);
  for (let i = 0; i < shades.length; i++) {
    const x = numbers[i];
    shades[i] = Number.isFinite(x) ? Math.round(each * (Math.min(most, Math.max(least, x)) - least)) : 255;
  }
  return { shades, low: least, high: most };
}

/** Rows of numbers as a picture of `side` pixels; `hidden(i, j)` is hatched. */
export function picture(rows, { side = 240, low = null, high = null, hidden = null, label }) {
  const [count, width] = [rows.length, rows[0].length];
  const found = shaded(rows, { low, high, hidden });
  const size = Math.min(side / width, (side * 1.5) / count);
  const { canvas, pen } = sheet(width * size, count * size, { role: "img", "aria-label": label });
  const colour = colours();
  pen.fillStyle = hatching(pen, colour("line"), colour("card"));
  pen.fillRect(0, 0, width * size, count * size);
  pen.imageSmoothingEnabled = size < 1;
  pen.drawImage(bitmap(found.shades, count, width), 0, 0, width * size, count * size);
  return { canvas, size, low: found.low, high: found.high };
}

/** The cell of a picture under the pointer. */
export function under(event, canvas, columns, rows) {
  const area = canvas.getBoundingClientRect();
  const j = Math.floor(((event.clientX - area.left) / area.width) * columns);
  const i = Math.floor(((event.clientY - area.top) / area.height) * rows);
  return i >= 0 && j >= 0 && i < rows && j < columns ? [i, j] : null;
}

/** Say in the browser's own timeline how long it took from here, where data has arrived, until it is on the screen. */
export function timed(name) {
  const start = performance.now();
  return () => requestAnimationFrame(() => setTimeout(() => performance.measure(`clearhead ${name}`, { start })));
}
