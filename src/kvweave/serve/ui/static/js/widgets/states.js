// What a page shows while it has nothing to show: loading, empty, failed.
import { html } from "../html.js";
import { connection } from "../session.js";
import { Icon } from "./icons.js";

export const Loading = ({ what, lines = 4 }) => html`<div class="skeleton" role="status"
  aria-label=${`Loading ${what}`}>
  ${Array.from({ length: lines }, () => html`<span></span>`)}</div>`;

export const Empty = ({ icon, title, children }) => html`<div class="empty">
  ${icon && html`<${Icon} name=${icon} />`}<h2>${title}</h2>${children}</div>`;

/** An error with the way out. */
export function Failure({ error, retry, what }) {
  const [words, icon] = wordsFor(error);
  return html`<div class="notice bad" role="alert"><${Icon} name=${icon} />
    <div class="stack grow"><p><strong>${what ? `${what}: ` : ""}</strong>${words}</p>
      ${retry && html`<div><button class="small" onClick=${retry}>
        <${Icon} name="retry" />Try again</button></div>`}</div></div>`;
}

const LOST = "The server does not answer. It may be restarting; this page keeps trying and goes "
  + "on by itself.";

function wordsFor(error) {
  if (error.status === 0) return [connection.get() === "lost" ? LOST : error.message, "offline"];
  if (error.status === 401) return ["Your key is missing or no longer valid. Sign in again.",
    "lock"];
  if (error.status === 429) return [`${error.message} Wait a moment and try again.`, "warning"];
  return [error.message, "warning"];
}

/** A resource of `useResource`: its skeleton, its failure, or what `children(data)` makes of it. */
export function Fetched({ resource, what, lines, children }) {
  const { data, error, loading, reload } = resource;
  if (loading) return html`<${Loading} what=${what} lines=${lines} />`;
  if (data === null) return error && html`<${Failure} error=${error} retry=${reload} />`;
  return html`${error && error.status !== 0 && html`<${Failure} error=${error} retry=${reload} />`}
    ${children(data)}`;
}
