// System: the queue, the batch, tokens per second, memory.
import { html } from "../html.js";
import { useResource } from "../api.js";
import { bytes, clock, count, percent } from "../format.js";
import { hasSeveral, info, ofModel, useModel } from "../session.js";
import { useStore } from "../store.js";
import { Columns, Curves } from "../widgets/charts.js";
import { ModelPicker } from "../widgets/model_picker.js";
import { Fetched } from "../widgets/states.js";
import { short, timed } from "./cache.js";

export function System() {
  const hello = useStore(info);
  const model = useModel();
  const stats = useResource(ofModel("v1/stats"), { everyMs: 1000 });
  return html`<div class="page stack wide"><header class="page-head"><div>
    <h1 tabindex="-1">System</h1><p class="quiet small">
    ${model.name} · context ${count(model.context)} tokens · kvweave ${hello.version}
    </p></div><${ModelPicker} shown=${true} /></header>
    <${Fetched} resource=${stats} what="the system" lines=${8}>${({ now, totals, series }) => html`
      <dl class="tiles four card num"><${Tile} name="Running" value=${count(now.running)} />
        <${Tile} name="Waiting" value=${count(now.waiting)} />
        <${Tile} name="In the batch" value=${count(now.batch)} />
        <${Tile} name="Tokens / s" value=${now.tokens_per_s.toFixed(1)} />
        <${Tile} name="Answers so far" value=${count(totals.answers)} />
        <${Tile} name="Process memory" value=${bytes(now.rss_bytes)} />
          <${Tile} name="Exact KV in the pool" value=${bytes(now.device_bytes)} />
          <${Tile} name="Exact KV in host memory" value=${bytes(now.host_bytes)} /></dl>
      ${hasSeveral() && html`<p class="tiny faint">
        Batch, exact KV and pages are those of ${model.name}; the rest is of all models together.
        </p>`}
      <div class="grid two"><section class="card"><header><h2>Tokens per second</h2>
        <span class="tiny faint">last 30 minutes</span></header>
        <${Curves} label="Tokens per second over the last 30 minutes"
        series=${[timed("tokens per second", "exact", series, "tokens_per_s")]} lowY=${0}
        formatY=${short} formatX=${hm} time=${true} fill=${true} /></section>
        <section class="card"><header><h2>Answers</h2>
          <span class="tiny faint">last 30 minutes</span></header>
          <${Columns} label="Answers over the last 30 minutes"
          series=${[timed("answers", "computed", series, "answers")]} formatY=${short}
          formatX=${hm} /></section></div>
      ${now.pages && html`<section class="card"><header><h2>Pages of the engine</h2>
        <span class="small num quiet">${count(now.pages.used)} of ${count(now.pages.total)}
        </span></header>
        <div class="bar thick" role="progressbar" aria-label="Pages in use" aria-valuemin="0"
          aria-valuemax="100" aria-valuenow=${Math.round(
          (100 * now.pages.used) / Math.max(now.pages.total, 1))}>
          <span class="exact" style=${{ width: `${(100 * now.pages.used) / Math.max(now.pages.total,
          1)}%` }}></span></div><p class="tiny faint num">
          ${percent(now.pages.used / Math.max(now.pages.total,
          1))} in use by answers and the knowledge tree</p></section>`}
      <p class="small quiet">For machines: <a href="metrics">/metrics</a>, <a
        href="healthz">/healthz</a>, <a href="openapi.json">/openapi.json</a>.</p>`}<//></div>`;
}

const hm = (seconds) => clock(seconds).slice(0, 5);
const Tile = ({ name, value }) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`;
