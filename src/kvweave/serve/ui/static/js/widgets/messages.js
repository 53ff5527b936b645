// A question and an answer as they stand in a chat.
import { html, useCallback, useEffect, useRef, useState } from "../html.js";
import { kbPath, useResource } from "../api.js";
import { count, ms, plural, soonerBy, times as factor, wayWords } from "../format.js";
import { Markdown } from "../markdown.js";
import { link } from "../router.js";
import { info } from "../session.js";
import { Copy } from "./copy.js";
import { Icon } from "./icons.js";
import { TimesBar, Waiting } from "./times_bar.js";
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
    ${meta.state === "waiting" && html`<${Waiting} stage=${meta.stage} kb=${meta.kb} />`}
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

/** Where the time went, and its prompt beside a full prefill: no waiting on either side. */
function Timing({ meta }) {
  const { times, full_ms: full, tokens, strategy, ratio } = meta;
  const computed = (tokens.recomputed ?? 0) + (tokens.computed ?? 0);
  const all = computed + (tokens.exact ?? 0) + (tokens.reused ?? 0);
  return html`<div class="timing">
    <div class="timing-words small num"><span><strong>${ms(times?.first ?? meta.ttft_ms)}</strong>
      ${" "}to the first token</span>
      ${meta.model && html`<span class="chip">${meta.model}</span>`}
      <span class="chip" title=${strategy}>${wayWords(strategy, ratio)}</span></div>
    ${times && html`<${TimesBar} times=${times} />`}
    <div class="timing-rows tiny faint num">
      ${times && html`<${Beside} times=${times} full=${full} tokens=${tokens} />`}
      <span>${count(all)} tokens</span><${TokensBar} tokens=${tokens} />
      <span></span><span>${count(computed)} computed, ${count(
        all - computed)} taken from the cache</span>
      ${meta.copied > 0 && html`<span></span><span
        title="Guessed from the passages, and checked several at a time: the answer is the same">
        ${count(meta.copied)} of ${plural(meta.completion_tokens, "token")} of the answer copied
        </span>`}</div>
    ${meta.why && html`<p class="tiny faint">${meta.why}</p>`}</div>`;
}

/** Rows of a prompt beside a full prefill of it: bars, and how much sooner it was. */
export function Beside({ times, full, tokens }) {
  if (!full) return html`<span></span><span>full prefill: not measured on this machine yet</span>`;
  const sooner = soonerBy(times, full, tokens);
  const width = (part) => ({ width: `${(100 * part) / Math.max(times.prompt, full)}%` });
  return html`<span>this prompt ${ms(times.prompt)}</span>
    <span class="mine" style=${width(times.prompt)}></span>
    <span>full prefill: about ${ms(full)}</span><span class="full" style=${width(full)}></span>
    <span></span><span title="Loading and computing, beside computing all of it">Neither counts
      waiting; full prefill is an estimate. ${sooner && html`<span class="chip good">
      ${factor(sooner)} sooner</span>`}</span>`;
}
