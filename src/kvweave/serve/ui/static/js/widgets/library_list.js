// Documents of a knowledge base and their chunks, in a narrow place.
import { html, useState } from "../html.js";
import { kbPath, useResource } from "../api.js";
import { count, plural } from "../format.js";
import { link } from "../router.js";
import { Empty, Fetched } from "./states.js";
import { UploadBox } from "./upload_box.js";

export function LibraryList({ kb, open }) {
  const [shown, setShown] = useState(null);
  const documents = useResource(kb && `${kbPath(kb, "documents")}?limit=500`);
  if (!kb) return html`<${Empty} icon="book" title="No knowledge base">
    <p>Choose one below the question, or <a href=${link("documents")}>make one</a>.</p><//>`;
  return html`<div class="stack"><${UploadBox} kb=${kb} compact=${true} done=${documents.reload} />
    <${Fetched} resource=${documents} what="documents" lines=${8}>
      ${({ data }) => html`<p class="tiny faint num">${plural(data.length, "document")} in ${kb}</p>
      <ul class="plain library">${data.map((each) => html`<li key=${each.id}>
        <button class="library-row" aria-expanded=${shown === each.id}
          onClick=${() => setShown(shown === each.id ? null : each.id)}><span class="cut">
          ${each.title || each.source}</span><span class="tiny faint num">${count(each.chunks)}
          </span></button>
        ${shown === each.id && html`<${Chunks} kb=${kb} document=${each.id} open=${open} />`}
          </li>`)}</ul>`}<//></div>`;
}

function Chunks({ kb, document, open }) {
  const resource = useResource(kbPath(kb, "documents", document));
  return html`<${Fetched} resource=${resource} what="chunks" lines=${2}>
    ${({ pieces }) => html`<ul class="plain stack tight chunks-of">
    ${pieces.map((chunk) => html`<li><button class="link cut" onClick=${() => open(chunk.id)}>
      ${chunk.heading || `Part ${chunk.index + 1}`}</button>
      <span class="tiny faint num">${plural(chunk.tokens, "token")}
        ${chunk.asked ? ` · asked ${chunk.asked}×` : ""} · <code>${chunk.id.slice(0, 8)}
        </code></span><p class="tiny quiet summary">${chunk.summary}</p></li>`)}</ul>`}<//>`;
}
