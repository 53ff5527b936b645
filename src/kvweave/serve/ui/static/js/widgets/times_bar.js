// Where the time of an answer went, as one bar and as words; and a wait that is not over.
import { html, useEffect, useState } from "../html.js";
import { ms, PARTS, plural } from "../format.js";

const PART_WORDS = {
  waiting: "for other answers: their turns, and their rows in the steps of this one",
  searching: "for passages",
  loading: "stored KV of passages",
  computing: "the prompt",
  answering: "from the first token to the last",
};
const COLOURS = { waiting: "waits", searching: "exact", loading: "reused", computing: "computed",
  answering: "fresh" };

export function TimesBar({ times }) {
  const shown = PARTS.filter((name) => times[name] >= 1);
  const told = shown.map((name) => `${name} ${ms(times[name])}`).join(", ");
  return html`<div class="times stack tight"><div class="bar" role="img"
    aria-label=${`Time: ${told}`}>${shown.map((name) => html`<span class=${COLOURS[name]}
      title=${`${name} ${ms(times[name])}`} style=${{ flex: `${times[name]} 0 0` }}></span>`)}</div>
    <ul class="plain row tiny quiet num">${shown.map((name) => html`<li class="row"
      title=${PART_WORDS[name]}><span class=${`dot ${COLOURS[name]}`}></span>${name} ${ms(
      times[name])}</li>`)}</ul></div>`;
}

const LOUD_S = 1; // a wait that is shorter says nothing

/** A stage that the server told of, with when it began here; see `AnswerWait`. */
export const stageOf = (told, before) => ({ ...told,
  since: told.name === before?.name ? before.since : performance.now() });

/** What an answer is at that has no word yet, and for how long. */
export function Waiting({ stage, kb }) {
  const [now, setNow] = useState(() => performance.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(performance.now()), 250);
    return () => clearInterval(timer);
  }, []);
  const seconds = Math.max(0, Math.floor((now - (stage?.since ?? now)) / 1000));
  return html`<p class="waiting small quiet"><span class="dots" aria-hidden="true"><span></span>
    <span></span><span></span></span>
    <span role="status">${stage && seconds >= LOUD_S ? stageWords(stage, kb)
      : html`<span class="sr">Waiting for the first word</span>`}</span>
    ${stage && seconds >= LOUD_S && html`<span class="num faint" aria-hidden="true">${
      `· ${seconds} s`}</span>`}</p>`;
}

function stageWords({ name, others }, kb) {
  if (name === "waiting") {
    return others ? `waiting for ${plural(others, "other answer")}` : "waiting for its turn";
  }
  if (name === "searching") return "searching and planning";
  if (name === "loading") return "loading stored passages";
  if (name === "reading") return kb ? "reading the passages" : "reading";
  return name;
}
