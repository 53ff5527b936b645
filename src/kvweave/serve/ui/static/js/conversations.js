// Conversations: on the server per tenant where it has API keys, else in this browser.
import { get, put, remove } from "./api.js";
import { info } from "./session.js";
import { makeStore, readStored, writeStored } from "./store.js";

const LOCAL = "kvweave.conversations";
const MOST = 60; // kept in this browser; the oldest go first

/** Heads, newest first: { id, title, updated }. */
export const heads = makeStore([]);

const onServer = () => info.get()?.conversations === true;
const path = (id) => `v1/conversations/${encodeURIComponent(id)}`;
const local = () => readStored(localStorage, LOCAL, []);
const head = ({ id, title, updated }) => ({ id, title, updated });

export function newId() {
  // not randomUUID: that needs https, and people reach servers by plain addresses
  return Array.from(crypto.getRandomValues(new Uint8Array(12)),
    (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export async function refresh() {
  if (onServer()) heads.set((await get("v1/conversations")).data);
  else heads.set(local().map(head));
}

/** The conversation, or null where there is none by that id. */
export async function load(id) {
  if (!onServer()) return local().find((each) => each.id === id) ?? null;
  try {
    const { title, messages, updated, meta } = await get(path(id));
    return { id, title, messages, updated, kb: meta?.kb ?? null };
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

/** Keep it; whether it could be kept. */
export async function save(conversation) {
  const { id, title, messages, kb } = conversation;
  const updated = Date.now() / 1000;
  let kept = true;
  if (onServer()) {
    await put(path(id), { title, messages, updated, meta: { kb } });
  } else {
    let all = [{ id, title, messages, updated, kb },
      ...local().filter((each) => each.id !== id)].slice(0, MOST);
    while (!(kept = writeStored(localStorage, LOCAL, all)) && all.length > 1) all = all.slice(0,
      -1); // full: the oldest goes
  }
  heads.set((was) => [head({ id, title, updated }), ...was.filter((each) => each.id !== id)]);
  return kept;
}

export async function forget(id) {
  if (onServer()) await remove(path(id));
  else writeStored(localStorage, LOCAL, local().filter((each) => each.id !== id));
  heads.set((was) => was.filter((each) => each.id !== id));
}
