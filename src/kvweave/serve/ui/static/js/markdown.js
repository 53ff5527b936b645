// Markdown of a model, as elements. Text becomes text nodes and never HTML: what is not understood
// is shown as it was written. Images are not loaded, links go to http, https and mailto alone.
import { html } from "./html.js";

const DEEPEST = 8; // quotes in lists in quotes …: what is deeper is plain text
const LONGEST_LINK = 4096; // characters of [label](url "title")
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

/** `cite(number)`: an element for [number], or null where it is no citation. */
export function Markdown({ text, cite }) {
  return html`<div class="md">${blocks(text.split(/\r?\n/), cite ?? (() => null), 0)}</div>`;
}

function blocks(lines, cite, depth) {
  const out = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const open = /^ {0,3}(`{3,}|~{3,})(.*)$/.exec(line);
    if (line.trim() === "") {
      at += 1;
    } else if (open) {
      const end = lines.findIndex((each, i) => i > at && each.trim().startsWith(open[1])
        && each.trim().replaceAll(open[1][0], "") === "");
      const last = end < 0 ? lines.length : end;
      out.push(html`<pre tabindex="0"><code>${lines.slice(at + 1, last).join("\n")}</code></pre>`);
      at = last + 1;
    } else if (/^ {0,3}#{1,6} /.test(line)) {
      const level = /^ *(#+)/.exec(line)[1].length;
      // below the page's own headings
      out.push(html`<p class=${`md-h md-h${Math.min(level, 4)}`} role="heading"
        aria-level=${Math.min(level + 2, 6)}>
        ${inline(line.trim().slice(level).trim().replace(/ #+$/, ""), cite, depth)}</p>`);
      at += 1;
    } else if (/^ {0,3}(-|\*|_)( *\1){2,} *$/.test(line)) {
      out.push(html`<hr />`);
      at += 1;
    } else if (/^ {0,3}>/.test(line) && depth < DEEPEST) {
      const [inner, next] = take(lines, at, (each) => /^ {0,3}>/.test(each));
      out.push(html`<blockquote>${blocks(inner.map((each) => each.replace(/^ {0,3}> ?/, "")), cite,
        depth + 1)}</blockquote>`);
      at = next;
    } else if (item(line) && depth < DEEPEST) {
      const [made, next] = list(lines, at, cite, depth);
      out.push(made);
      at = next;
    } else if (line.includes("|") && isRule(lines[at + 1])) {
      const [inner, next] = take(lines, at, (each) => each.includes("|"));
      out.push(table(inner, cite, depth));
      at = next;
    } else {
      const [inner, next] = take(lines, at, (each, i) => each.trim() !== ""
        && (i === at || !starts(each)));
      out.push(html`<p>${inline(inner.join("\n"), cite, depth)}</p>`);
      at = next;
    }
  }
  return out;
}

const item = (line) => /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/.exec(line);
const starts = (line) => item(line) !== null || /^ {0,3}(#{1,6} |>|`{3}|~{3})/.test(line);
const isRule = (line) => line !== undefined && line.includes("-") && /^[ |:-]+$/.test(line);

function take(lines, from, belongs) {
  let to = from;
  while (to < lines.length && belongs(lines[to], to)) to += 1;
  return [lines.slice(from, Math.max(to, from + 1)), Math.max(to, from + 1)];
}

function list(lines, from, cite, depth) {
  const ordered = /\d/.test(item(lines[from])[2]);
  const items = [];
  let at = from;
  while (at < lines.length) {
    const head = item(lines[at]);
    if (!head || /\d/.test(head[2]) !== ordered) break;
    const indent = head[0].length;
    const body = [lines[at].slice(indent)];
    at += 1;
    while (at < lines.length && (/^ {2,}/.test(lines[at])
      || (lines[at].trim() === "" && /^ {2,}\S/.test(lines[at + 1] ?? ""))
      || (lines[at].trim() !== "" && !starts(lines[at]) && body.at(-1).trim() !== ""))) {
      body.push(lines[at].replace(new RegExp(`^ {0,${indent}}`), ""));
      at += 1;
    }
    items.push(html`<li>${tight(body) ? inline(body.join("\n"), cite, depth)
      : blocks(body, cite, depth + 1)}</li>`);
    if (lines[at]?.trim() === "" && item(lines[at + 1] ?? "")) at += 1;
  }
  const start = ordered ? parseInt(item(lines[from])[2], 10) : undefined;
  return [ordered ? html`<ol start=${start}>${items}</ol>` : html`<ul>${items}</ul>`, at];
}

const tight = (body) => body.every((line, at) => line.trim() !== "" && (at === 0 || !starts(line)));

function table(lines, cite, depth) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const [head, , ...rows] = lines.map(cells);
  return html`<div class="scroll-x" tabindex="0" role="group" aria-label="Table"><table>
    <thead><tr>${head.map((cell) => html`<th>${inline(cell, cite, depth)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${head.map((_, at) => html`<td>
      ${inline(row[at] ?? "", cite, depth)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

/** Text with emphasis, code, links and citations. */
function inline(text, cite, depth) {
  const out = [];
  let plain = "";
  let at = 0;
  const flush = () => { if (plain) out.push(plain); plain = ""; };
  const put = (node, next) => { flush(); out.push(node); at = next; };
  while (at < text.length) {
    const here = text[at];
    const found = depth < DEEPEST ? special(text, at, cite, depth) : null;
    if (found) put(...found);
    else if (here === "\\" && /[\\`*_[\]()#+.!~|>-]/.test(
      text[at + 1] ?? "")) { plain += text[at + 1]; at += 2; }
    else { plain += here; at += 1; }
  }
  flush();
  return out;
}

function special(text, at, cite, depth) {
  const here = text[at];
  if (here === "`") {
    const ticks = /^`+/.exec(text.slice(at, at + 8))[0];
    const end = text.indexOf(ticks, at + ticks.length);
    return end < 0 ? null : [html`<code>${text.slice(at + ticks.length, end).trim()}</code>`,
      end + ticks.length];
  }
  if (here === "*" || here === "_") return emphasis(text, at, cite, depth);
  if (here === "~" && text.startsWith("~~", at)) {
    const end = text.indexOf("~~", at + 2);
    return end < 0 ? null : [html`<del>${inline(text.slice(at + 2, end), cite, depth + 1)}</del>`,
      end + 2];
  }
  if (here === "!" && text[at + 1] === "[") {
    const found = linked(text, at + 1);
    return found && [html`<span class="md-image">[image: ${found.label
      || "without a name"}]</span>`, found.end];
  }
  if (here === "[") return bracket(text, at, cite, depth);
  if (here === "h" && /^https?:\/\//.test(text.slice(at, at + 8))
    && !/\w/.test(text[at - 1] ?? "")) {
    const url = /^[^\s<>"'`)\]]+/.exec(text.slice(at))[0].replace(/[.,;:!?]+$/, "");
    const href = safe(url);
    return href && [anchor(href, url), at + url.length];
  }
  return null;
}

function emphasis(text, at, cite, depth) {
  const mark = text[at];
  const two = text[at + 1] === mark;
  const fence = two ? mark + mark : mark;
  if (mark === "_" && /\w/.test(text[at - 1] ?? "")) return null; // snake_case
  const from = at + fence.length;
  if (/\s|^$/.test(text[from] ?? "")) return null;
  let end = text.indexOf(fence, from + 1);
  while (end >= 0 && (/\s/.test(text[end - 1])
    || (mark === "_" && /\w/.test(text[end + fence.length] ?? "")))) end = text.indexOf(fence,
    end + 1);
  if (end < 0) return null;
  const inner = inline(text.slice(from, end), cite, depth + 1);
  return [two ? html`<strong>${inner}</strong>` : html`<em>${inner}</em>`, end + fence.length];
}

function bracket(text, at, cite, depth) {
  const number = /^\[(\d{1,3})\]/.exec(text.slice(at, at + 5));
  if (number && text[at + number[0].length] !== "(") {
    const made = cite(parseInt(number[1], 10));
    return made && [made, at + number[0].length];
  }
  const found = linked(text, at);
  const url = found && safe(found.url); // before its label is looked at
  return url && [anchor(url, inline(found.label, () => null, depth + 1)), found.end];
}

/** [label](url "title") at `at`, or null. */
function linked(text, at) {
  const near = text.slice(at, at + LONGEST_LINK); // the rest is not searched for every bracket
  const middle = near.indexOf("](");
  if (middle < 0 || near.slice(0, middle).includes("\n\n")) return null;
  const end = near.indexOf(")", middle);
  if (end < 0) return null;
  const [url] = near.slice(middle + 2, end).trim().split(/\s/);
  return { label: near.slice(1, middle), url, end: at + end + 1 };
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
