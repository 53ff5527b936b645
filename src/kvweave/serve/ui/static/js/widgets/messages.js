// A question and an answer as they stand in a chat.
import { html, useCallback, useEffect, useRef, useState } from "../html.js";
import { kbPath, useResource } from "../api.js";
import { count, hasSaved, ms, times, wayWords } from "../format.js";
import { Markdown } from "../markdown.js";
import { link } from "../router.js";
import { info } from "../session.js";
import { Copy } from "./copy.js";
import { Icon } from "./icons.js";
import { TokensBar } from "./tokens_bar.js";

export function UserMessage({ message, busy, resend }) {
  const [draft, setDraft] = useState(null);
  const area = useRef(null);
  useEffect(() => { if (draft !== null) area.current.focus(); }, [draft === null]);
  if (draft !== null) {
    const send = (event) => {
      event.preventDefault();
      if (!draft.trim()) return;
      setDraft(null);
      resend(draft.trim());
    };
    return html`<form class="message user editing stack" onSubmit=${send}
      onKeyDown=${(event) => event.key === "Escape" && setDraft(null)}>
      <label class="sr" for="edited">Edit your question</label>
      <textarea id="edited" ref=${area} rows="3" value=${draft}
        onInput=${(event) => setDraft(event.target.value)}></textarea>
      <div class="row"><button class="primary small" type="submit"
        disabled=${busy}>Ask again</button><button class="small" type="button"
        onClick=${() => setDraft(null)}>Cancel</button>
        <span class="tiny faint">What was said behind it goes.</span></div></form>`;
  }
  return html`<article class="message user" aria-label="You"><div class="bubble">${message.content}
    </div>
    <div class="actions"><button class="bare small" disabled=${busy}
      onClick=${() => setDraft(message.content)}><${Icon} name="edit" />Edit</button>
      <${Copy} text=${message.content} /></div></article>`;
}

export function AnswerMessage({ message, busy, retry, open }) {
  const { content, meta } = message;
  const sources = meta.sources ?? [];
  // the same function until the sources change: blocks that are finished are not drawn again
  const cite = useCallback((number) => {
    const source = sources.find((each) => each.cited_as === number);
    return source && html`<button class="cite" aria-label=${`Source ${number}: ${source.title}`}
      onClick=${() => open(source)}>${number}</button>`;
  }, [meta.sources]);
  const running = meta.state === "waiting" || meta.state === "streaming";
  return html`<article class="message answer" aria-label="Answer" data-state=${meta.state}>
    ${meta.state === "waiting" && html`<p class="waiting" role="status"><span></span><span></span>
      <span></span><span class="sr">Waiting for the first word</span></p>`}
    ${content && html`<${Markdown} text=${content} cite=${cite} />`}
    <${Ending} meta=${meta} content=${content} retry=${retry} busy=${busy} />
    ${sources.length > 0 && html`<${Sources} sources=${sources} kb=${meta.kb} open=${open} />`}
    ${!running && meta.tokens && html`<${Timing} meta=${meta} />`}
    ${!running && html`<div class="actions">${content && html`<${Copy} text=${content} />`}
      <button class="bare small" disabled=${busy} onClick=${retry}>
        <${Icon} name="retry" />Retry</button>
      ${meta.answer && meta.state === "done" && info.get()?.kept_answers > 0 && html`<a class="button bare small"
        href=${link("answer", meta.answer)}><${Icon} name="details" />Details</a>`}</div>`}
  </article>`;
}

function Ending({ meta, content, retry, busy }) {
  if (meta.state === "stopped") return html`<p class="small faint">Stopped.</p>`;
  if (meta.state === "failed") {
    return html`<div class="notice bad" role="alert">
      <${Icon} name=${meta.cut ? "offline" : "warning"} /><div class="stack grow">
      <p>${meta.cut && content
        ? "The connection was lost in mid-answer. What came is above; it is not complete."
        : meta.error}</p>
      <div><button class="small" disabled=${busy} onClick=${retry}>
        <${Icon} name="retry" />Ask again</button></div></div></div>`;
  }
  if (meta.finish === "length") return html`<p
    class="small faint">Cut at the longest answer that is allowed.</p>`;
  if (meta.finish === "repetition") return html`<p
    class="small faint">Ended: it only repeated itself.</p>`;
  return null;
}

function Sources({ sources, kb, open }) {
  const isNamesake = ({ title }) => kb && sources.filter((each) => each.title === title).length > 1;
  return html`<ol class="plain sources" aria-label="Sources">
    ${sources.map((source) => html`<li><button class="source" onClick=${() => open(source)}
    title=${`${source.title} · score ${score(source)}${source.fate ? ` · ${source.fate}` : ""}${
    source.tier ? ` from ${source.tier}` : ""}`}>
    <span class=${`dot ${source.fate ?? ""}`}></span><span class="num">${source.cited_as}</span>
      <span class="cut">${source.title || "Untitled"}</span>
      ${isNamesake(source) && html`<${Part} kb=${kb} chunk=${source.chunk} />`}
      <span class="sr">${source.fate
    ? `, ${source.fate}` : ""}
      </span></button></li>`)}</ol>`;
}

/** Where a passage stands in its document, for those whose names do not tell them apart. */
function Part({ kb, chunk }) {
  const { data } = useResource(kbPath(kb, "chunks", chunk));
  return data && html`<span class="faint">part ${data.index + 1}</span>`;
}

export const score = (source) => (source.score === null || source.score === undefined ? "–"
  : source.score.toFixed(3));

/** Time to the first token, beside what a full prefill would have taken. */
function Timing({ meta }) {
  const { ttft_ms: took, full_ms: full, tokens, strategy, ratio } = meta;
  const most = Math.max(took, full ?? 0);
  const computed = (tokens.recomputed ?? 0) + (tokens.computed ?? 0);
  const all = computed + (tokens.exact ?? 0) + (tokens.reused ?? 0);
  return html`<div class="timing">
    <div class="timing-words small num"><span><strong>${ms(took)}</strong> to the first token</span>
      ${full ? html`<span class="quiet">full prefill: about ${ms(full)} <span
        class="faint">(estimate)</span></span>
        ${hasSaved(tokens) && full > took * 1.05 && html`<span class="chip good">${times(full / took)} sooner</span>`}`
    : html`<span class="faint">full prefill: not measured on this machine yet</span>`}
      ${meta.model && html`<span class="chip">${meta.model}</span>`}
      <span class="chip" title=${strategy}>${wayWords(strategy, ratio)}</span></div>
    <div class="timing-rows tiny faint num">
      ${full && html`<span>this answer</span>
        <span class="mine" style=${{ width: `${(100 * took) / most}%` }}></span>
        <span>full prefill</span><span class="full" style=${{ width: `${(100 * full) / most}%` }}>
          </span>`}
      <span>${count(all)} tokens</span><${TokensBar} tokens=${tokens} />
      <span></span><span>${count(computed)} computed, ${count(
        all - computed)} taken from the cache</span></div>
    ${meta.why && html`<p class="tiny faint">${meta.why}</p>`}</div>`;
}
