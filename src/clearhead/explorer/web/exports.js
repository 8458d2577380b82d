// What is seen, as a file: PNG of a canvas, SVG, CSV.

import { h } from "./dom.js";

/** Buttons for what a view can give: {name, canvas(), svg(), csv()}; those that are there. */
export function exporting({ name, canvas, svg, csv }) {
  const one = (kind, make) => h("button", { type: "button", onclick: make }, kind);
  return h("div", { class: "controls", role: "group", "aria-label": "Save" }, [
    canvas && one("PNG", () => canvas().toBlob((blob) => hand(blob, `${name}.png`))),
    svg && one("SVG", () => hand(new Blob([svg()], { type: "image/svg+xml" }), `${name}.svg`)),
    csv && one("CSV", () => hand(new Blob([csv()], { type: "text/csv" }), `${name}.csv`)),
  ]);
}

function hand(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = h("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Text inside SVG. */
export function escaped(text) {
  return String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}

/** A field of CSV. */
export function field(text) {
  return /[",\n\r]/.test(String(text)) ? `"${String(text).replaceAll('"', '""')}"` : String(text);
}
