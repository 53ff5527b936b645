// The first minute: a sample to try, or one's own documents.
import { html, useState } from "../html.js";
import { stream, useResource } from "../api.js";
import { plural } from "../format.js";
import { link } from "../router.js";
import { setSetting } from "../session.js";
import { Icon } from "../widgets/icons.js";
import { refreshKbs } from "../widgets/kb_picker.js";
import { Failure, Loading } from "../widgets/states.js";

export function FirstRun({ ask }) {
  const demo = useResource("v1/demo");
  const [progress, setProgress] = useState(null);
  const [error, setError] = useState(null);
  const load = async (then) => {
    setError(null);
    setProgress({ documents: 0, chunks: 0 });
    try {
      for await (const event of stream("v1/demo")) if (
        event.object === "ingest.progress") setProgress(event);
      setSetting("kb", "demo");
      if (then) ask(then); // before the list of knowledge bases turns this page into the chat
      await refreshKbs();
    } catch (failed) {
      setError(failed);
      setProgress(null);
    }
  };
  return html`<div class="first-run stack wide">
    <header class="stack"><p class="kicker">Welcome</p>
      <h2 class="big">Chat with your documents. See what was reused, recomputed, and why.</h2>
      <p class="quiet">kvweave computes each passage once. When a question brings it
        back, wherever it then stands, what was computed is reused and only the words that matter
        for the question are computed again.</p></header>
    <div class="choices"><section class="card stack"><h2>Try the sample</h2>
        <p class="quiet small">${demo.data?.documents ? `${demo.data.documents} passages`
          : "Passages"} about an invented valley. No model knows
          them, so every right answer comes from the passages.</p>
        ${progress ? html`<div class="stack tight" role="status">
          <p class="small num">Reading the valley: ${plural(progress.documents,
          "document")}, ${plural(progress.chunks, "passage")} …</p><div class="bar busy">
          <span></span></div></div>`
    : html`<div><button class="primary" onClick=${() => load(null)}>
      <${Icon} name="spark" />Load the sample</button></div>`}
        ${error && html`<${Failure} error=${error} what="The sample was not loaded" />`}
        <h3>Then ask, for example</h3>
        ${demo.loading ? html`<${Loading} what="questions" lines=${3} />` : demo.data
          ? html`<ul class="plain stack tight questions">
          ${demo.data.questions.map((question) => html`<li>
          <button class="question" disabled=${progress !== null} onClick=${() => load(question)}>
            ${question}</button></li>`)}</ul>`
            : html`<${Failure} error=${demo.error} retry=${demo.reload} />`}
      </section>
      <section class="card stack"><h2>Bring your own</h2>
        <p class="quiet small">PDF, Word, Markdown, HTML, text, tables, code and more. They stay on
          this machine.</p>
        <div><a class="button" href=${link("documents")}>
          <${Icon} name="upload" />Add documents</a></div></section></div></div>`;
}

export function SampleQuestions({ ask }) {
  const { data } = useResource("v1/demo");
  return data && html`<ul class="plain stack tight questions">
    ${data.questions.map((question) => html`<li>
    <button class="question" onClick=${() => ask(question)}>${question}</button></li>`)}</ul>`;
}
