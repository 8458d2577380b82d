// What is seen, as a file: PNG, SVG, CSV, and the Python that gives it; the same four for every view.
//
// A view's show() returns, beside `update` and `keys`, `exports: () => ({ name, rows, python, picture })`:
//   name     the file's, without its ending; the view's where there is none
//   rows     lists of cells, headings first, numbers as `full` writes them
//   python   the lines after those that define q, k and v, such as `ch.trace(q, k, v, query=2${about.options})`
//   picture  an element of the page, a canvas, or the text of an SVG; the whole view where there is none
// Any of them may be left out, and any may be a promise.

import { h } from "./dom.js";
import { pictured } from "./pictured.js";

const SHARP = 2; // pixels of a PNG for each of the page

/** The four buttons of a view. `given` gives its exports, `about` what it shows, `say` tells that it is done. */
export function taking(view, given, about, say) {
  const one = (words, what, act) =>
    h("button", { type: "button", class: "quiet", title: what, onclick: () => act().catch((error) => say(error.message)) }, words);
  const name = async () => slug(`${about.name}-${(await given()).name ?? view.id}`);
  const picture = async () => {
    const found = (await (await given()).picture) ?? document.querySelector("#view > section");
    return typeof found === "string" ? found : pictured(found);
  };
  return h("div", { class: "give", role: "group", "aria-label": "Take with you" },
    one("PNG", "The picture, as PNG", async () => {
      hand(await painted(await picture()), `${await name()}.png`);
      say("Saved as PNG.");
    }),
    one("SVG", "The picture, as SVG", async () => {
      hand(new Blob([await picture()], { type: "image/svg+xml" }), `${await name()}.svg`);
      say("Saved as SVG.");
    }),
    one("CSV", "The numbers, in full", async () => {
      const found = await given();
      const text = csv((await found.rows) ?? none());
      hand(new Blob([text], { type: "text/csv" }), `${await name()}.csv`);
      say("Saved as CSV.");
    }),
    one("Copy as Python", "The call that gives these numbers", async () => {
      const lines = await (await given()).python;
      const copied = await copy(lines ? `${about.given}\n${lines}\n` : about.python);
      say(copied ? "Copied as Python." : "Copy it from here.");
    }),
  );
}

/** Rows of cells as CSV. */
export function csv(rows) {
  return rows.map((row) => `${row.map(field).join(",")}\r\n`).join("");
}

/** A field of CSV. */
export function field(text) {
  return /[",\n\r]/.test(String(text)) ? `"${String(text).replaceAll('"', '""')}"` : String(text);
}

/** Copy text, and say whether that was allowed; where it was not, show the text to be copied by hand. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { readonly: true, rows: 12, cols: 60, "aria-label": "Python" }, text);
    const box = h("dialog", { "aria-label": "Python" }, area, h("form", { method: "dialog" }, h("button", {}, "Close")));
    document.body.append(box);
    box.addEventListener("close", () => box.remove());
    box.showModal();
    area.select();
    return false;
  }
}

async function painted(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = h("canvas", { width: image.naturalWidth * SHARP, height: image.naturalHeight * SHARP });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done));
}

function hand(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = h("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

function none() {
  throw new Error("This view has no table of numbers.");
}

function slug(text) {
  return text.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
}
