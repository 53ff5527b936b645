// Documents: bring in, look through, search, delete.
import { html, useEffect, useState } from "../html.js";
import { get, kbPath, patch, post, remove, useResource } from "../api.js";
import { ago, bytes, count, percent, plural, roughly } from "../format.js";
import { go, link, replace } from "../router.js";
import { info, settings, setSetting } from "../session.js";
import { useStore } from "../store.js";
import { announce } from "../widgets/announce.js";
import { Bars } from "../widgets/charts.js";
import { ChunkView } from "../widgets/chunk_view.js";
import { Confirm } from "../widgets/dialog.js";
import { Icon } from "../widgets/icons.js";
import { knowledgeBases, refreshKbs } from "../widgets/kb_picker.js";
import { Empty, Failure, Fetched, Loading } from "../widgets/states.js";
import { UploadBox } from "../widgets/upload_box.js";

const NAME = /^[A-Za-z0-9][A-Za-z0-9_-]*$/;
const PAGE = 50;

export function Documents({ args: [kb, kind, id] }) {
  const kbs = useStore(knowledgeBases);
  const { kb: usual } = useStore(settings);
  const [failure, setFailure] = useState(null);
  const refresh = () => refreshKbs().then(() => setFailure(null), setFailure);
  useEffect(() => { refresh(); }, []);
  useEffect(() => {
    if (!kb && kbs?.length) replace("documents",
      kbs.some((each) => each.name === usual) ? usual : kbs[0].name);
  }, [kb, kbs]);
  return html`<div class="page stack wide"><header class="page-head"><div>
    <h1 tabindex="-1">Documents</h1>
    <p class="quiet small">What answers come from. Each is cut into passages (chunks). The model reads
      a passage once and what it computed (its KV) is stored.</p></div>
      ${kbs?.length > 0 && html`<${NewKb} kbs=${kbs} />`}</header>
    ${failure && html`<${Failure} error=${failure} retry=${refresh} />`}
    ${kbs === null && !failure && html`<${Loading} what="knowledge bases" />`}
    ${kbs !== null && kbs.length === 0 && !kb && html`<${FirstKb} />`}
    ${kbs !== null && (kbs.length > 0 || kb) && html`<${Tabs} kbs=${kbs} kb=${kb} />`}
    ${kb && kind === "chunk" && html`<${ChunkPage} kb=${kb} id=${id} />`}
    ${kb && kind === "document" && html`<${DocumentPage} key=${id} kb=${kb} id=${id} />`}
    ${kb && !kind && html`<${KnowledgeBase} key=${kb} kb=${kb}
      isNew=${kbs !== null && !kbs.some((each) => each.name === kb)} />`}</div>`;
}

function FirstKb() {
  return html`<section class="card stack"><h2>Make your first knowledge base</h2>
    <p class="quiet small">Name it, then drop files. Or <a
    href=${link("chat", "new")}>try the sample</a> first.</p>
    <${NameForm} kbs=${[]} label="Name" action="Go on" /></section>`;
}

function NewKb({ kbs }) {
  const [open, setOpen] = useState(false);
  const canMake = useStore(info)?.kb_root !== false;
  if (!canMake) return html`<p
    class="tiny faint">This server makes no new ones (started without --kb-root).</p>`;
  if (!open) return html`<button onClick=${() => setOpen(true)}>
    <${Icon} name="plus" />New knowledge base</button>`;
  return html`<${NameForm} kbs=${kbs} label="Name of the new knowledge base" action="Make"
    done=${() => setOpen(false)} />`;
}

function NameForm({ kbs, label, action, done }) {
  const [name, setName] = useState("");
  const wrong = name && !NAME.test(name) ? "Letters, digits, - and _ only."
    : kbs.some((each) => each.name === name) ? "There is one by that name." : null;
  const make = (event) => {
    event.preventDefault();
    done?.();
    go("documents", name);
  };
  return html`<form class="row top" onSubmit=${make}><label class="field">${label}
    <input type="text" value=${name} maxlength="64" placeholder="handbook"
    onInput=${(event) => setName(event.target.value)} aria-invalid=${wrong ? "true" : undefined} />
    ${wrong && html`<span class="tiny bad-text" role="alert">${wrong}</span>`}</label>
      <button class="primary align-end" type="submit" disabled=${!name || wrong !== null}>${action}
      </button></form>`;
}

const KV_WORDS = { ready: ["good", "KV ready"], making: ["accent", "making KV"],
  full: ["warn", "KV: tier full"], failed: ["bad", "KV failed"], off: ["", "KV not made"],
  on_demand: ["accent", "KV made when asked for"], unused: ["", "KV not used"],
  part: ["accent", "part"], none: ["", "none"] };

function Tabs({ kbs, kb }) {
  return html`<nav class="tabs" aria-label="Knowledge bases"><ul class="plain">
    ${kbs.map(({ name, documents, error }) => html`<li key=${name}>
    <a href=${link("documents", name)} aria-current=${name === kb ? "page" : undefined}>
    ${name} <span class="faint num">${error ? "broken" : count(documents)}</span></a></li>`)}
    ${kb && !kbs.some(({ name }) => name === kb) && html`<li>
      <a href=${link("documents", kb)} aria-current="page">
      ${kb} <span class="faint">new</span></a></li>`}</ul></nav>`;
}

function KnowledgeBase({ kb, isNew }) {
  const head = useResource(isNew ? null : kbPath(kb), { everyMs: 2000 });
  const [found, setFound] = useState(null);
  const [version, setVersion] = useState(0);
  const changed = () => { head.reload(); setVersion((was) => was + 1); refreshKbs().catch(
    () => {}); };
  const [doomed, setDoomed] = useState(false);
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState(null);
  const drop = async () => {
    setBusy(true);
    try {
      await remove(kbPath(kb));
      announce(`${kb} is deleted.`);
      knowledgeBases.set((all) => all.filter((each) => each.name !== kb));
      if (settings.get().kb === kb) setSetting("kb", null);
      replace("documents");
      refreshKbs().catch(() => {});
    } catch (error) {
      setFailure(error);
      setDoomed(false);
    }
    setBusy(false);
  };
  return html`<div class="stack wide"><${UploadBox} kb=${kb} done=${changed} />
    ${failure && html`<${Failure} error=${failure} what="Not deleted" />`}
    ${!isNew && html`<${Fetched} resource=${head} what="the knowledge base" lines=${2}>
      ${(data) => html`<${KvState} kb=${kb} data=${data} reload=${head.reload} />`}<//>
    <${Search} kb=${kb} found=${found} setFound=${setFound} />
    ${found === null && html`<${DocumentList} kb=${kb} version=${version} changed=${changed} />
      <${Hottest} kb=${kb} />`}
    <div><button class="bare small bad-text" onClick=${() => setDoomed(true)}>
      <${Icon} name="trash" />Delete the knowledge base ${kb}</button></div>`}
    ${doomed && html`<${Confirm} title=${`Delete ${kb}?`} action="Delete all of it" busy=${busy}
      onYes=${drop} onNo=${() => setDoomed(false)}>
      <p class="quiet">All its documents, vectors and chunk KV go from the disk. This cannot be
        undone.</p><//>`}</div>`;
}

function KvState({ kb, data, reload }) {
  const { kv } = data;
  const [tone, words] = KV_WORDS[kv.state] ?? ["", kv.state];
  const share = kv.chunks_total ? kv.chunks_done / kv.chunks_total : 0;
  return html`<section class="kv-state card"><dl class="tiles num"><div><dt>Documents</dt><dd>
    ${count(data.documents)}</dd></div><div><dt>Chunks</dt><dd>${count(data.chunks)}</dd></div><div>
    <dt>Tokens</dt><dd>${count(data.tokens)}</dd></div><div><dt>KV stored</dt><dd>${bytes(kv.bytes)}
    </dd></div></dl>
    <div class="stack tight"><p class="row small"><span class=${`chip ${tone}`}>${words}</span>
      <span class="num quiet">${count(kv.chunks_done)} of ${plural(kv.chunks_total,
      "chunk")} (${percent(share)})${kv.eta_s ? `, about ${roughly(kv.eta_s)} left` : ""}
      </span></p>
      <div class="bar" role="progressbar" aria-label="Chunks with KV" aria-valuemin="0"
        aria-valuemax="100" aria-valuenow=${Math.round(share * 100)}>
        <span class="reused" style=${{ width: `${share * 100}%` }}></span></div>
      ${kv.state === "making" && html`<${Prepare} kb=${kb} kv=${kv} reload=${reload} />`}
      <${Order} kb=${kb} order=${data.order} reload=${reload} />
      ${kv.calibration && html`<p class="tiny quiet">${calibrationWords(kv.calibration)}</p>`}
      ${(kv.why || kv.chunks_in_front > 0) && html`<details class="more tiny quiet">
        <summary>More</summary>${kv.chunks_in_front > 0 && html`<p>${plural(kv.chunks_in_front,
        "chunk")} stored a second time, for prompts in which they stand first: exact there.</p>`}
        ${kv.why && html`<p>${kv.why}</p>`}</details>`}</div></section>`;
}

/** What a model has found out on these documents so far. */
function calibrationWords({ state, asked, most, strategy, ratio, why }) {
  const soFar = `${count(asked)} of up to ${count(most)} questions.`;
  if (state === "measuring") {
    return ratio === null
      ? `Nobody calibrated this model. In idle moments it finds out on these documents how far `
        + `reuse may go: ${soFar} Until then answers reuse what is exact.`
      : `${strategy} recomputes ${percent(ratio)}. In idle moments it finds out on these documents `
        + `whether less is enough: ${soFar}`;
  }
  if (state === "shut") {
    return `${count(asked)} questions of these documents: only what is exact is reused, because ${why}.`;
  }
  return why
    ? `${count(asked)} questions of these documents: ${percent(ratio)} recomputed stays, because ${why}.`
    : `${count(asked)} questions of these documents: ${strategy} may be used from `
      + `${percent(ratio)} recomputed on.`;
}

const ORDERS = { configured: "as the server is configured", as_found: "as they were found",
  free: "free: may move, though this model may mind", auto: "may move if this model does not mind" };

/** Whether passages may move in the prompts of its questions. */
function Order({ kb, order, reload }) {
  const [error, setError] = useState(null);
  const change = async (event) => {
    try {
      await patch(kbPath(kb), { order: event.target.value });
      announce(`Order of passages: ${ORDERS[event.target.value]}.`);
      setError(null);
    } catch (failed) {
      setError(failed);
    }
    reload();
  };
  return html`<label class="row small">Order of passages
    <select value=${order ?? "configured"} onChange=${change}>
    ${Object.entries(ORDERS).map(([name, words]) => html`<option value=${name}>${words}</option>`)}
    </select></label>${error && html`<${Failure} error=${error} what="Not changed" />`}`;
}

const PREPARING = "Half of the machine's time goes into it until it is done; answers meanwhile are slower.";
const PREPARED_BESIDE = "It is made in idle moments, and a little beside answers. Until a passage "
  + "has its KV, answers compute it.";

/** How the KV that is missing comes, and how it comes sooner. */
function Prepare({ kb, kv, reload }) {
  const [error, setError] = useState(null);
  const hurry = async () => {
    try {
      await post(kbPath(kb, "prepare"));
      announce(`The KV of ${kb} is made now.`);
      setError(null);
      reload();
    } catch (failed) {
      setError(failed);
    }
  };
  return html`<div class="row between prepare"><p class="tiny quiet">
    ${kv.hurried ? PREPARING : PREPARED_BESIDE}</p>
    ${!kv.hurried && html`<button class="small" onClick=${hurry}>
      <${Icon} name="play" />Prepare now</button>`}</div>
    ${error && html`<${Failure} error=${error} what="Not begun" />`}`;
}

function Search({ kb, found, setFound }) {
  const [query, setQuery] = useState("");
  const [mode, setMode] = useState("hybrid");
  const [error, setError] = useState(null);
  const search = async (event) => {
    event.preventDefault();
    if (!query.trim()) { setFound(null); return; }
    setError(null);
    try {
      const { data } = await post(kbPath(kb, "search"), { query, k: 10, retrieval: mode });
      setFound(data);
      announce(`${plural(data.length, "chunk")} found.`);
    } catch (failed) {
      setError(failed);
    }
  };
  const clear = () => { setQuery(""); setFound(null); };
  return html`<section class="stack" aria-label="Search">
    <form class="row search" role="search" onSubmit=${search}><label class="grow">
    <span class="sr">Search ${kb}</span><input type="search" value=${query}
    placeholder=${`Search the chunks of ${kb} …`}
    onInput=${(event) => { setQuery(event.target.value); if (!event.target.value) setFound(
    null); }} /></label>
      <label><span class="sr">How to search</span>
        <select value=${mode} onChange=${(event) => setMode(event.target.value)}>
        <option value="hybrid">meaning and words</option><option value="vector">meaning</option>
        <option value="words">words</option></select></label>
      <button type="submit"><${Icon} name="search" />Search</button>
        ${found && html`<button type="button" class="bare" onClick=${clear}>Clear</button>`}</form>
    ${error && html`<${Failure} error=${error} what="The search failed" />`}
    ${found && (found.length === 0 ? html`<${Empty} icon="search" title="Nothing found">
      <p>Try other words, or search by meaning.</p><//>` : html`<ol class="plain stack">
      ${found.map((hit) => html`<li class="card hit"><header><h2>
      <a href=${link("documents", kb, "chunk", hit.id)}>${hit.title || "Untitled"}</a></h2>
      <span class="tiny faint num">score ${hit.score.toFixed(3)} · ${plural(hit.tokens, "token")}
      </span></header><p class="small quiet clamp">${hit.text}</p></li>`)}</ol>`)}</section>`;
}

function DocumentList({ kb, version, changed }) {
  const [pages, setPages] = useState([]);
  const [after, setAfter] = useState(null); // where the next page begins
  const [state, setState] = useState("loading"); // loading, more, all, or an error
  const [doomed, setDoomed] = useState(null);
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState(null);
  const rows = pages.flat();
  const load = async (from, before) => {
    setState("loading");
    try {
      const query = new URLSearchParams({ limit: PAGE, ...(from ? { after: from } : {}) });
      const { data, next } = await get(`${kbPath(kb, "documents")}?${query}`);
      setPages([...before, data]);
      setAfter(next);
      setState(next ? "more" : "all");
    } catch (error) {
      setState(error);
    }
  };
  useEffect(() => { load(null, []); }, [kb, version]);
  const drop = async () => {
    setBusy(true);
    setFailure(null);
    try {
      await remove(kbPath(kb, "documents", doomed.id));
      announce(`${nameOf(doomed)} is deleted.`);
      setPages((all) => all.map((page) => page.filter((each) => each.id !== doomed.id)));
      changed();
    } catch (error) {
      setFailure(error);
    }
    setBusy(false);
    setDoomed(null);
  };
  return html`<section class="card" aria-labelledby="documents-title"><header>
    <h2 id="documents-title">Documents</h2></header>
    ${failure && html`<${Failure} error=${failure} what="Not deleted" />`}
    ${rows.length === 0 && state === "all" && html`<${Empty} icon="documents"
      title="No documents yet">
      <p>Drop files above. They can be asked about as soon as they are read; their KV follows in the
        background.</p><//>`}
    ${rows.length > 0 && html`<div class="scroll-x" tabindex="0" role="group"
      aria-label="Documents"><table class="documents-table"><thead><tr><th>Document</th>
      <th class="end">Size</th><th class="end">Chunks</th><th class="end">Tokens</th><th>KV</th>
      <th class="wide-only">Added</th><th><span class="sr">Actions</span></th></tr></thead>
      <tbody>${rows.map((each) => html`<tr key=${each.id}><td class="name">
        <a href=${link("documents", kb, "document", each.id)}>${nameOf(each)}</a>
        <span class="tiny faint cut block">${each.source}</span></td><td class="end num">
        ${bytes(each.chars)}</td><td class="end num">${count(each.chunks)}</td><td class="end num">
        ${count(each.tokens)}</td>
        <td><${KvCell} kv=${each.kv} chunks=${each.chunks} /></td><td class="quiet wide-only">
          ${ago(each.added_at)}</td><td class="end">
          <button class="bare icon small" aria-label=${`Delete ${nameOf(each)}`}
          onClick=${() => setDoomed(each)}><${Icon} name="trash" /></button></td></tr>`)}
          </tbody></table></div>`}
    ${state === "loading" && html`<${Loading} what="documents" />`}
    ${state instanceof Error && html`<${Failure} error=${state} retry=${() => load(null, [])} />`}
    ${state === "more" && html`<div class="row center">
      <button onClick=${() => load(after, pages)}>Show more</button></div>`}
    ${doomed && html`<${Confirm} title="Delete this document?" action="Delete" busy=${busy}
      onYes=${drop} onNo=${() => setDoomed(null)}>
      <p class="quiet">“${nameOf(doomed)}” goes with its ${plural(doomed.chunks,
      "chunk")}, vectors and KV. Answers no longer draw on it.</p><//>`}</section>`;
}

const nameOf = (each) => each.title || each.source || "Untitled";

function KvCell({ kv, chunks }) {
  if (!kv) return html`<span class="faint">–</span>`;
  const tiers = Object.entries(kv.bytes ?? {});
  const [tone, words] = KV_WORDS[kv.state] ?? ["", kv.state];
  return html`<span class="row tight-row"><span class=${`chip ${tone}`}>
    ${kv.state === "part" ? `${count(kv.chunks_done)}/${count(chunks)}` : words.replace("KV ", "")}
    </span>
    <span class="tiny faint num">${tiers.map(([tier, size]) => `${bytes(size)} ${tier}`).join(", ")}
      </span></span>`;
}

function Hottest({ kb }) {
  const hottest = useResource(`${kbPath(kb, "hottest")}?limit=8`);
  const rows = (hottest.data?.data ?? []).filter((each) => each.asked > 0);
  if (!rows.length) return null;
  return html`<section class="card"><h2>Most often in a prompt</h2>
    <${Bars} label="Chunks by how often they were in a prompt"
    rows=${rows.map((each) => ({ name: html`<a href=${link("documents", kb, "chunk", each.id)}>
    ${each.heading || "Untitled"}</a>`, value: each.asked, words: `${count(each.asked)}×` }))} />
    </section>`;
}

function DocumentPage({ kb, id }) {
  const document = useResource(kbPath(kb, "documents", id));
  return html`<div class="stack"><p><a href=${link("documents", kb)}>
    <${Icon} name="left" />All documents of ${kb}</a></p>
    <${Fetched} resource=${document} what="the document">
      ${(data) => html`<section class="card"><header><h2>${nameOf(data)}</h2>
      <span class="tiny faint num">${plural(data.pieces.length, "chunk")}</span></header>
      <ol class="plain chunk-list">${data.pieces.map((chunk) => html`<li>
        <a href=${link("documents", kb, "chunk", chunk.id)}>
        ${chunk.heading || `Part ${chunk.index + 1}`}</a>
        <span class="tiny faint num">${plural(chunk.tokens,
          "token")} · in ${plural(chunk.asked ?? 0, "prompt")} · <code>${chunk.id.slice(0, 12)}
          </code></span></li>`)}</ol></section>`}<//></div>`;
}

function ChunkPage({ kb, id }) {
  return html`<div class="stack"><p><a href=${link("documents", kb)}>
    <${Icon} name="left" />All documents of ${kb}</a></p>
    <div class="card"><${ChunkView} key=${id} kb=${kb} id=${id}
      open=${(next) => go("documents", kb, "chunk", next)} /></div></div>`;
}
