// One chunk: its text, where its KV lies, who stands beside it and what resembles it.
import { html } from "../html.js";
import { kbPath, useResource } from "../api.js";
import { bytes, plural } from "../format.js";
import { Icon } from "./icons.js";
import { Fetched } from "./states.js";

/** `open(chunkId)` shows another one. */
export function ChunkView({ kb, id, open }) {
  const chunk = useResource(kbPath(kb, "chunks", id));
  return html`<${Fetched} resource=${chunk} what="the chunk" lines=${7}>
    ${(data) => html`<article class="chunk stack">
    <header class="stack tight"><h3>${data.title || data.document_title || "Untitled"}</h3>
      <p class="row tiny quiet num"><span>part ${data.index + 1}</span><span>
        ${plural(data.tokens, "token")}</span>
        <span>in ${plural(data.asked ?? 0, "prompt")}</span>
          <code title="Its id: the hash of its tokens">${data.id.slice(0, 12)}</code></p></header>
    <div class="chunk-text" tabindex="0" role="group" aria-label="Text of the chunk">${data.text}
      </div>
    <p class="row small">${Object.entries(data.kv ?? {}).length
      ? Object.entries(data.kv).map(([tier, size]) => html`<span
        class="chip good">KV on ${tier} · ${bytes(size)}</span>`)
      : html`<span class="chip">no KV stored yet</span>`}</p>
    <div class="row between"><button class="small" disabled=${!data.previous}
      onClick=${() => open(data.previous)}><${Icon} name="left" />Before</button>
      <button class="small" disabled=${!data.next} onClick=${() => open(data.next)}>Behind<${Icon}
        name="right" /></button></div>
    ${data.neighbours?.length > 0 && html`<section class="stack tight"><h3>Most alike</h3>
      <ul class="plain stack tight">
      ${data.neighbours.map((each) => html`<li class="row between">
        <button class="link cut" onClick=${() => open(each.id)}>${each.title || "Untitled"}</button>
        <span class="tiny faint num">${each.score.toFixed(3)}</span></li>`)}</ul></section>`}
  </article>`}<//>`;
}
