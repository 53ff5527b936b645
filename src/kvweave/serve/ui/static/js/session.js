// Who is here and how they like it: the API key, the server's greeting, the settings of this
// browser.
import { makeStore, readStored, writeStored } from "./store.js";

const SETTINGS = "kvweave.settings";
const KEY = "kvweave.key";
const DEFAULTS = { theme: "system", kb: null, k: null, dial: null };

export const settings = makeStore({ ...DEFAULTS, ...readStored(localStorage, SETTINGS, {}) });
settings.watch((value) => writeStored(localStorage, SETTINGS, value));

export function setSetting(name, value) {
  settings.set((all) => ({ ...all, [name]: value }));
}

// session storage only: the key goes when the tab does
export const key = makeStore(readStored(sessionStorage, KEY, null));
key.watch((value) => writeStored(sessionStorage, KEY, value));

/** GET /v1/info once it came; null until then. */
export const info = makeStore(null);

/** "ok", "lost" (no answer from the server) or "unauthorised". */
export const connection = makeStore("ok");

export function applyTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}
settings.watch((value) => applyTheme(value.theme));
