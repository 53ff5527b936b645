// Calls of the server. Every failure becomes an ApiError that says what to do in one line.
import { useCallback, useEffect, useRef, useState } from "./html.js";
import { connection, info, key } from "./session.js";
import { Cut, readEvents } from "./sse.js";

export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status; // 0: the server could not be reached, or left in the middle
    this.code = code;
  }
}

const UNREACHED = "The server does not answer. It may be restarting; this page keeps trying.";

async function call(method, path, { body, form, accept, signal } = {}) {
  const headers = { Accept: accept ?? "application/json" };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, body: form ?? (body === undefined ? undefined
        : JSON.stringify(body)),
      credentials: "omit", referrerPolicy: "no-referrer", cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    lost();
    throw new ApiError(UNREACHED);
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  let message = `The server answered ${response.status}.`;
  let code = null;
  try {
    const { error } = await response.json();
    message = error.message;
    code = error.code;
  } catch {
    // a proxy's page, perhaps: the status has to do
  }
  if (response.status === 401) connection.set("unauthorised");
  return new ApiError(message, response.status, code);
}

export async function get(path, signal) {
  return (await call("GET", path, { signal })).json();
}
export async function post(path, body, signal) {
  return (await call("POST", path, { body, signal })).json();
}
export async function put(path, body) {
  return (await call("PUT", path, { body })).json();
}
export async function patch(path, body) {
  return (await call("PATCH", path, { body })).json();
}
export async function remove(path) {
  return (await call("DELETE", path)).json();
}

/** Events of a POST, as they come. An event with `error` is thrown. `hear`: see `readEvents`. */
export async function* stream(path, { body, form, signal, hear } = {}) {
  const response = await call("POST", path, { body, form, signal, accept: "text/event-stream" });
  try {
    for await (const event of readEvents(response.body, hear)) {
      if (event.error) throw new ApiError(event.error.message, 500, event.error.code);
      yield event;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    lost();
    const message = error instanceof Cut ? error.message : "The connection was lost in mid-answer.";
    throw new ApiError(message);
  }
}

// ---- disconnected and back ---------------------------------------------------------------------

let watching = false;
const returns = new Set();

/** Call `back` each time the server answers again. */
export function onReturn(back) {
  returns.add(back);
  return () => returns.delete(back);
}

function lost() {
  if (connection.get() === "unauthorised") return;
  connection.set("lost");
  if (watching) return;
  watching = true;
  tryAgain(500);
}

function tryAgain(afterMs) {
  setTimeout(async () => {
    try {
      const response = await fetch("readyz", { cache: "no-store" });
      if (!response.ok) throw new Error("not yet");
    } catch {
      tryAgain(Math.min(afterMs * 1.5, 5000));
      return;
    }
    watching = false;
    connection.set("ok");
    await greet().catch(() => {});
    for (const back of [...returns]) back();
  }, afterMs);
}

/** Ask who is there. Sets `info`, or `connection` to "unauthorised". */
export async function greet() {
  info.set(await get("v1/info"));
  connection.set("ok");
}

// ---- a resource as a hook ----------------------------------------------------------------------

/** What a GET gives: { data, error, loading, reload }. `path` null: nothing is fetched. `everyMs`:
 * fetched again while the page can be seen. What was there stays while it is fetched again. */
export function useResource(path, { everyMs } = {}) {
  const [state, setState] = useState({ path: null, data: null, error: null });
  const running = useRef(null);
  const load = useCallback(async () => {
    running.current?.abort();
    if (path === null) return;
    const control = new AbortController();
    running.current = control;
    try {
      const data = await get(path, control.signal);
      setState({ path, data, error: null });
    } catch (error) {
      if (error.name === "AbortError") return;
      setState((was) => ({ path, data: was.path === path ? was.data : null, error }));
    }
  }, [path]);
  useEffect(() => {
    load();
    const stop = onReturn(load);
    return () => { stop(); running.current?.abort(); };
  }, [load]);
  useEffect(() => {
    if (!everyMs) return undefined;
    const timer = setInterval(() => {
      if (!document.hidden && connection.get() === "ok") load();
    }, everyMs);
    return () => clearInterval(timer);
  }, [everyMs, load]);
  const own = state.path === path;
  const data = own ? state.data : null;
  const error = own ? state.error : null;
  return { data, error, loading: path !== null && data === null && error === null, reload: load };
}

export const kbPath = (kb, ...rest) => ["v1/kb", kb,
  ...rest].map((part, at) => (at ? encodeURIComponent(part) : part)).join("/");
