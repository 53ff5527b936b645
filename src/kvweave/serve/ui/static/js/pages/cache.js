// Cache: what is kept where, how often it helped, what went.
import { html } from "../html.js";
import { kbPath, useResource } from "../api.js";
import { bytes, clock, count, dataRatio, percent, plural } from "../format.js";
import { link } from "../router.js";
import { hasSeveral, ofModel, settings, useModel } from "../session.js";
import { useStore } from "../store.js";
import { Bars, Columns, Curves } from "../widgets/charts.js";
import { KnowledgeTree } from "../widgets/knowledge_tree.js";
import { ModelPicker } from "../widgets/model_picker.js";
import { Empty, Fetched } from "../widgets/states.js";

export function Cache() {
  useModel();
  const stats = useResource(ofModel("v1/stats"), { everyMs: 2000 });
  const ofAll = hasSeveral() ? ", all models" : "";
  return html`<div class="page stack wide"><header class="page-head"><div>
    <h1 tabindex="-1">Cache</h1>
    <p class="quiet small">Where what was computed for passages (chunk KV) is stored, and how often
      it was of use.</p></div><${ModelPicker} shown=${true} /></header>
    <${Fetched} resource=${stats} what="the cache" lines=${10}>
      ${(data) => html`<div class="grid two">
      <section class="card"><header><h2>Tiers</h2><span class="tiny faint">now</span></header>
        <${Tiers} tiers=${data.tiers} /></section>
      <section class="card"><header><h2>Where chunk KV was found</h2>
        <span class="tiny faint">chunks of prompts, since the start${ofAll}</span></header>
        <${Found} totals=${data.totals} /></section>
      <section class="card"><header><h2>Hit rate</h2>
        <span class="tiny faint">chunks found with KV, last 30 minutes${ofAll}</span></header>
        <${Curves} label=${`Hit rate over the last 30 minutes; now ${percent(
        lastOf(data.series.hit_rate))}`} series=${[timed("hit rate", "reused", data.series,
        "hit_rate")]} lowY=${0} highY=${1} formatY=${percent} formatX=${clockOf} time=${true}
        fill=${true} /></section>
      <section class="card"><header><h2>Prompt tokens</h2>
        <span class="tiny faint">by what became of them${ofAll}</span></header>
        <${Columns} label="Prompt tokens by state over the last 30 minutes"
        series=${["exact", "reused", "recomputed",
        "computed"].map((name) => timed(name, name, data.series, name))} formatY=${short}
        formatX=${clockOf} /></section>
      <section class="card"><header><h2>Misses by reason</h2>
        <span class="tiny faint">since the start${ofAll}</span></header>
        <${Misses} misses=${data.misses} degradations=${data.degradations} /></section>
      <${HottestChunks} /></div>
      <section class="card"><header><h2>Evictions</h2>
        <span class="tiny faint">newest first</span></header>
        <${Evictions} evictions=${data.evictions} /></section>`}<//>
    <section class="card"><header><h2>Knowledge tree</h2>
      <span class="tiny faint">exact KV by ordered path from the preamble</span></header>
      <${KnowledgeTree} /></section></div>`;
}

const lastOf = (values) => [...(values ?? [])].reverse().find((value) => value !== null) ?? null;
const clockOf = (seconds) => clock(seconds).slice(0, 5);
export const short = (value) => (value >= 1e6 ? `${Number((value / 1e6).toFixed(1))}M`
  : value >= 1e3 ? `${Number((value / 1e3).toFixed(1))}k` : String(Number(value.toPrecision(3))));

/** One of the series, at its times. */
export function timed(name, className, series, field) {
  return { name, className, points: (series[field] ?? []).map(
    (value, at) => [series.t0 + at * series.step_s, value]) };
}

function Tiers({ tiers }) {
  if (!tiers.length) return html`<${Empty} icon="cache" title="Nothing is open">
    <p>Tiers are shown for knowledge bases that were asked since the start.</p><//>`;
  return html`<ul class="plain stack">${tiers.map((each) => {
    const share = each.capacity && each.bytes !== null ? each.bytes / each.capacity : null;
    return html`<li class="stack tight"><div class="row between"><strong>${each.kb} · ${each.tier}
      </strong><span class="small num quiet">
      ${each.bytes === null ? "shared: keeps its own books" : bytes(each.bytes)}
      ${each.capacity ? ` of ${bytes(each.capacity)}` : ""}</span></div>
      ${share !== null && html`<div class="bar" role="progressbar"
        aria-label=${`${each.kb} ${each.tier}`} aria-valuemin="0" aria-valuemax="100"
        aria-valuenow=${Math.round(100 * share)}>
        <span class="reused" style=${{ width: `max(3px, ${100 * share}%)` }}></span></div>`}
      <p class="tiny faint num">${plural(each.loads, "load")}</p></li>`;
  })}</ul>`;
}

/** Chunks of prompts by the tier that had their KV, since the start. */
function Found({ totals }) {
  const all = Object.values(totals.chunks).reduce((a, b) => a + b, 0);
  if (!all) return html`<p class="small quiet">No prompt with passages yet.</p>`;
  const rows = Object.entries(totals.chunks).sort((a, b) => b[1] - a[1]).map(
    ([tier, value]) => ({ name: tier === "none" ? "none: computed" : tier, value,
    words: `${count(value)} (${percent(dataRatio(value, all))})`,
    className: tier === "none" ? "computed" : "reused" }));
  return html`<${Bars} rows=${rows} label="Chunks of prompts by tier" most=${all} />`;
}

function Misses({ misses, degradations }) {
  const all = [...Object.entries(misses), ...Object.entries(degradations)].filter(
    ([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
  const rows = all.map(([name, value]) => ({ name: name.replaceAll("_", " "), value,
    words: count(value), className: "recomputed" }));
  return rows.length ? html`<${Bars} rows=${rows} label="Misses by reason" />`
    : html`<p class="small quiet">None: every chunk that was wanted had its KV.</p>`;
}

function Evictions({ evictions }) {
  if (!evictions.length) return html`<p
    class="small quiet">Nothing had to go: the tiers have room.</p>`;
  return html`<div class="scroll-x evictions" tabindex="0" role="group" aria-label="Evictions">
    <table class="small"><thead><tr><th>When</th><th>What</th><th>Tier</th>
    <th class="end">Bytes</th><th class="end">Priority</th></tr></thead><tbody>
    ${evictions.slice(0, 40).map((each) => html`<tr><td class="num">${clock(each.at)}</td><td>
      ${each.title || html`<code>${each.chunk.slice(0, 12)}</code>`}
      <span class="tiny faint"> ${each.kb ?? "tree"}</span></td><td>${each.tier}</td>
      <td class="end num">${bytes(each.bytes)}</td><td class="end num">
      ${each.priority === null || each.priority === undefined ? "–" : each.priority.toPrecision(3)}
      </td></tr>`)}</tbody></table></div>`;
}

function HottestChunks() {
  const { kb } = useStore(settings);
  const hottest = useResource(kb && `${kbPath(kb, "hottest")}?limit=10`, { everyMs: 5000 });
  const rows = (hottest.data?.data ?? []).filter((each) => each.asked > 0);
  return html`<section class="card"><header><h2>Hottest chunks</h2><span class="tiny faint">
    ${kb ? `of ${kb}, by prompts they were in` : ""}</span></header>
    ${rows.length ? html`<${Bars} label="Hottest chunks"
      rows=${rows.map((each) => ({ name: html`<a href=${link("documents", kb, "chunk", each.id)}>
      ${each.heading || "Untitled"}</a>`, value: each.asked, words: plural(each.asked, "prompt"),
      className: "exact" }))} />` : html`<p class="small quiet">
      ${kb ? "No chunk was asked for yet." : "Choose a knowledge base in the chat."}</p>`}
      </section>`;
}
