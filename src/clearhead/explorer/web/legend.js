// Which shade is which number: the colours in a row, with their ends named.

import { h } from "./dom.js";
import { bitmap, sheet } from "./draw.js";
import { full, two } from "./format.js";

const RAMP = bitmap(Uint8Array.from({ length: 255 }, (_, shade) => shade), 1, 255);

/** From the least to the most of `ends`; `how` says in words how shades are spread between them. */
export function legend(ends, how) {
  if (!ends) return null;
  const { canvas, pen } = sheet(96, 10, { role: "img", "aria-label": `Shades from ${two(ends[0])} to ${two(ends[1])}, ${how}` });
  pen.drawImage(RAMP, 0, 0, 96, 10);
  const end = (one) => h("span", { title: full(one) }, two(one));
  return h("span", { class: "legend" }, end(ends[0]), canvas, end(ends[1]));
}
