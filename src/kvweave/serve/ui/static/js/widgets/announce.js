// One live region for the whole page: what happened, for those who do not see it.
import { html } from "../html.js";
import { makeStore, useStore } from "../store.js";

const said = makeStore("");

export function announce(words) {
  said.set("");
  setTimeout(() => said.set(words), 60); // the same words twice are read twice
}

export const Announcer = () => html`<div class="sr" role="status" aria-live="polite">
  ${useStore(said)}</div>`;
