// Every token of a prompt, coloured by what became of it.
//
// 4,000 tokens are 4,000 spans: made by hand in slices between frames, not by the framework, and
// laid out only where they are near the window (content-visibility). Hovering and the arrow keys go
// through one listener each.
import { cls, html, useEffect, useLayoutEffect, useMemo, useRef } from "../html.js";
import { plural } from "../format.js";

const NAMES = { e: "exact", r: "reused", n: "recomputed", c: "computed" };
const LEVELS = 5;
const SLICE = 300; // tokens made between two frames
const LONGEST_BLOCK = 300; // tokens of a part that are laid out together

export const stateName = (letter) => NAMES[letter] ?? "computed";

/** Level 0 … LEVELS-1 of each score by rank, null where there is none: scores of different
 * strategies have different scales, ranks have one. */
export function levelsOf(scores) {
  const sorted = scores.filter((score) => score !== null
    && score !== undefined).sort((a, b) => a - b);
  if (sorted.length === 0 || sorted[0] === sorted.at(-1)) return () => null;
  const cuts = [0.5, 0.75, 0.9, 0.97].map((share) => sorted[Math.floor(
    share * (sorted.length - 1))]);
  return (score) => (score === null || score === undefined ? null
    : cuts.filter((cut) => score > cut).length);
}

/** `parts`: [{ start, end, title, note, state }]. `look(index)` is told which token is looked at.
 * `replay`: null or { phase, done, left:Set }. `focus`: part to scroll to. */
export function TokenView({ tokens, parts, look, looked, replay, focus }) {
  const box = useRef(null);
  const spans = useRef([]);
  const level = useMemo(() => levelsOf(tokens.scores ?? []), [tokens]);

  useEffect(() => fill(box.current, tokens, parts, level, spans), [tokens, parts]);

  useLayoutEffect(() => {
    const element = box.current;
    if (replay) {
      element.dataset.replay = replay.phase;
      element.style.setProperty("--done", `${Math.round(100 * replay.done)}%`);
    } else delete element.dataset.replay;
    for (const old of element.querySelectorAll(".t.left")) if (
      !replay?.left.has(Number(old.dataset.i))) old.classList.remove("left");
    for (const index of replay?.left ?? []) spans.current[index]?.classList.add("left");
  }, [replay]);

  useLayoutEffect(() => {
    box.current.querySelector(".t.at")?.classList.remove("at");
    if (looked !== null) spans.current[looked]?.classList.add("at");
  }, [looked]);

  useEffect(() => {
    if (focus !== null) box.current.querySelector(`[data-part="${focus.part}"]`)?.scrollIntoView(
      { block: "start", behavior: "smooth" });
  }, [focus]);

  const over = (event) => {
    const index = event.target.dataset?.i;
    if (index !== undefined) look(Number(index));
  };
  const onKey = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 12, ArrowUp: -12 }[event.key];
    if (by === undefined || event.target !== box.current) return;
    event.preventDefault();
    const next = Math.min(tokens.texts.length - 1, Math.max(0, (looked ?? -1) + by));
    look(next);
    spans.current[next]?.scrollIntoView({ block: "nearest" });
  };
  return html`<div class="tokens" ref=${box} tabindex="0" role="group"
    aria-label="Tokens of the prompt. Arrow keys step through them." onPointerOver=${over}
    onPointerDown=${over} onKeyDown=${onKey}>
    ${parts.map((part, at) => html`<section class="part" data-part=${at} key=${at}>
      <header class="part-head"><h3 class="cut">${part.title}</h3><span class="tiny faint num">
        ${plural(part.end - part.start, "token")}</span>
        ${part.note && html`<span class=${cls("chip", part.state)}>
          ${part.state && html`<span class=${`dot ${part.state}`}></span>`}${part.note}</span>`}
          </header>
      <div class="part-body"></div></section>`)}</div>`;
}

/** Fill the bodies of all parts, a slice at a time. Returns what stops it. */
function fill(box, tokens, parts, level, spans) {
  const bodies = box.querySelectorAll(".part-body");
  spans.current = new Array(tokens.texts.length);
  const blocks = parts.flatMap((part, at) => {
    bodies[at].replaceChildren();
    const made = [];
    for (let start = part.start; start < part.end; start += LONGEST_BLOCK) made.push(
      [bodies[at], start, Math.min(part.end, start + LONGEST_BLOCK)]);
    return made;
  });
  let next = 0;
  let timer = 0;
  const step = () => {
    let made = 0;
    while (next < blocks.length && made < SLICE) {
      const [body, start, end] = blocks[next++];
      body.append(blockOf(tokens, start, end, level, spans.current));
      made += end - start;
    }
    if (next < blocks.length) timer = setTimeout(step, 0);
    else box.dataset.filled = "true";
  };
  delete box.dataset.filled;
  step();
  return () => clearTimeout(timer);
}

function blockOf(tokens, start, end, level, spans) {
  const block = document.createElement("div");
  block.className = "tokens-block";
  for (let index = start; index < end; index++) {
    const span = document.createElement("span");
    const strength = level(tokens.scores?.[index]);
    span.className = `t ${tokens.states[index] ?? "c"}${strength === null ? ""
      : ` i${Math.min(strength, LEVELS - 1)}`}`;
    span.dataset.i = index;
    span.textContent = shown(tokens.texts[index]);
    spans[index] = span;
    block.append(span);
    if (tokens.texts[index].endsWith("\n")) block.append("\n");
  }
  return block;
}

/** Ends of lines are seen. The text itself is put in as text, whatever it holds. */
function shown(text) {
  return text.replaceAll("\n", "↵") || "∅";
}
