// One matrix on a canvas: names on its axes, bars beside and below it, any part of it at any size.
//
// What it shows is a bitmap that was painted once, so that a frame of panning is one image drawn and the names that fit.

import { ink } from "./colour.js";
import { h } from "./dom.js";
import { colours, hatching } from "./draw.js";
import { two } from "./format.js";

const LARGEST = 64; // pixels of a cell, at most
const NUMBERS = 30; // of a cell that has room for its number
const NAMES = 14; // between two names
const TALLEST = 720; // of all rows
const BESIDE = 58; // of a column of bars
const NARROW = 420; // of all, below which one column of bars is enough
const BELOW = 46; // of the bars below
/** From one name on an axis to the next. */
export const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000];
const CLICK = 4; // that a pointer may move and still have clicked

const length = (x) => (Number.isFinite(Number(x)) ? Math.abs(Number(x)) : 0);
const known = new WeakMap();

/** The longest of some bars, found once. */
function longest(values) {
  if (!known.has(values)) known.set(values, values.reduce((most, one) => Math.max(most, length(one)), 1e-12));
  return known.get(values);
}

/**
 * A canvas for `rows` × `columns` cells. `point({query, key})` is told where the pointer is, `pick` where it clicks,
 * `moved({zoom, x, y})` when another part is shown. `show(content, view, at)` draws:
 *   content  {picture, hidden, names: [queries, keys], shade(i, j), number(i, j), beside: [{title, values}], below: {title, values}}
 *   view     {zoom, x, y}: how much larger than what fits, and the first cell that is seen
 *   at       {query, key, pinned}, or nothing
 */
export function field({ rows, columns, label, point, pick, moved, tallest = TALLEST }) {
  const canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": label });
  const pen = canvas.getContext("2d");
  let content = null;
  let view = { zoom: 1, x: 0, y: 0 };
  let at = null;
  let box = null; // {left, top, width, height, size, fit}
  let waiting = 0;
  let held = null; // where a drag began

  function measured() {
    const style = getComputedStyle(document.documentElement);
    const text = Math.round(Number.parseFloat(style.fontSize) * 0.75);
    const font = `${text}px ${style.getPropertyValue("--sans") || "sans-serif"}`;
    pen.font = font;
    const widest = (names) => {
      const longest = [...new Set(names)].sort((a, b) => b.length - a.length).slice(0, 40);
      return Math.ceil(longest.reduce((most, name) => Math.max(most, pen.measureText(name).width), 0));
    };
    const room = Math.max(220, (canvas.parentElement?.clientWidth || 800) - 34);
    const left = Math.max(pen.measureText("queries ↓").width + 16, Math.min(room / (room < NARROW ? 4 : 3), 140, widest(content.names[0])) + 14);
    const top = Math.max(24, Math.min(120, widest(content.names[1])) + 12) + text + 6;
    const beside = room < NARROW ? BESIDE - 14 : BESIDE;
    const columnsBeside = (content.beside ?? []).slice(0, room < NARROW ? 1 : undefined);
    const right = columnsBeside.length * beside + 8;
    const below = content.below ? BELOW : 8;
    const wide = room - left - right;
    let fit = Math.min(LARGEST, wide / columns, tallest / rows);
    if (fit > 4) fit = Math.floor(fit);
    return { text, font, left, top, right, beside, columnsBeside, below, wide, fit };
  }

  /** The part that is seen, held within the matrix. */
  function settled({ wide, fit }) {
    const size = Math.min(Math.max(LARGEST, fit), fit * Math.max(1, view.zoom));
    const [width, height] = [Math.min(wide, columns * size), Math.min(tallest, rows * size)];
    view.zoom = size / fit;
    view.x = Math.min(columns - width / size, Math.max(0, view.x));
    view.y = Math.min(rows - height / size, Math.max(0, view.y));
    return { size, width, height };
  }

  let laid = null;

  function draw() {
    waiting = 0;
    if (!content) return;
    laid ??= measured();
    const { size, width, height } = settled(laid);
    box = { left: laid.left, top: laid.top, width, height, size, fit: laid.fit };
    const dpr = devicePixelRatio || 1;
    const [across, down] = [Math.ceil(laid.left + width + laid.right), Math.ceil(laid.top + height + laid.below)];
    if (canvas.width !== Math.round(across * dpr) || canvas.height !== Math.round(down * dpr)) {
      canvas.width = Math.round(across * dpr);
      canvas.height = Math.round(down * dpr);
      canvas.style.width = `${across}px`;
    }
    canvas.dataset.cells = `${box.left - view.x * size} ${box.top - view.y * size} ${size}`; // where they lie, for who points by script
    canvas.style.cursor = view.zoom > 1.001 ? "grab" : "default";
    canvas.style.touchAction = view.zoom > 1.001 ? "none" : "pan-y";
    const colour = colours();
    pen.setTransform(dpr, 0, 0, dpr, 0, 0);
    pen.fillStyle = colour("card");
    pen.fillRect(0, 0, across, down);
    if (content.hidden) {
      pen.fillStyle = hatching(pen, colour("line"), colour("card"));
      pen.fillRect(box.left, box.top, width, height);
    }
    pen.imageSmoothingEnabled = size < 1;
    pen.drawImage(content.picture, view.x, view.y, width / size, height / size, box.left, box.top, width, height);
    const seen = { i0: Math.floor(view.y), i1: Math.min(rows, Math.ceil(view.y + height / size)), j0: Math.floor(view.x), j1: Math.min(columns, Math.ceil(view.x + width / size)) };
    if (size >= NUMBERS && content.number) numbers(seen);
    names(seen, colour);
    bars(seen, colour);
    if (at) mark(colour);
  }

  const across = (j) => box.left + (j - view.x) * box.size;
  const down = (i) => box.top + (i - view.y) * box.size;

  /** What is drawn among the cells stays among them. */
  function within(act) {
    pen.save();
    pen.beginPath();
    pen.rect(box.left, box.top, box.width, box.height);
    pen.clip();
    act();
    pen.restore();
  }

  function numbers({ i0, i1, j0, j1 }) {
    within(() => {
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.font = `${laid.text}px ui-monospace, Menlo, Consolas, monospace`;
      for (let i = i0; i < i1; i++) {
        for (let j = j0; j < j1; j++) {
          const shade = content.shade(i, j);
          if (shade === 255) continue;
          pen.fillStyle = ink(shade);
          pen.fillText(two(content.number(i, j)), across(j + 0.5), down(i + 0.5), box.size - 4);
        }
      }
    });
  }

  function names({ i0, i1, j0, j1 }, colour) {
    const plain = laid.font;
    const [queries, keys] = content.names;
    const step = STEPS.find((one) => one * box.size >= NAMES) ?? STEPS.at(-1);
    pen.textBaseline = "middle";
    const one = (name, on, x, y, turn, room) => {
      pen.save();
      pen.translate(x, y);
      if (turn) pen.rotate(-Math.PI / 2);
      pen.font = on ? `600 ${plain}` : plain;
      if (on && step > 1) {
        pen.fillStyle = colour("card");
        pen.fillRect(turn ? 0 : -room, -laid.text * 0.8, room, laid.text * 1.6);
      }
      pen.fillStyle = colour(on ? "accent" : "soft");
      pen.textAlign = turn ? "left" : "right";
      pen.fillText(name, 0, 0, room);
      pen.restore();
    };
    const row = (i) => one(queries[i], i === at?.query, box.left - 8, Math.min(box.top + box.height, Math.max(box.top, down(i + 0.5))), false, laid.left - 12);
    const column = (j) => one(keys[j], j === at?.key, Math.min(box.left + box.width, Math.max(box.left, across(j + 0.5))), box.top - 8, true, laid.top - laid.text - 16);
    const inside = (place, first, last) => place > first + 4 && place < last - 4; // a cell that is cut has no room for a name
    for (let i = Math.ceil(i0 / step) * step; i < i1; i += step) {
      if (i !== at?.query && (inside(down(i + 0.5), box.top, box.top + box.height) || box.size < NAMES)) row(i);
    }
    for (let j = Math.ceil(j0 / step) * step; j < j1; j += step) {
      if (j !== at?.key && (inside(across(j + 0.5), box.left, box.left + box.width) || box.size < NAMES)) column(j);
    }
    if (at && at.query >= i0 && at.query < i1) row(at.query);
    if (at && at.key >= j0 && at.key < j1) column(at.key);
    pen.font = plain;
    pen.fillStyle = colour("soft");
    pen.textAlign = "left";
    pen.fillText("keys →", box.left, laid.text * 0.75);
    pen.textAlign = "right";
    pen.fillText("queries ↓", box.left - 8, laid.text * 0.75);
  }

  /** Many boxes at once: one path is filled, however many bars there are. */
  function boxes(colour, each) {
    pen.beginPath();
    each((x, y, width, height) => pen.rect(x, y, width, height));
    pen.fillStyle = colour;
    pen.fill();
  }

  function bars({ i0, i1, j0, j1 }, colour) {
    const [right, bottom] = [box.left + box.width, box.top + box.height];
    laid.columnsBeside.forEach(({ title, values }, n) => {
      const from = right + 10 + n * laid.beside;
      const each = (laid.beside - 10) / longest(values);
      boxes(colour("line"), (add) => {
        for (let i = i0; i < i1; i++) {
          const [a, b] = [Math.max(box.top, down(i + 0.2)), Math.min(bottom, down(i + 0.8))];
          add(from, a, each * length(values[i]), Math.max(0.5, b - a));
        }
      });
      pen.fillStyle = colour("soft");
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      if (box.size >= NAMES) for (let i = i0; i < i1; i++) if (down(i + 0.5) < bottom) pen.fillText(two(values[i]), from + 2, down(i + 0.5), laid.beside - 6);
      pen.fillText(title, from, box.top - 10, laid.beside - 6);
    });
    if (!content.below) return;
    const { title, values } = content.below;
    const [top, each] = [bottom + 6, (BELOW - 12) / longest(values)];
    boxes(colour("line"), (add) => {
      for (let j = j0; j < j1; j++) {
        const [a, b] = [Math.max(box.left, across(j + 0.1)), Math.min(right, across(j + 0.9))];
        add(a, top, Math.max(0.5, b - a), each * length(values[j]));
      }
    });
    pen.fillStyle = colour("soft");
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    if (box.size >= NUMBERS - 8) for (let j = j0; j < j1; j++) pen.fillText(two(values[j]), across(j + 0.5), top + laid.text * 0.8, box.size - 2);
    pen.textAlign = "right";
    pen.fillText(title, box.left - 8, top + laid.text * 0.8, laid.left - 10);
  }

  function mark(colour) {
    within(() => {
      const side = Math.max(3, box.size);
      const [x, y] = [across(at.key + 0.5) - side / 2, down(at.query + 0.5) - side / 2];
      pen.lineWidth = at.pinned ? 5 : 4;
      pen.strokeStyle = colour("card"); // a light and a dark line: one of them stands out on any shade
      pen.strokeRect(x, y, side, side);
      pen.lineWidth = at.pinned ? 3 : 2;
      pen.strokeStyle = colour("accent");
      pen.strokeRect(x, y, side, side);
    });
  }

  function cell(event) {
    const area = canvas.getBoundingClientRect();
    const scale = area.width / (canvas.width / (devicePixelRatio || 1)) || 1;
    const [x, y] = [(event.clientX - area.left) / scale - box.left, (event.clientY - area.top) / scale - box.top];
    if (x < 0 || y < 0 || x >= box.width || y >= box.height) return null;
    return { key: Math.min(columns - 1, Math.floor(view.x + x / box.size)), query: Math.min(rows - 1, Math.floor(view.y + y / box.size)), x, y };
  }

  const soon = () => (waiting ||= requestAnimationFrame(draw));
  let telling = 0;

  function told() {
    clearTimeout(telling);
    telling = setTimeout(() => moved?.({ ...view }), 200);
  }

  function pan(dx, dy) {
    view = { ...view, x: view.x + dx, y: view.y + dy };
    soon();
    told();
  }

  /** Larger or smaller; what is under `about` stays where it is. */
  function zoom(by, about = null) {
    if (!box) return;
    const { x, y } = about ?? { x: box.width / 2, y: box.height / 2 };
    const size = Math.min(Math.max(LARGEST, box.fit), Math.max(box.fit, box.size * by));
    view = { zoom: size / box.fit, x: view.x + x / box.size - x / size, y: view.y + y / box.size - y / size };
    soon();
    told();
  }

  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, y: event.clientY, view: { ...view }, far: false };
    if (view.zoom > 1.001) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!box) return;
    if (held && (Math.abs(event.clientX - held.x) > CLICK || Math.abs(event.clientY - held.y) > CLICK)) held.far = true;
    if (held?.far && view.zoom > 1.001) {
      view = { ...view, x: held.view.x - (event.clientX - held.x) / box.size, y: held.view.y - (event.clientY - held.y) / box.size };
      soon();
      told();
      return;
    }
    const found = cell(event);
    if (found) point?.({ query: found.query, key: found.key });
  });
  canvas.addEventListener("pointerup", (event) => {
    const found = box && held && !held.far ? cell(event) : null;
    held = null;
    if (found) pick?.({ query: found.query, key: found.key });
  });
  canvas.addEventListener("pointercancel", () => (held = null));
  canvas.addEventListener("wheel", (event) => {
    if (!box || !(event.ctrlKey || event.metaKey || view.zoom > 1.001)) return; // a page that is not zoomed scrolls
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) zoom(event.deltaY < 0 ? 1.25 : 0.8, cell(event));
    else pan(event.deltaX / box.size, event.deltaY / box.size);
  }, { passive: false });

  const anew = () => {
    laid = null;
    soon();
  };
  addEventListener("resize", anew);

  return {
    canvas,
    zoom,
    pan,
    box: () => box,
    view: () => ({ ...view }),
    /** Draw now. */
    show(shown, part, where) {
      if (shown !== content) laid = null;
      content = shown;
      if (!held && part) view = { zoom: part.zoom ?? 1, x: part.x ?? 0, y: part.y ?? 0 };
      at = where && where.query >= 0 && where.key >= 0 ? where : null;
      cancelAnimationFrame(waiting);
      draw();
    },
    end() {
      removeEventListener("resize", anew);
      cancelAnimationFrame(waiting);
      clearTimeout(telling);
    },
  };
}
