// Where the time went: one lane per kind of work, milliseconds since the request arrived.
import { html, useState } from "../html.js";
import { ms } from "../format.js";

const COLOURS = { search: "exact", guess: "recomputed", load: "reused", queue: "",
  probe: "recomputed", select: "recomputed", recompute: "computed", compute: "computed",
  prefill: "computed", decode: "fresh" };
const WORDS = { queue: "waiting", search: "searching", load: "loading", compute: "computing",
  decode: "answering" };

/** `firstTokenMs`: what is behind it is shown on demand, or it would flatten the rest. */
export function Gantt({ timeline, firstTokenMs }) {
  const [whole, setWhole] = useState(false);
  const last = Math.max(...timeline.map((each) => each.end_ms), 1);
  const canCut = firstTokenMs && last > firstTokenMs * 1.3;
  const end = canCut && !whole ? firstTokenMs * 1.04 : last;
  const lanes = [...new Set(timeline.map((each) => each.lane))];
  const place = (at) => `${(100 * Math.min(at, end)) / end}%`;
  return html`<figure class="gantt"><figcaption class="row between">
    <span class="tiny faint">milliseconds since the request arrived</span>
      ${canCut && html`<button class="small" aria-pressed=${whole}
        onClick=${() => setWhole(!whole)}>${whole ? "To the first token" : "With answering"}
        </button>`}</figcaption>
    <div class="gantt-rows" aria-hidden="true">
      ${lanes.map((lane) => html`<div class="gantt-row"><span class="tiny quiet cut">
        ${WORDS[lane] ?? lane}</span>
      <div class="track">
      ${timeline.filter((each) => each.lane === lane
        && each.start_ms < end).map((each) => html`<span class=${`span ${COLOURS[lane] ?? ""}`}
        title=${told(each)} style=${{ left: place(each.start_ms),
        width: `max(2px, ${(100 * (Math.min(each.end_ms, end) - Math.min(each.start_ms,
        end))) / end}%)` }}></span>`)}
      ${firstTokenMs && html`<span class="first-token" style=${{ left: place(firstTokenMs) }}>
        </span>`}</div></div>`)}
      <div class="gantt-row axis"><span></span><div class="track">
        ${[0, 0.5, 1].map((share) => html`<span class="tick tiny faint num"
        style=${{ left: `${100 * share}%` }}>${share ? ms(share * end) : "0"}</span>`)}
        </div></div></div>
    <details class="as-table"><summary class="tiny">As a table</summary>
      <div class="scroll-x" tabindex="0" role="group" aria-label="Timeline"><table><thead><tr>
      <th>Lane</th><th>What</th><th class="end">From</th><th class="end">To</th>
      <th class="end">Took</th></tr></thead>
      <tbody>${timeline.map((each) => html`<tr><td>${WORDS[each.lane] ?? each.lane}</td><td>${each.name}
        ${each.detail ? html` <span class="faint">${String(each.detail)}</span>` : null}</td>
        <td class="end num">${ms(each.start_ms)}</td><td class="end num">${ms(each.end_ms)}</td>
        <td class="end num">${ms(each.end_ms - each.start_ms)}</td></tr>`)}
        </tbody></table></div></details></figure>`;
}

const told = (each) => `${each.name}: ${ms(each.end_ms - each.start_ms)}${each.detail
  ? ` · ${each.detail}` : ""}`;
