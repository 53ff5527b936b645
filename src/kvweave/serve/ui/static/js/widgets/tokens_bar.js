// What became of the tokens of a prompt, as one bar and as words.
import { html } from "../html.js";
import { count } from "../format.js";

export const STATES = ["exact", "reused", "recomputed", "computed"];
export const STATE_WORDS = {
  exact: "equal to a full prefill, taken as it was",
  reused: "stored KV, moved to its place",
  recomputed: "stored KV, computed again for this question",
  computed: "not stored, or part of the question",
};

export function TokensBar({ tokens, legend = false }) {
  const all = STATES.reduce((sum, state) => sum + (tokens[state] ?? 0), 0);
  const told = STATES.filter((state) => tokens[state]).map(
    (state) => `${count(tokens[state])} ${state}`).join(", ");
  return html`<div class="tokens-bar">
    <div class="bar" role="img" aria-label=${`${count(all)} prompt tokens: ${told}`} title=${told}>
      ${STATES.map((state) => tokens[state] > 0
        && html`<span class=${state} style=${{ flex: `${tokens[state]} 0 0` }}></span>`)}
    </div>
    ${legend && html`<ul class="plain row small quiet num">
      ${STATES.map((state) => html`<li class="row" title=${STATE_WORDS[state]}>
      <span class=${`dot ${state}`}></span>${count(tokens[state] ?? 0)} ${state}</li>`)}</ul>`}
  </div>`;
}
