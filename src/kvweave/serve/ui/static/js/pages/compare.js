// Compare: one question through two or three ways, one after another, side by side.
import { changeText, cls, html } from "../html.js";
import { stream } from "../api.js";
import { marked } from "../diff.js";
import { count, ms, nats, soonerBy, times, timesOf, wayWords } from "../format.js";
import { drawMarkdown } from "../markdown.js";
import { link } from "../router.js";
import { namedModel, settings, useModel } from "../session.js";
import { makeStore, useStore } from "../store.js";
import { announce } from "../widgets/announce.js";
import { Icon } from "../widgets/icons.js";
import { KbPicker } from "../widgets/kb_picker.js";
import { RefusedWays } from "../widgets/dial.js";
import { ModelPicker } from "../widgets/model_picker.js";
import { Empty, Failure } from "../widgets/states.js";
import { stageOf, TimesBar, Waiting } from "../widgets/times_bar.js";
import { TokensBar } from "../widgets/tokens_bar.js";

/** Kept while other pages are shown. ways: [{ reuse, ratio, text, done, quality }], answered by
 * `model`, where there are several. */
const state = makeStore({ question: "", chosen: ["full", "auto", "reuse"], ratios: {}, ways: null,
  model: null, busy: false, stage: null, error: null });
const change = (part) => state.set((was) => ({ ...was, ...part }));
const changeWay = (at, part) => state.set((was) => (
  { ...was, ways: was.ways.map((way, i) => (i === at
  ? { ...way, ...(typeof part === "function" ? part(way) : part) } : way)) }));

let control = null;

async function run() {
  const { question, chosen, ratios } = state.get();
  const { kb, k } = settings.get();
  const ways = chosen.map((reuse) => (ratios[reuse] ? { reuse, ratio: ratios[reuse] } : { reuse }));
  const { model } = namedModel();
  change({ ways: ways.map((way) => ({ ...way, text: "", done: null, quality: null })), model,
    busy: true, stage: null, error: null });
  control = new AbortController();
  const body = { messages: [{ role: "user", content: question.trim() }], model, kb, ways,
    max_tokens: 200, ...(k ? { k } : {}) };
  try {
    const hear = (stage) => change({ stage: stageOf(stage, state.get().stage) });
    for await (const event of stream("v1/compare", { body, signal: control.signal, hear })) {
      if (event.done) change({ stage: null });
      if (event.delta !== undefined) changeWay(event.way,
        (way) => ({ text: way.text + event.delta }));
      if (event.done) changeWay(event.way, { done: event.done,
        text: event.done.answer ?? state.get().ways[event.way].text });
      if (event.quality) changeWay(event.way, { quality: event.quality });
    }
    announce("The comparison is complete.");
  } catch (error) {
    if (error.name !== "AbortError") change({ error });
  }
  change({ busy: false });
}

export function Compare() {
  const { question, chosen, ways, model, busy, stage, error } = useStore(state);
  const { kb } = useStore(settings);
  const submit = (event) => { event.preventDefault(); run(); };
  return html`<div class="page stack wide"><header class="page-head"><div>
    <h1 tabindex="-1">Compare</h1>
    <p class="quiet small">The same question, prefilled in different ways, one after another so that
      none slows another.</p></div></header>
    <form class="card stack" onSubmit=${submit}>
      <label class="field">Question<textarea rows="2" value=${question}
      placeholder="What do you want to know?"
      onInput=${(event) => change({ question: event.target.value })}></textarea></label>
      <div class="row top"><${ModelPicker} shown=${true} disabled=${busy} />
        <${KbPicker} shown=${true} withNone=${false} /><${Ways} />
        <span class="grow"></span>
        ${busy ? html`<button type="button" class="align-end" onClick=${() => control?.abort()}>
          <${Icon} name="stop" />Stop</button>`
          : html`<button class="primary align-end" type="submit"
          disabled=${!question.trim() || !kb || chosen.length < 2}>
          <${Icon} name="play" />Run ${chosen.length} ways</button>`}</div>
      ${!kb && html`<p class="small warn-text">Comparing needs passages: <a
        href=${link("documents")}>make a knowledge base</a> first.</p>`}</form>
    ${error && html`<${Failure} error=${error} what="The comparison failed" retry=${run} />`}
    ${ways ? html`<${Outcome} ways=${ways} model=${model} busy=${busy} stage=${stage} />`
      : html`<${Empty} icon="compare" title="Full prefill beside reuse">
      <p>Each way shows its answer, how soon its first word came, how much of the prompt it
        computed, and how far the model's choice of words moved from full prefill, measured on the
        spot.</p><//>`}</div>`;
}

/** Two or three of the strategies. */
function Ways() {
  const { chosen, ratios, busy } = useStore(state);
  const strategies = useModel()?.strategies ?? [];
  const set = (at, name) => change({ chosen: chosen.map((each, i) => (i === at ? name : each)) });
  const setRatio = (name, text) => change({ ratios: { ...ratios,
    [name]: text === "" ? undefined : Math.min(1, Math.max(0, Number(text) / 100)) } });
  return html`${chosen.map((name, at) => {
    const own = strategies.find((each) => each.name === name);
    return html`<div class="way-choice"><label class="field">Way ${at + 1}
      <select value=${name} disabled=${busy} onChange=${(event) => set(at, event.target.value)}>
        ${strategies.map((each) => html`<option key=${each.name} value=${each.name}
          selected=${each.name === name} disabled=${each.name !== name
          && chosen.includes(each.name)}>${wayWords(each.name)}</option>`)}
        <${RefusedWays} shown=${name} /></select></label>
      ${own?.ratio > 0 && html`<label class="field ratio">recompute %<input type="number" min="0"
        max="100" step="1" disabled=${busy} value=${Math.round(100 * (ratios[name] ?? own.ratio))}
        onChange=${(event) => setRatio(name, event.target.value)} /></label>`}
      ${chosen.length > 2 && html`<button type="button" class="bare icon small align-end"
        disabled=${busy} aria-label=${`Leave out way ${at + 1}`}
        onClick=${() => change({ chosen: chosen.filter((_, i) => i !== at) })}>
        <${Icon} name="close" /></button>`}</div>`;
  })}${chosen.length < 3 && html`<button type="button" class="small align-end" disabled=${busy}
    onClick=${() => change({ chosen: [...chosen,
    strategies.map((each) => each.name).find((name) => !chosen.includes(name))] })}>
    <${Icon} name="plus" />Add a way</button>`}`;
}

function Outcome({ ways, model, busy, stage }) {
  const base = ways.find((way) => way.reuse === "full") ?? ways[0];
  // loading and computing alone: each way may have waited for other people's answers
  const timed = ways.map((way) => way.done && timesOf(way.done.explain.timeline_ms));
  const slowest = Math.max(...timed.map((each) => each?.prompt ?? 0));
  const full = timed[ways.findIndex((way) => way.reuse === "full")]?.prompt;
  const current = ways.findIndex((way) => !way.done);
  return html`<div class="ways">${ways.map((way, at) => html`<section
    class=${cls("card way", busy && at === current && "now")}
    aria-label=${wayWords(way.reuse)}>
    <header><h2>${wayWords(way.reuse, way.ratio)}</h2>
      ${way.done?.explain && way.done.explain.strategy !== way.reuse && html`<span class="chip">
      ${wayWords(way.done.explain.strategy, way.done.explain.ratio)}</span>`}</header>
    <div class="way-time"><div class="num">${way.done ? html`<strong class="huge">
      ${ms(timed[at].prompt)}</strong> <span class="small quiet">loading and computing</span> ${full
      && soonerBy(timed[at], full, way.done.explain.tokens) ? html`<span class="chip good">
      ${times(full / timed[at].prompt)} sooner</span>` : null}`
      : busy && at === current && stage && !way.text
      ? html`<${Waiting} stage=${stage} kb=${true} />`
      : html`<span class="small faint" role="status">
      ${busy && at === current ? (way.text ? "answering …" : "prefilling …") : busy
      ? "waiting for its turn" : "not run"}</span>`}</div>
      <div class="bar thick"><span class=${way.reuse === "full" ? "plain-bar" : ""}
        style=${{ width: `${slowest && way.done ? (100 * timed[at].prompt) / slowest : 0}%` }}>
        </span></div>${way.done && html`<${TimesBar} times=${timed[at]} />`}</div>
    <div class="way-answer md">${way === base || !base.done ? drawMarkdown(way.text)
      : drawMarked(way.text, base.text)}</div>
    ${way.done && html`<${Facts} way=${way} isBase=${way === base} />`}</section>`)}</div>
    ${ways.length > 1 && base.done && html`<p class="tiny faint">
      ${model && `Answered by ${model}. `}<mark>Marked words</mark> are not in the answer of ${wayWords(base.reuse)}.</p>`}`;
}

/** An answer whose words that are not in the answer `base` are marked. */
function drawMarked(text, base) {
  const drawn = drawMarkdown(text);
  const marks = marked(textsOf(drawn), textsOf(drawMarkdown(base)))[Symbol.iterator]();
  return changeText(drawn, () => marks.next().value.map(
    (piece) => (piece.differs ? html`<mark>${piece.text}</mark>` : piece.text)));
}

function textsOf(drawn) {
  const texts = [];
  changeText(drawn, (text) => texts.push(text));
  return texts;
}

function Facts({ way, isBase }) {
  const { explain, id } = way.done;
  const computed = explain ? explain.tokens.recomputed + explain.tokens.computed : null;
  return html`<footer class="stack tight">${explain
    && html`<${TokensBar} tokens=${explain.tokens} />`}<dl class="facts small num">
    ${explain && html`<dt>Tokens computed</dt><dd>
      ${count(computed)} of ${count(Object.values(explain.tokens).reduce((a, b) => a + b, 0))}</dd>
      <dt>of them recomputed</dt><dd>${count(explain.tokens.recomputed)}</dd>`}
    <dt title="KL divergence of the next-token distributions">Moved from full prefill</dt><dd>${way.quality ? html`<strong>${nats(way.quality.kl_nats)}
      </strong> nats per token` : isBase && way.reuse === "full" ? "0, by definition"
      : html`<span class="faint">measuring …</span>`}</dd>
    ${way.quality && html`<dt>First token</dt><dd>
      ${way.quality.same_first_token ? "the same" : "another one"}</dd><dt>Measured over</dt><dd>
      ${count(way.quality.positions)} tokens</dd>`}</dl>
    ${id && html`<p><a href=${link("answer", id)}>Details</a></p>`}</footer>`;
}
