// Markdown of a model, as elements. Text becomes text nodes and never HTML: what is not understood
// is shown as it was written. Images are not loaded, links go to http, https and mailto alone.
// Every step goes over its text once: no answer takes longer than in proportion to its length.
import { html, useMemo } from "./html.js";

const DEEPEST = 8; // quotes in lists in quotes …: what is deeper is plain text
const LONGEST_LINK = 4096; // characters of (url "title")
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const NO_CITATION = () => null;

/** `cite(number)`: an element for [number], or null where it is no citation. Blocks whose text has
 * not changed since the last drawing are not drawn again, so long as `cite` is the same. */
export function Markdown({ text, cite = NO_CITATION }) {
  const lines = linesOf(text);
  return html`<div class="md">${cut(lines, 0).map(({ from, to, draw }) => html`<${Block} key=${from}
    source=${lines.slice(from, to).join("\n")} draw=${draw} cite=${cite} />`)}</div>`;
}

function Block({ source, draw, cite }) {
  return useMemo(() => draw(cite), [source, cite]);
}

/** The elements of a text, drawn at once. */
export const drawMarkdown = (text) => drawAll(cut(linesOf(text), 0), NO_CITATION);
const drawAll = (blocks, cite) => blocks.map(({ draw }) => draw(cite));

const linesOf = (text) => text.split(/\r?\n/);

// ---- blocks ------------------------------------------------------------------------------------

/** [{ from, to, draw }]: which lines are a block, and what makes an element of it. */
function cut(lines, depth) {
  const out = [];
  let at = seek(lines, 0, isFull);
  while (at < lines.length) {
    const [to, draw] = blockAt(lines, at, depth);
    out.push({ from: at, to, draw });
    at = seek(lines, to, isFull);
  }
  return out;
}

const isFull = (line) => line.trim() !== "";
const item = (line) => /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/.exec(line);
const starts = (line) => item(line) !== null || /^ {0,3}(#{1,6} |>|`{3}|~{3})/.test(line);
const isRule = (line) => line !== undefined && line.includes("-") && /^[ |:-]+$/.test(line);
const isQuote = (line) => /^ {0,3}>/.test(line);

/** The first line from `from` on that `fits`, or the end. */
function seek(lines, from, fits) {
  let at = from;
  while (at < lines.length && !fits(lines[at])) at += 1;
  return at;
}

/** Where the block that begins at `at` ends, and what draws it. */
function blockAt(lines, at, depth) {
  const line = lines[at];
  const inner = (body) => (cite) => drawAll(cut(body, depth + 1), cite);
  const fence = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})/.exec(line)?.[1];
  if (fence) {
    const end = seek(lines, at + 1, (each) => each.trim().startsWith(fence)
      && each.trim().replaceAll(fence[0], "") === "");
    const code = lines.slice(at + 1, end).join("\n");
    return [end + 1, () => html`<pre tabindex="0"><code>${code}</code></pre>`];
  }
  if (/^ {0,3}#{1,6} /.test(line)) {
    const level = /^ *(#+)/.exec(line)[1].length;
    const title = line.trim().slice(level).trim().replace(/ #+$/, "");
    // below the page's own headings
    return [at + 1, (cite) => html`<p class=${`md-h md-h${Math.min(level, 4)}`} role="heading"
      aria-level=${Math.min(level + 2, 6)}>${inline(title, cite)}</p>`];
  }
  const marks = line.replaceAll(" ", "");
  if (marks.length > 2 && "-*_".includes(marks[0]) && marks.replaceAll(marks[0], "") === ""
    && !line.startsWith("    ")) return [at + 1, () => html`<hr />`];
  if (isQuote(line) && depth < DEEPEST) {
    const end = seek(lines, at, (each) => !isQuote(each));
    const draw = inner(lines.slice(at, end).map((each) => each.replace(/^ {0,3}> ?/, "")));
    return [end, (cite) => html`<blockquote>${draw(cite)}</blockquote>`];
  }
  if (item(line) && depth < DEEPEST) return listAt(lines, at, inner);
  if (line.includes("|") && isRule(lines[at + 1])) {
    const end = seek(lines, at, (each) => !each.includes("|"));
    return [Math.max(end, at + 2), (cite) => table(lines.slice(at, end), cite)];
  }
  const end = seek(lines, at + 1, (each) => !isFull(each) || starts(each));
  return [end, (cite) => html`<p>${inline(lines.slice(at, end).join("\n"), cite)}</p>`];
}

function listAt(lines, from, inner) {
  const isOrdered = (head) => /\d/.test(head[2]);
  const first = item(lines[from]);
  const items = [];
  let at = from;
  for (;;) {
    const head = item(lines[at] ?? "");
    if (!head || isOrdered(head) !== isOrdered(first)) break;
    const indent = head[0].length;
    const body = [lines[at].slice(indent)];
    at += 1;
    while (at < lines.length && (/^ {2,}/.test(lines[at])
      || (!isFull(lines[at]) && /^ {2,}\S/.test(lines[at + 1] ?? ""))
      || (isFull(lines[at]) && !starts(lines[at]) && isFull(body.at(-1))))) {
      body.push(lines[at].slice(Math.min(indent, lines[at].search(/[^ ]|$/))));
      at += 1;
    }
    items.push(isTight(body) ? (cite) => inline(body.join("\n"), cite) : inner(body));
    if (!isFull(lines[at] ?? "x") && item(lines[at + 1] ?? "")) at += 1;
  }
  return [at, (cite) => {
    const made = items.map((draw) => html`<li>${draw(cite)}</li>`);
    return isOrdered(first) ? html`<ol start=${parseInt(first[2], 10)}>${made}</ol>`
      : html`<ul>${made}</ul>`;
  }];
}

const isTight = (body) => body.every((line, at) => isFull(line) && (at === 0 || !starts(line)));

function table(lines, cite) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const [head, , ...rows] = lines.map(cells);
  // a short row is not filled up: cells are made in proportion to the text
  return html`<div class="scroll-x" tabindex="0" role="group" aria-label="Table"><table>
    <thead><tr>${head.map((cell) => html`<th>${inline(cell, cite)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.slice(0, head.length).map((cell) => html`<td>
      ${inline(cell, cite)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

// ---- inside a block ----------------------------------------------------------------------------

/** Text with emphasis, code, links and citations. */
function inline(text, cite) {
  const out = []; // strings, Runs and Spans
  const brackets = []; // that may begin a link: { at, from }, in `out` and in `text`
  let linkless = 0; // brackets below this many are in front of a link, so they cannot hold one
  let plain = "";
  let at = 0;
  const flush = () => { if (plain) out.push(plain); plain = ""; };
  const put = (piece, next) => { flush(); out.push(piece); at = next; };
  const closingTicks = codeEnds(text);
  const nextParenthesis = ahead(text, ")");
  while (at < text.length) {
    const here = text[at];
    if (here === "\\" && /[\\`*_[\]()#+.!~|>-]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (here === "`") {
      const ticks = runLength(text, at);
      const end = closingTicks(ticks, at + ticks);
      if (end === null) { plain += text.slice(at, at + ticks); at += ticks; }
      else put(new Span(html`<code>${text.slice(at + ticks, end).trim()}</code>`),
        end + ticks);
    } else if (here === "*" || here === "_" || (here === "~" && text[at + 1] === "~")) {
      const length = runLength(text, at);
      put(new Run(text, at, length), at + length);
    } else if (here === "[" || (here === "!" && text[at + 1] === "[")) {
      const width = here === "!" ? 2 : 1;
      const number = readAt(/\[(\d{1,3})\](?!\()/y, text, at + width - 1);
      const made = number && cite(parseInt(number[1], 10));
      if (made) {
        if (here === "!") plain += here;
        put(new Span(made), at + width - 1 + number[0].length);
        linkless = brackets.length;
      } else {
        put(text.slice(at, at + width), at + width);
        brackets.push({ at: out.length - 1, from: at });
      }
    } else if (here === "]" && brackets.length) {
      const open = brackets.pop();
      const isImage = out[open.at] === "![";
      const end = text[at + 1] === "(" ? nextParenthesis(at + 2) : null;
      const url = end === null || end - at > LONGEST_LINK ? null
        : text.slice(at + 2, end).trim().split(/\s/)[0];
      const href = url !== null && !isImage && brackets.length >= linkless ? safe(url) : null;
      linkless = Math.min(linkless, brackets.length);
      if (url === null || (!isImage && !href)) { plain += here; at += 1; continue; }
      flush();
      const label = out.splice(open.at).slice(1);
      if (isImage) {
        out.push(new Span(html`<span class="md-image">[image: ${text.slice(open.from, at)
          || "without a name"}]</span>`));
      } else {
        out.push(new Span(anchor(href, emphasised(label))));
        linkless = brackets.length;
      }
      at = end + 1;
    } else if (here === "h" && /^https?:\/\//.test(text.slice(at, at + 8))
      && !/\w/.test(text[at - 1] ?? "")) {
      const url = withoutStop(readAt(/[^\s<>"'`)\]]+/y, text, at)[0]);
      const href = safe(url);
      if (href) put(new Span(anchor(href, url)), at + url.length);
      else { plain += url; at += url.length; }
    } else { plain += here; at += 1; }
  }
  flush();
  return emphasised(out);
}

function readAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** (from) => where `sign` is next, for places that never go back: the text is searched once. */
function ahead(text, sign) {
  let found = -1;
  return (from) => {
    if (found !== null && found < from) {
      const next = text.indexOf(sign, from);
      found = next < 0 ? null : next;
    }
    return found;
  };
}

/** (length, from) => where the next run of so many backticks begins, or null. */
function codeEnds(text) {
  let runs = null; // length of a run → where those runs begin, the last one first
  return (length, from) => {
    runs ??= Map.groupBy([...text.matchAll(/`+/g)].reverse(), (run) => run[0].length);
    const left = runs.get(length) ?? [];
    while (left.length && left.at(-1).index < from) left.pop();
    return left.at(-1)?.index ?? null;
  };
}

function withoutStop(url) {
  let end = url.length;
  while (".,;:!?".includes(url[end - 1])) end -= 1;
  return url.slice(0, end);
}

/** An element, and how deep emphasis is nested in it. */
class Span {
  constructor(node, height = 1) {
    this.node = node;
    this.height = height;
  }
}

/** A run of * or _ or ~ that may begin or end emphasis, by the rules of CommonMark. */
class Run {
  constructor(text, at, length) {
    const before = text[at - 1] ?? " ";
    const behind = text[at + length] ?? " ";
    const isSign = (each) => /[\p{P}\p{S}]/u.test(each);
    const isGap = (each) => /\s/.test(each);
    const left = !isGap(behind) && (!isSign(behind) || isGap(before) || isSign(before));
    const right = !isGap(before) && (!isSign(before) || isGap(behind) || isSign(behind));
    const isWordly = text[at] === "_"; // snake_case
    this.mark = text[at];
    this.at = at;
    this.length = length;
    this.left = length; // marks that are not used yet
    this.opens = left && (!isWordly || !right || isSign(before)) && (this.mark !== "~"
      || length === 2);
    this.closes = right && (!isWordly || !left || isSign(behind)) && (this.mark !== "~"
      || length === 2);
    this.place = 0; // in what is done
    this.height = 0; // of what was done since
  }

  fits(closer) {
    if (this.mark !== closer.mark) return false;
    const sum = this.length + closer.length;
    return !(this.closes || closer.opens) || sum % 3 !== 0 || this.length % 3 === 0;
  }

  get kind() { return `${this.mark}${this.opens}${this.length % 3}`; }
}

/** Nodes of `pieces`, with emphasis made of their runs. Each run is looked at a few times at most:
 * those between two that fit are dropped, those that did not fit are not searched again. */
function emphasised(pieces) {
  const done = [];
  const open = []; // runs in `done` that may begin emphasis
  const barred = new Map(); // kind of a closer → the last run that did not fit it, by its place in the text
  const grow = (height) => {
    if (open.length) open.at(-1).height = Math.max(open.at(-1).height, height);
  };
  const closeRuns = (length) => {
    while (open.length > length) { const { height } = open.pop(); grow(height); }
  };
  const find = (closer) => {
    const bar = barred.get(closer.kind) ?? -1;
    let at = open.length - 1;
    while (at >= 0 && open[at].at > bar && !open[at].fits(closer)) at -= 1;
    if (at >= 0 && open[at].at > bar) return at;
    barred.set(closer.kind, open.at(-1)?.at ?? -1);
    return -1;
  };
  for (const piece of pieces) {
    if (piece instanceof Run) {
      for (let at = piece.closes ? find(piece) : -1; at >= 0; at = piece.left ? find(piece) : -1) {
        const opener = open[at];
        closeRuns(at + 1);
        if (opener.height >= DEEPEST) { closeRuns(at); continue; }
        const used = Math.min(2, opener.left, piece.left);
        const span = emphasis(opener.mark, used, shown(done.splice(opener.place + 1)),
          opener.height + 1);
        opener.left -= used;
        opener.height = 0;
        piece.left -= used;
        if (!opener.left) { open.pop(); done.pop(); }
        done.push(span);
        grow(span.height);
      }
      if (piece.left) {
        piece.place = done.length;
        done.push(piece);
        if (piece.opens) open.push(piece);
      }
    } else {
      done.push(piece);
      if (piece instanceof Span) grow(piece.height);
    }
  }
  return shown(done);
}

function emphasis(mark, used, inner, height) {
  if (mark === "~") return new Span(html`<del>${inner}</del>`, height);
  return new Span(used === 2 ? html`<strong>${inner}</strong>` : html`<em>${inner}</em>`, height);
}

/** Pieces as nodes; words that stand side by side are one text. */
function shown(pieces) {
  const nodes = [];
  let words = "";
  const flush = () => { if (words) nodes.push(words); words = ""; };
  for (const piece of pieces) {
    if (piece instanceof Span) { flush(); nodes.push(piece.node); }
    else words += piece instanceof Run ? piece.mark.repeat(piece.left) : piece;
  }
  flush();
  return nodes;
}

/** An address that a link may lead to, or null: relative ones are shown as they were written. */
function safe(href) {
  try {
    const url = new URL(href);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function anchor(href, label) {
  return html`<a href=${href} target="_blank" rel="noopener noreferrer nofollow">${label}</a>`;
}
