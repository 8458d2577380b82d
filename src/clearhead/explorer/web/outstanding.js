// What stands out in a long context, by name: sinks, keys that received most, queries that find one key far away.

import { h } from "./dom.js";
import { full, two } from "./format.js";

const name = (token, place) => (token === String(place) ? String(place) : `${token} (${place})`);
const number = (one) => h("td", { title: full(one) }, two(one));
const table = (rows) => h("table", { class: "facts" }, h("tbody", {}, rows));
const muted = (words) => h("p", { class: "muted" }, words);

/** Elements for what Python found; `show(query, key)` goes where it is, to all queries where that is null. */
export function outstanding({ sinks, most, found, entropy }, show) {
  const link = (words, query, key) => h("th", { scope: "row" }, h("button", { type: "button", title: "Show it", onclick: () => show(query, key) }, words));
  return [
    muted(sinks === null ? "What keys received was not observed: observe(received=True)."
      : sinks.length ? sinks.map((one) => `${name(one.token, one.key)} is a sink: it takes ${two(100 * one.share)} % of all attention.`).join(" ")
        : "No key is a sink."),
    most && h("h2", {}, "Received most"),
    most && table(most.map((one) => h("tr", {}, link(name(one.token, one.key), null, one.key), number(one.received), h("td", {}, `${two(100 * one.share)} %`)))),
    h("h2", {}, "Retrieval rows"),
    found === null ? muted("Which queries find a key far away was not observed: observe(top=2).")
      : found.length ? table(found.map((one) => h("tr", {}, link(`${name(one.token, one.query)} → ${name(one.key_token, one.key)}`, one.query, one.key), number(one.weight))))
        : muted("No query gives much of its weight to one key far away."),
    muted(`mean entropy ${two(entropy)} nats`),
    h("div", { class: "row-of" }),
  ];
}

/** What one query looks at. */
export function looksAt(token, query, { looks, exact, entropy }) {
  return [
    h("h2", {}, `${name(token, query)} looks at`),
    looks.length ? table(looks.map((one) => h("tr", {}, h("th", { scope: "row" }, name(one.token, one.key)), number(one.weight)))) : muted("Its weights were not observed."),
    muted(`entropy ${two(entropy)} nats${exact || !looks.length ? "" : "; its top keys alone were observed"}`),
  ];
}
