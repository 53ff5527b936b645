// The knowledge tree as an expandable tree: children are fetched when a node is opened.
import { cls, html, useRef, useState } from "../html.js";
import { get, useResource } from "../api.js";
import { plural } from "../format.js";
import { ofModel, useModel } from "../session.js";
import { Empty, Failure, Fetched } from "./states.js";

const LIMIT = 100;

/** Each model has its own. */
export function KnowledgeTree() {
  return html`<${Tree} key=${useModel().name} />`;
}

function Tree() {
  const roots = useResource(ofModel(`v1/tree?limit=${LIMIT}`), { everyMs: 5000 });
  const box = useRef(null);
  const onKey = (event) => {
    const items = [...box.current.querySelectorAll("[role=treeitem]")];
    const at = items.indexOf(event.target.closest("[role=treeitem]"));
    const next = { ArrowDown: items[at + 1], ArrowUp: items[at - 1], Home: items[0],
      End: items.at(-1) }[event.key];
    if (!next) return;
    event.preventDefault();
    next.focus();
  };
  return html`<${Fetched} resource=${roots} what="the tree" lines=${3}>
    ${({ nodes }) => (nodes.length === 0
    ? html`<${Empty} icon="cache" title="The tree is empty">
      <p>It fills with the exact KV of prompts that were answered.</p><//>`
    : html`<ul class="plain tree" role="tree" aria-label="Knowledge tree" ref=${box}
      onKeyDown=${onKey}>${nodes.map((node, at) => html`<${Node} key=${node.id} node=${node}
      level=${1} first=${at === 0} />`)}</ul>`)}<//>`;
}

function Node({ node, level, first }) {
  const [children, setChildren] = useState(null);
  const [open, setOpen] = useState(false);
  const [error, setError] = useState(null);
  const hasMore = node.children > 0;
  const toggle = async (want) => {
    if (!hasMore || want === open) return;
    setOpen(want);
    if (!want || children !== null) return;
    try {
      const path = `v1/tree?node=${encodeURIComponent(node.id)}&limit=${LIMIT}`;
      setChildren((await get(ofModel(path))).nodes);
    } catch (failed) {
      setError(failed);
    }
  };
  const onKey = (event) => {
    const want = { ArrowRight: true, ArrowLeft: false, Enter: !open, " ": !open }[event.key];
    if (want === undefined || event.target !== event.currentTarget) return;
    event.preventDefault();
    event.stopPropagation();
    toggle(want);
  };
  return html`<li role="treeitem" aria-level=${level} aria-expanded=${hasMore ? open : undefined}
    aria-label=${`${node.title || "system prompt"}, ${plural(node.tokens,
    "token")}, on ${node.tier}`} tabindex=${first && level === 1 ? 0 : -1} onKeyDown=${onKey}>
    <div class=${cls("tree-row", hasMore && "can-open")} onClick=${() => toggle(!open)}>
      <span class="twist" aria-hidden="true">${hasMore ? (open ? "▾" : "▸") : "·"}</span>
      <span class="cut">${node.title || (node.chunk ? node.chunk.slice(0, 12) : "system prompt")}
      </span>
      <span class="tiny faint num">${plural(node.tokens, "token")}</span><span class="chip">
        ${node.tier}</span><span class="tiny faint num">
        ${Number(node.hits.toPrecision(3))} uses</span>
        ${node.priority !== null && node.priority !== undefined
        && html`<span class="tiny faint num"
        title="What eviction goes by: the lowest leaf goes first">
        priority ${node.priority.toPrecision(3)}</span>`}</div>
    ${error && html`<${Failure} error=${error} />`}
    ${open && children && html`<ul class="plain" role="group">
      ${children.map((child) => html`<${Node} key=${child.id} node=${child} level=${level + 1} />`)}
      </ul>`}</li>`;
}
