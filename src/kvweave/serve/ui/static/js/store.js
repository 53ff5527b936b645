// A value that components watch. Writing it redraws those that use it, and nothing else.
import { useEffect, useState } from "./html.js";

export function makeStore(initial) {
  let value = initial;
  const watchers = new Set();
  return {
    get: () => value,
    set(next) {
      value = typeof next === "function" ? next(value) : next;
      for (const watch of [...watchers]) watch(value);
    },
    watch(watcher) {
      watchers.add(watcher);
      return () => watchers.delete(watcher);
    },
  };
}

export function useStore(store) {
  const [value, setValue] = useState(store.get());
  useEffect(() => {
    setValue(store.get()); // it may have moved between the first draw and this
    return store.watch(setValue);
  }, [store]);
  return value;
}

/** JSON in a Storage, or the fallback where there is none or it is broken. */
export function readStored(storage, name, fallback) {
  try {
    const text = storage.getItem(name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** Whether it could be written: storage may be full or forbidden. */
export function writeStored(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
