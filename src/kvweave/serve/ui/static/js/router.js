// Routes live behind the #, so the server has one page and a reload stays where it was.
import { makeStore } from "./store.js";

let replaced = false;
const read = () => location.hash.replace(/^#\/?/, "").split("/").map((part) => {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a % that stands for itself
  }
});

export const route = makeStore(read());
addEventListener("hashchange", () => {
  replaced = false;
  route.set(read());
});

export const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;
export function go(...parts) { location.hash = link(...parts); }
/** Like `go`, and the back button does not return to where this was. */
export function replace(...parts) {
  history.replaceState(null, "", link(...parts));
  replaced = true;
  route.set(read());
}
/** Whether the route was last replaced, not walked to. */
export const wasReplaced = () => replaced;
