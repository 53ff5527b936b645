// Quality: what each strategy costs on this model, what the gate lets through, what the audit
// found.
import { html, useState } from "../html.js";
import { useResource } from "../api.js";
import { count, nats, percent, plural } from "../format.js";
import { ofModel, settings, useModel } from "../session.js";
import { useStore } from "../store.js";
import { Curves } from "../widgets/charts.js";
import { ModelPicker } from "../widgets/model_picker.js";
import { Empty, Fetched } from "../widgets/states.js";

const COLOURS = ["recomputed", "exact", "reused", "computed", "fresh", "sixth", "seventh",
  "eighth"];

export function Quality() {
  const { kb } = useStore(settings);
  useModel();
  const path = ofModel(`v1/quality${kb ? `?kb=${encodeURIComponent(kb)}` : ""}`);
  const quality = useResource(path, { everyMs: 10_000 });
  return html`<div class="page stack wide"><header class="page-head"><div>
    <h1 tabindex="-1">Quality</h1>
    <p class="quiet small">How much the model's choice of words moves when stored passages are
      reused, measured beside computing everything. 0: not at all. “auto” takes only ways that
      stay below the limit.</p>
    <details class="more tiny quiet"><summary>What is measured</summary>The mean KL divergence of the
      next-token distributions to those of full prefill, in nats per token. The limit is the bound;
      what lets a way through is called the gate.</details></div>
    <${ModelPicker} shown=${true} /></header>
    <${Fetched} resource=${quality} what="quality" lines=${8}>
      ${(data) => html`<${Loaded} data=${data} />`}<//></div>`;
}

function Loaded({ data }) {
  if (!data.calibrated) {
    return html`<${Empty} icon="quality" title="This model is not calibrated">
      <p>No curve is known for ${data.model}, so “auto” uses only what is exact. ${data.why}</p><//>
      <${Gate} gate=${data.gate} bound=${data.bound} /><${Audit} audit=${data.audit} />`;
  }
  return html`<${Strategies} data=${data} /><div class="grid two">
    <${Gate} gate=${data.gate} bound=${data.bound} /><${Audit} audit=${data.audit} /></div>`;
}

function Strategies({ data }) {
  const kinds = [...new Set(data.strategies.map((each) => each.kind))];
  const [kind, setKind] = useState(null);
  const shownKind = kind ?? kinds[0];
  const shown = data.strategies.filter((each) => each.kind === shownKind);
  const series = shown.map((each, at) => ({
    name: each.strategy, className: COLOURS[at % COLOURS.length],
      points: each.points.map((point) => [point.ratio, point.kl_nats]),
    band: each.points.every((point) => point.upper !== null && point.upper !== undefined)
      && shown.length <= 3 ? each.points.map((point) => [point.ratio, point.kl_nats, point.upper])
      : null,
  }));
  return html`<section class="card stack"><header><h2>Cost by share recomputed</h2>
    <span class="tiny faint">${data.model}</span></header>
    ${kinds.length > 1 && html`<div class="segments wide-segments" role="group" aria-label="Kind">
      ${kinds.map((each) => html`<button class="small" aria-pressed=${each === shownKind}
      onClick=${() => setKind(each)}>${each ?? "all"}</button>`)}</div>`}
    <${Curves} height=${300} label=${`KL to full prefill by share of rows recomputed, ${plural(
      shown.length, "strategy", "strategies")}; limit ${nats(data.bound)} nats`} series=${series}
      formatX=${percent} formatY=${nats} log=${true}
      lines=${data.bound > 0 ? [{ y: data.bound, label: `limit ${nats(data.bound)}` }] : []} />
    <details class="as-table"><summary class="small">As a table</summary>
      <div class="scroll-x" tabindex="0" role="group" aria-label="Points of the curves">
      <table class="small num"><thead><tr><th>Strategy</th><th class="end">Recomputed</th>
      <th class="end">KL</th><th class="end">Upper</th>
      <th class="end">First token differs</th></tr></thead>
      <tbody>${shown.flatMap((each) => each.points.map((point) => html`<tr><td>${each.strategy}</td>
        <td class="end">${percent(point.ratio)}</td><td class="end">${nats(point.kl_nats)}</td>
        <td class="end">${nats(point.upper)}</td><td class="end">${percent(point.flips)}
        </td></tr>`))}</tbody></table></div></details></section>`;
}

function Gate({ gate, bound }) {
  return html`<section class="card"><header><h2>What “auto” may use</h2>
    <span class="tiny faint num">limit ${nats(bound)} nats per token</span></header>
    ${gate.length === 0
      ? html`<p
      class="small quiet">This depends on how passages are stored: choose a knowledge base in the
        chat to see it.</p>`
      : html`<div class="scroll-x" tabindex="0" role="group" aria-label="Gate">
      <table class="small"><thead><tr><th>Strategy</th><th class="end">From</th><th>Now</th>
        <th>Why</th></tr></thead>
      <tbody>
      ${gate.map((each) => html`<tr><td>${each.strategy}</td><td class="end num">
        ${each.ratio === null || each.ratio === undefined ? "–" : percent(each.ratio)}</td><td>
        <span class=${each.allowed ? "chip good" : "chip"}>${each.allowed ? "open" : "closed"}
        </span></td><td class="quiet">${each.why}</td></tr>`)}</tbody></table></div>`}</section>`;
}

function Audit({ audit }) {
  return html`<section class="card"><header><h2>Shadow audit</h2>
    <span class="tiny faint">fused answers computed exactly in idle time</span></header>
    ${audit.length === 0
      ? html`<p
      class="small quiet">Nothing audited yet. Some fused answers are computed again, exactly, when
        nobody waits.</p>`
      : html`<div class="scroll-x" tabindex="0" role="group" aria-label="Audit">
      <table class="small num"><thead><tr><th>Strategy</th><th class="end">Audited</th>
        <th class="end">KL</th><th class="end">95 % interval</th>
        <th class="end">First token differed</th></tr></thead>
      <tbody>${audit.map((each) => html`<tr><td>${each.strategy} ${percent(each.ratio)}</td>
        <td class="end">${count(each.total)}</td><td class="end">${nats(each.kl)}</td>
        <td class="end">${each.kl_low === null ? "–"
        : `${nats(each.kl_low)} – ${nats(each.kl_high)}`}</td><td class="end">
        ${count(each.flips)} of ${count(each.answers)}</td></tr>`)}</tbody></table></div>`}
        </section>`;
}
