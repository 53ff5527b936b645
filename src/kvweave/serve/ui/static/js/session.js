// Who is here and how they like it: the API key, the server's greeting, the settings of this
// browser.
import { makeStore, readStored, useStore, writeStored } from "./store.js";

const SETTINGS = "kvweave.settings";
const KEY = "kvweave.key";
// mode: a strategy in place of the dial; share: what it recomputes, null for its own
const DEFAULTS = { theme: "system", model: null, kb: null, k: null, dial: null, mode: null,
  share: null };

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

/** The model that is asked and looked at: the one that was chosen, the usual one if that is not
 * served. */
export function currentModel() {
  const models = info.get()?.models ?? [];
  return models.find(({ name }) => name === settings.get().model) ?? models[0] ?? null;
}
export function useModel() {
  useStore(info);
  useStore(settings);
  return currentModel();
}
export const hasSeveral = () => (info.get()?.models ?? []).length > 1;

/** The field of a request that names the model; none where there is nothing to choose. */
export const namedModel = () => (hasSeveral() ? { model: currentModel().name } : {});

/** The path of a GET that is about a model. */
export function ofModel(path) {
  if (!hasSeveral()) return path;
  const mark = path.includes("?") ? "&" : "?";
  return `${path}${mark}model=${encodeURIComponent(currentModel().name)}`;
}

/** "ok", "lost" (no answer from the server) or "unauthorised". */
export const connection = makeStore("ok");

export function applyTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}
settings.watch((value) => applyTheme(value.theme));
