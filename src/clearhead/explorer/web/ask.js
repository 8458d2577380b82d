// The page's only way to a number: an address and its parameters. In a saved file the answers lie in the page itself.

const held = document.getElementById("answers");
const answers = held ? JSON.parse(held.textContent) : null;
const kept = new Map();
const MOST_KEPT = 400;
const LONGEST = 60_000; // characters of an address, a little below what the server takes

/** True where whatever is asked can be computed. */
export const live = answers === null;

export class NeedsLive extends Error {}

/** The address as Python spells it: parameters by name, none that says nothing. */
export function spelled(path, params = {}) {
  const said = Object.entries(params).filter(([, one]) => one !== null && one !== undefined && one !== "");
  said.sort(([a], [b]) => (a < b ? -1 : 1));
  const query = said.map(([name, one]) => `${name}=${strict(one)}`).join("&");
  return query ? `${path}?${query}` : path;
}

function strict(one) {
  return encodeURIComponent(one).replace(/[!'()*]/g, (c) => `%${c.charCodeAt(0).toString(16).toUpperCase()}`);
}

/** What Python answers: an object, or an array as {shape, data}. */
export function ask(path, params = {}) {
  const address = spelled(path, params);
  if (!kept.has(address)) {
    if (kept.size >= MOST_KEPT) kept.delete(kept.keys().next().value);
    const found = live ? fetched(address) : embedded(address);
    kept.set(address, found);
    found.catch(() => kept.delete(address));
  }
  return kept.get(address);
}

/** What was asked for, or null where a saved file has it not. */
export function ifThere(found) {
  return found.catch((error) => {
    if (error instanceof NeedsLive) return null;
    throw error;
  });
}

/** Hand something to the server, which answers or says why not. */
export async function post(path, body) {
  if (!live) throw new NeedsLive("This needs the live page: clearhead explore.");
  const reply = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }).catch(() => null);
  return replied(reply, await reply?.json().catch(() => ({})));
}

async function fetched(address) {
  if (address.length > LONGEST) throw new Error(`This is too long: ${address.length.toLocaleString("en")} characters, expected at most ${LONGEST.toLocaleString("en")}.`);
  const reply = await fetch(`data${address}`).catch(() => null);
  if (!reply?.ok) return replied(reply, await reply?.json().catch(() => ({})));
  if (reply.headers.get("Content-Type").startsWith("application/json")) return reply.json();
  return unpacked(await reply.arrayBuffer());
}

function replied(reply, body) {
  if (reply === null) throw new Error("The server has gone: start clearhead explore again.");
  if (!reply.ok) throw new Error(body.error ?? `The server said ${reply.status}.`);
  return body;
}

async function embedded(address) {
  if (!(address in answers)) throw new NeedsLive("This needs the live page: clearhead explore.");
  const held = answers[address].startsWith("/") ? answers[answers[address]] : answers[address]; // one answer, two addresses
  const bytes = Uint8Array.from(atob(held), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const first = new Uint8Array(buffer)[0];
  return first === 0x7b || first === 0x5b ? JSON.parse(new TextDecoder().decode(buffer)) : unpacked(buffer);
}

const KINDS = { u1: Uint8Array, f4: Float32Array, f8: Float64Array, i4: Int32Array };

function unpacked(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const { dtype, shape } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return { shape, data: new KINDS[dtype](buffer, 4 + length) };
}
