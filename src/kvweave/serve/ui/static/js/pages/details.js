// Details of an answer: its passages, every token, a replay through the layers, its time and price.
import { cls, html, useEffect, useMemo, useRef, useState } from "../html.js";
import { useResource } from "../api.js";
import { ago, bytes, count, ms, nats, percent, plural, timesOf, wayWords } from "../format.js";
import { Markdown } from "../markdown.js";
import { link } from "../router.js";
import { Gantt } from "../widgets/gantt.js";
import { Icon } from "../widgets/icons.js";
import { Beside, score } from "../widgets/messages.js";
import { Empty, Failure, Loading } from "../widgets/states.js";
import { TimesBar } from "../widgets/times_bar.js";
import { STATES, STATE_WORDS, TokensBar } from "../widgets/tokens_bar.js";
import { stateName, TokenView } from "../widgets/token_view.js";

export function Details({ args: [id] }) {
  const answer = useResource(id ? `v1/answers/${encodeURIComponent(id)}` : null);
  if (!id) return html`<${Answers} />`;
  if (answer.loading) return html`<div class="page"><h1 tabindex="-1">Details</h1>
    <${Loading} what="the details" lines=${9} /></div>`;
  if (answer.error?.status === 404) {
    return html`<div class="page"><h1 tabindex="-1">Details</h1>
      <${Empty} icon="details" title="No longer kept"><p>${answer.error.message}</p>
      <div class="row"><a class="button" href=${link("answer")}>Answers that are kept</a>
        <a class="button" href=${link("chat")}>Back to the chat</a></div><//></div>`;
  }
  if (!answer.data) return html`<div class="page"><h1 tabindex="-1">Details</h1>
    <${Failure} error=${answer.error} retry=${answer.reload} /></div>`;
  return html`<${Answer} key=${id} answer=${answer.data} />`;
}

/** Answers that can still be looked into. */
function Answers() {
  const answers = useResource("v1/answers");
  return html`<div class="page stack wide"><h1 tabindex="-1">Answers that are kept</h1>
    ${answers.loading ? html`<${Loading} what="answers" />` : answers.data === null
      ? html`<${Failure} error=${answers.error} retry=${answers.reload} />`
    : answers.data.answers.length === 0 ? html`<${Empty} icon="details" title="None yet">
      <p>Ask something, then come back.</p><a class="button primary"
      href=${link("chat")}>To the chat</a><//>`
    : html`<div class="card scroll-x" tabindex="0" role="group" aria-label="Answers"><table><thead>
      <tr><th>Question</th><th>Knowledge base</th><th>How</th><th class="end">First token</th>
      <th class="end">Prompt</th><th>When</th></tr></thead>
      <tbody>${answers.data.answers.map((each) => html`<tr key=${each.id}><td>
        <a href=${link("answer", each.id)}>${each.question.slice(0, 90)}</a></td><td>
        ${each.kb ?? "–"}</td><td>${wayWords(each.strategy, each.ratio)}</td>
        <td class="end num">${ms(each.ttft_ms)}</td><td class="end num">${count(each.prompt_tokens)}
          </td><td class="quiet">${ago(each.created)}</td></tr>`)}</tbody></table></div>`}</div>`;
}

function Answer({ answer }) {
  const [looked, setLooked] = useState(null);
  const [step, setStep] = useState(null); // null: as it ended; else a step of the replay
  const [focus, setFocus] = useState(null);
  const parts = useMemo(() => partsOf(answer), [answer]);
  const steps = useMemo(() => stepsOf(answer), [answer]);
  const { explain } = answer;
  return html`<div class="details">
    <header class="details-head stack tight"><p class="row small"><a href=${link("chat")}>
      <${Icon} name="left" />Chat</a><span class="faint">${answer.model}
      ${answer.kb ? ` · ${answer.kb}` : ""} · ${ago(answer.created)}</span></p>
      <h1 tabindex="-1">${answer.question}</h1></header>
    <div class="details-grid">
      <section class="passages stack" aria-labelledby="passages-title">
        <h2 id="passages-title">Passages</h2>
        <${Passages} answer=${answer} parts=${parts} go=${(part) => setFocus({ part })} /></section>
      <section class="tokens-card card" aria-labelledby="tokens-title">
        <header><h2 id="tokens-title">Tokens</h2><${Legend} replaying=${step !== null} /></header>
        <${Replay} steps=${steps} step=${step} setStep=${setStep} answer=${answer} />
        <${Inspector} answer=${answer} parts=${parts} at=${looked} />
        <${TokenView} tokens=${answer.tokens} parts=${parts} look=${setLooked} looked=${looked}
          replay=${step === null ? null : steps[step]} focus=${focus} />
      </section>
      <div class="figures stack"><${Figures} answer=${answer} />
        <section class="card"><h2>Timeline</h2>
          ${answer.timeline.length ? html`<${Gantt} timeline=${answer.timeline}
          firstTokenMs=${timesOf(explain.timeline_ms).first} />`
          : html`<p class="small faint">No times were kept.</p>`}</section>
        ${answer.layers.length > 0 && html`<section class="card"><h2>Layer by layer</h2>
          <${Layers} layers=${answer.layers} at=${step === null ? null : steps[step].layer} />
          </section>`}
        ${explain.decision && html`<section class="card"><h2>What else was considered</h2>
          <${Options} decision=${explain.decision} /></section>`}
        <section class="card"><h2>Answer</h2><${Markdown} text=${answer.answer} /></section></div>
    </div></div>`;
}

// ---- parts of the prompt -----------------------------------------------------------------------

function partsOf({ tokens, sources, explain }) {
  const bySpan = new Map((sources ?? []).map((source) => [source.span?.[0], source]));
  const chunks = new Map((explain.chunks ?? []).map((chunk) => [chunk.start, chunk]));
  let number = 0;
  return tokens.parts.filter((part) => part.end > part.start).map((part) => {
    const titles = { preamble: "Preamble", history: "History", question: "Question" };
    if (part.name !== "chunk") return { ...part, title: titles[part.name] ?? part.name };
    number += 1;
    const source = bySpan.get(part.start) ?? (sources ?? []).find(
      (each) => each.chunk === part.chunk);
    const chunk = chunks.get(part.start);
    const title = `${source?.cited_as ?? number}. ${source?.title || "Passage"}`;
    if (!chunk) return { ...part, title, source: source };
    const note = chunk.state === "reused" && chunk.recomputed
      ? `${percent(chunk.recomputed / chunk.tokens)} recomputed` : chunk.state;
    return { ...part, title, source, chunk, state: chunk.state === "reused" && chunk.recomputed
      ? "recomputed" : chunk.state, note };
  });
}

const WHY = { absent: "no KV was stored yet",
  "not in the knowledge tree": "never stood here before" };
const whyWords = (why) => WHY[why] ?? why;

function Passages({ answer, parts, go }) {
  const shown = parts.map((part, at) => ({ part, at })).filter(({ part }) => part.name === "chunk");
  if (!shown.length) return html`<p class="small quiet">No passages were in this prompt.</p>`;
  return html`<ol class="plain stack tight">${shown.map(({ part, at }) => html`<li>
    <button class="passage" onClick=${() => go(at)}>
    <span class="row between"><strong class="cut">${part.title}</strong></span>
    <span class="tiny quiet summary">${part.summary}</span>
    <span class="tiny quiet num row">${part.source && html`<span>score ${score(part.source)}
      </span>`}<span>${plural(part.end - part.start, "token")}</span>
      ${part.chunk?.tier && html`<span>from ${part.chunk.tier}</span>`}</span>
    <${TokensBar} tokens=${countStates(answer.tokens.states, part.start, part.end)} />
    ${part.chunk?.why && html`<span class="tiny warn-text">computed: ${whyWords(part.chunk.why)}
      </span>`}</button></li>`)}</ol>`;
}

function countStates(states, start, end) {
  const counts = { exact: 0, reused: 0, recomputed: 0, computed: 0 };
  for (let at = start; at < end; at++) counts[stateName(states[at])] += 1;
  return counts;
}

const Legend = ({ replaying }) => html`<ul class="plain row tiny quiet legend" aria-label="Colours">
  ${replaying
  ? html`<li class="row"><span class="dot recomputed"></span>chosen</li><li class="row">
    <span class="dot fresh"></span>recomputed so far</li><li class="row">
    <span class="dot computed"></span>computed so far</li><li class="row">
    <span class="dot left-early"></span>left early</li>`
  : STATES.map((state) => html`<li class="row" title=${STATE_WORDS[state]}>
    <span class=${`dot ${state}`}></span>${state}</li>`)}</ul>`;

// ---- one token ---------------------------------------------------------------------------------

function Inspector({ answer, parts, at }) {
  const ranks = useMemo(() => {
    const scored = (answer.tokens.scores ?? []).filter((each) => each !== null
      && each !== undefined);
    return scored.sort((a, b) => b - a);
  }, [answer]);
  if (at === null) return html`<p class="inspector tiny faint"
    role="status">Point at a token, or step through them with the arrow keys.</p>`;
  const state = stateName(answer.tokens.states[at]);
  const own = answer.tokens.scores?.[at];
  const part = parts.find((each) => at >= each.start && at < each.end);
  const above = own === null || own === undefined ? null
    : (ranks.findIndex((each) => each <= own) + 1) / ranks.length;
  return html`<p class="inspector tiny" role="status"><code>
    ${JSON.stringify(answer.tokens.texts[at])}</code> <span class="num faint">#${at}</span>
    <span class="row"><span class=${`dot ${state}`}></span><strong>${state}</strong></span>
      ${above !== null && html`<span class="num">score ${own.toPrecision(3)}, top ${percent(above)}
      </span>`}
    <span class="quiet">${reason(answer, part, state)}</span></p>`;
}

const EXACT_WORDS = "This passage stood behind the same text before: "
  + "its KV is the one of a full prefill.";

function reason({ explain, selection }, part, state) {
  if (!part) return "";
  if (part.name === "preamble") return state === "exact"
    ? "Stands in front of all passages: always exact."
    : "Stands in front of all passages; it was not stored yet.";
  if (part.name === "question") return "The question is always computed.";
  if (part.name === "history") return state === "exact" ? "Said before, and its KV was kept."
    : "Said before; its KV was not kept.";
  if (state === "exact") return EXACT_WORDS;
  if (state === "computed") return part.chunk?.why ? `Computed: ${whyWords(part.chunk.why)}.`
    : "No stored KV was used for this passage.";
  const where = selection?.layers?.length ? ` in layer${selection.layers.length > 1 ? "s"
    : ""} ${runs(selection.layers)}` : "";
  if (state === "recomputed") {
    const by = selection?.selector ?? explain.strategy;
    const share = percent(explain.ratio);
    return `Chosen by ${by}: among the ${share} that matter most for this question${where}.`;
  }
  return explain.ratio > 0 ? `Below the cut of ${percent(
    explain.ratio)}: its stored KV was good enough.`
    : "Stored KV as it is: this strategy recomputes nothing.";
}

/** 5,6,7,9 → 5–7, 9 */
function runs(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const out = [];
  for (const n of sorted) {
    const last = out.at(-1);
    if (last && n === last[1] + 1) last[1] = n;
    else out.push([n, n]);
  }
  return out.map(([a, b]) => (a === b ? a : `${a}–${b}`)).join(", ");
}

// ---- replay ------------------------------------------------------------------------------------

/** What is seen at each step: stored KV, the choice, one step per layer. */
function stepsOf({ layers, tokens, selection, explain }) {
  if (!layers.length) return [];
  const chosen = count([...tokens.states].filter((state) => state === "n").length);
  const none = new Set();
  const scored = selection?.layers?.length
    ? ` by what the question looks at in layer${selection.layers.length > 1 ? "s"
    : ""} ${runs(selection.layers)}` : "";
  const steps = [
    { phase: "load", done: 0, left: none, layer: null,
      words: "Stored KV of the passages is turned to its places." },
    { phase: "select", done: 0, left: none, layer: null,
      words: `${chosen} rows are chosen (${selection?.selector ?? explain.strategy}, ${percent(
      explain.ratio)})${scored}.` },
  ];
  // those that the question looks at least leave first; see fuse/taper.py
  const wanted = (at) => tokens.scores?.[at] ?? 0;
  const leaving = [...tokens.states].flatMap((state, at) => (state === "n" ? [at] : [])).sort(
    (a, b) => wanted(a) - wanted(b));
  let left = none;
  layers.forEach((each, at) => {
    const took = each.ended_ms === null ? "" : ` in ${ms(each.ended_ms - each.started_ms)}`;
    const words = `Layer ${each.layer}: ${plural(each.rows, "row")} computed${took}.${each.left_rows
      ? ` ${plural(each.left_rows, "row")} leave here.` : ""}`;
    steps.push({ phase: "layer", done: (at + 1) / layers.length, left, layer: each.layer, words });
    if (each.left_rows) left = new Set(leaving.slice(0, left.size + each.left_rows));
  });
  return steps;
}

function Replay({ steps, step, setStep, answer }) {
  const [playing, setPlaying] = useState(false);
  const timer = useRef(0);
  useEffect(() => {
    if (!playing) return undefined;
    timer.current = setInterval(() => setStep((at) => {
      if (at >= steps.length - 1) { setPlaying(false); return at; }
      return at + 1;
    }), steps.length > 20 ? 260 : 420);
    return () => clearInterval(timer.current);
  }, [playing, steps]);
  if (!steps.length) return html`<p class="small faint replay-none">
    ${answer.explain.tokens.reused + answer.explain.tokens.recomputed > 0
    ? "No times per layer were kept, so there is no replay."
    : "Nothing was fused here, so there is no replay through the layers."}</p>`;
  const play = () => {
    if (playing) { setPlaying(false); return; }
    if (step === null || step >= steps.length - 1) setStep(0);
    setPlaying(true);
  };
  const move = (event) => { setPlaying(false); setStep(Number(event.target.value)); };
  return html`<div class="replay"><button class="primary small" onClick=${play}>
    <${Icon} name=${playing ? "pause" : "play"} />${playing ? "Pause" : "Replay"}</button>
    <input type="range" min="0" max=${steps.length - 1} value=${step ?? steps.length - 1}
      onInput=${move} aria-label="Step of the replay"
      aria-valuetext=${step === null ? "as it ended" : steps[step].words} />
    ${step !== null && html`<button class="small"
      onClick=${() => { setPlaying(false); setStep(null); }}>Show the outcome</button>`}
    <p class="small quiet replay-words">${step === null
      ? "Step through loading, choosing and recomputing, layer by layer." : steps[step].words}
      </p></div>`;
}

// ---- figures -----------------------------------------------------------------------------------

function Figures({ answer }) {
  const { explain } = answer;
  const all = Object.values(explain.tokens).reduce((a, b) => a + b, 0);
  const computed = explain.tokens.recomputed + explain.tokens.computed;
  const times = timesOf(explain.timeline_ms);
  const full = explain.full_ms;
  const loaded = Object.entries(explain.loaded_bytes ?? {});
  return html`<section class="card stack" aria-labelledby="figures-title">
    <h2 id="figures-title">This answer beside a full prefill</h2>
    <table class="beside num"><thead><tr><td></td><th class="end">
      ${wayWords(explain.strategy, explain.ratio)}</th>
      <th class="end">full prefill</th></tr></thead><tbody>
      <tr><th scope="row">Loading and computing</th><td class="end"><strong>
        ${ms(times.prompt)}</strong></td>
        <td class="end">${full ? html`≈ ${ms(full)} <span class="faint">estimate</span>`
        : html`<span class="faint">not measured</span>`}</td></tr>
      <tr><th scope="row">Tokens computed</th><td class="end">${count(computed)}</td>
        <td class="end">${count(all)}</td></tr>
      <tr><th scope="row">Work, all layers</th><td class="end">${percent(explain.work)}</td>
        <td class="end">100 %</td></tr></tbody></table>
    <div class="timing-rows tiny faint num"><${Beside} times=${times} full=${full}
      tokens=${explain.tokens} /></div>
    <${TokensBar} tokens=${explain.tokens} legend=${true} />
    <h3>Where its time went</h3><${TimesBar} times=${times} />
    <dl class="facts small num">
      <dt>First token</dt><dd>${ms(times.first)} after it was asked</dd>
      ${explain.decision && html`<dt>Price by the plan</dt><dd>
        ${ms(explain.decision.predicted_ms)}, took ${ms(explain.decision.actual_ms)}</dd>`}
      <dt>Loaded</dt><dd>${loaded.length ? loaded.map(
        ([tier, size]) => `${bytes(size)} from ${tier}`).join(", ") : "nothing"}</dd>
      ${explain.encoding && html`<dt>KV stored as</dt><dd>${explain.encoding}</dd>`}
      ${explain.way && html`<dt>Prefill</dt><dd>${explain.way}</dd>`}
      ${explain.left_out > 0 && html`<dt>Left out</dt><dd>
        ${plural(explain.left_out, "passage")} that the history holds</dd>`}
      <dt>Whole answer</dt><dd>${ms(explain.timeline_ms.queue + explain.timeline_ms.total)}</dd>
      ${explain.copies && html`<dt>Copied</dt><dd>${count(explain.copies.copied)} of ${plural(
        answer.completion_tokens, "token")} of the answer;${" "}
        ${count(explain.copies.drafted)} guessed from what it read</dd>`}
      ${explain.audit && html`<dt>Audit</dt><dd>${auditWords(explain.audit)}</dd>`}</dl>
    ${explain.why && html`<p class="small notice">${explain.why}</p>`}
    <p class="small"><a href=${link("cache")}>Cache and memory in detail</a></p></section>`;
}

function auditWords(audit) {
  const whole = audit.chosen ? "This answer will be computed in full when nothing else is to do"
    : "This answer is not checked";
  if (!audit.answers) return `${whole}. None of its kind was yet.`;
  const moved = audit.kl === null ? "" : `, ${nats(audit.kl)} nats from full prefill on average`;
  return `${whole}. Of its kind ${plural(audit.answers, "answer")} were: ${plural(audit.flips,
    "first token")} changed${moved}.`;
}

/** What was priced, as a table; what could not be, in a line for each reason. */
function Options({ decision }) {
  const priced = decision.options.filter((option) => option.predicted_ms !== null).sort(
    (a, b) => a.predicted_ms - b.predicted_ms);
  const others = Map.groupBy(decision.options.filter((option) => option.predicted_ms === null),
    (option) => option.reason);
  return html`<div class="stack tight"><div class="scroll-x" tabindex="0" role="group"
    aria-label="Options of the plan">
    <table class="small"><thead><tr><th>Option</th><th class="end">Price</th>
      <th class="end">Rows</th><th>Why</th></tr></thead>
    <tbody>${priced.map((option) => html`<tr class=${cls(option.name === decision.chosen
      && "chosen")}>
      <td>${option.name}${option.ratio ? ` ${percent(option.ratio)}`
        : ""} ${option.name === decision.chosen && html`<span class="chip accent">taken</span>`}
        </td>
      <td class="end num">${ms(option.predicted_ms)}</td><td class="end num">${count(option.rows)}
        </td>
      <td class="quiet">${option.reason}</td></tr>`)}</tbody></table></div>
    ${[...others].map(([reason, options]) => html`<p class="tiny faint">
      ${plural(options.length, "other")} ${reason}: ${options.map(
      (option) => option.name.replace("fused ", "")).join(", ")}</p>`)}</div>`;
}

/** One line per layer: waiting for its KV, computing, how many rows. */
function Layers({ layers, at }) {
  const timed = layers.every((each) => each.started_ms !== null && each.ended_ms !== null);
  const first = timed ? Math.min(...layers.map((each) => each.started_ms)) : 0;
  const last = timed ? Math.max(...layers.map((each) => each.ended_ms)) : 1;
  const most = Math.max(...layers.map((each) => each.rows), 1);
  const share = (from, to) => (100 * (to - from)) / Math.max(last - first, 1e-9);
  const bar = (name, from, to) => html`<span class=${`span ${name}`}
    style=${{ left: `${share(first, from)}%`, width: `max(1px, ${share(from, to)}%)` }}></span>`;
  return html`<figure class="layers"><figcaption class="tiny faint">
    ${timed ? html`<span class="dot reused"></span> waiting for stored KV <span
    class="dot computed"></span> computing, ${ms(first)} to ${ms(last)}; right: rows`
    : "rows by layer; times were not kept for this answer"}</figcaption>
    <div role="img" aria-label=${`${layers.length} layers; rows from ${count(
      layers[0].rows)} to ${count(layers.at(-1).rows)}`}>
      ${layers.map((each) => html`<div class=${cls("layer", each.layer === at && "now")}
      title=${`layer ${each.layer}: ${each.rows} rows${timed
      ? `, ${ms(each.ended_ms - each.started_ms)}` : ""}`}>
      <span class="tiny num faint">${each.layer}</span><div class="track">
        ${timed && html`${bar("reused", each.started_ms, each.loaded_ms ?? each.started_ms)}
        ${bar("computed", each.loaded_ms ?? each.started_ms, each.ended_ms)}`}</div>
      <span class="rows-bar"><span style=${{ width: `${(100 * each.rows) / most}%` }}></span></span>
        </div>`)}</div></figure>`;
}
