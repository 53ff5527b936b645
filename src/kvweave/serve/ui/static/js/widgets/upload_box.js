// Files in, by drop or by choice, with live progress through reading, embedding and indexing.
import { cls, html, useRef, useState } from "../html.js";
import { kbPath, stream } from "../api.js";
import { bytes, count, plural } from "../format.js";
import { info } from "../session.js";
import { makeStore, useStore } from "../store.js";
import { announce } from "./announce.js";
import { Icon } from "./icons.js";
import { refreshKbs } from "./kb_picker.js";

const PHASES = [["send", "Sending"], ["read", "Reading"], ["embed", "Embedding"],
  ["index", "Indexing"], ["encode", "Making KV"]];
const place = { neighbours: "encode" };

/** Uploads of this page, newest first: they go on while other pages are shown. */
const uploads = makeStore([]);
let number = 0;

function change(id, part) {
  uploads.set((all) => all.map((each) => (each.id === id ? { ...each, ...part } : each)));
}

async function upload(kb, files, done) {
  const id = ++number;
  const total = files.reduce((sum, file) => sum + file.size, 0);
  const title = files.length === 1 ? files[0].name : plural(files.length, "file");
  uploads.set((all) => [{ id, kb, title, total, phase: "send", progress: null, outcome: null,
    error: null }, ...all]);
  const form = new FormData();
  for (const file of files) form.append("file", file, file.name);
  try {
    let outcome = null;
    for await (const event of stream(kbPath(kb, "documents"), { form })) {
      if (event.object === "ingest.progress") change(id,
        { phase: place[event.phase] ?? event.phase, progress: event });
      else outcome = event;
    }
    change(id, { outcome });
    announce(`${title}: ${outcomeWords(outcome)}`);
  } catch (error) {
    change(id, { error });
    announce(`${title} was not taken in: ${error.message}`);
  }
  refreshKbs().catch(() => {});
  done?.();
}

const isRefused = ({ added, updated, unchanged }) => added + updated + unchanged === 0;

function outcomeWords(outcome) {
  const { added, updated, unchanged, new_chunks: fresh, skipped } = outcome;
  if (isRefused(outcome)) return skipped.length
    ? `Nothing was taken in: ${plural(skipped.length, "file")} could not be read.`
    : "Nothing was taken in: there was no text.";
  const parts = [];
  if (added) parts.push(`${plural(added, "document")} added`);
  if (updated) parts.push(`${count(updated)} updated`);
  if (unchanged) parts.push(`${count(unchanged)} already there`);
  if (skipped.length) parts.push(`${count(skipped.length)} skipped`);
  return `${parts.join(", ")}; ${plural(fresh, "new passage")}. Ready to be asked.`;
}

export function UploadBox({ kb, compact, done }) {
  const [over, setOver] = useState(false);
  const chooser = useRef(null);
  const mine = useStore(uploads).filter((each) => each.kb === kb);
  const formats = useStore(info)?.formats;
  const take = (list) => { if (list.length) upload(kb, [...list], done); };
  const drop = (event) => { event.preventDefault(); setOver(false); take(
    event.dataTransfer.files); };
  return html`<div class="stack"><div class=${cls("drop", over && "over", compact && "compact")}
    onDragOver=${(event) => { event.preventDefault(); setOver(true); }}
    onDragLeave=${() => setOver(false)} onDrop=${drop}>
      <${Icon} name="upload" /><div class="stack tight"><p>
        <button class="link" type="button"
        onClick=${() => chooser.current.click()}>Choose files</button> or drop them here</p>
      ${!compact && formats && html`<details class="more tiny faint"><summary>PDF, Word, Markdown, HTML,
        text, tables, code and more</summary><p>${formats.join(" ")}</p></details>`}</div>
      <input ref=${chooser} type="file" multiple hidden accept=${formats?.join(",")}
        aria-label="Files to upload" onChange=${(
        event) => { take(event.target.files); event.target.value = ""; }} /></div>
    ${mine.length > 0 && html`<ul class="plain stack tight" aria-label="Uploads">
      ${mine.map((each) => html`<${Upload} key=${each.id} upload=${each} />`)}</ul>`}</div>`;
}

function Upload({ upload: { id, title, total, phase, progress, outcome, error } }) {
  const dismiss = () => uploads.set((all) => all.filter((each) => each.id !== id));
  const at = PHASES.findIndex(([name]) => name === phase);
  const phases = phase === "encode" ? PHASES : PHASES.slice(0, 4);
  return html`<li class="upload"><div class="row between"><span class="cut"><strong>${title}
    </strong> <span class="tiny faint num">${bytes(total)}</span></span>
      ${(outcome || error) && html`<button class="bare icon small" aria-label=${`Dismiss ${title}`}
        onClick=${dismiss}><${Icon} name="close" /></button>`}</div>
    ${!outcome && !error && html`<div class="phases" role="progressbar"
      aria-label=${`Upload of ${title}`} aria-valuetext=${`${PHASES[at]?.[1] ?? phase}${progress
      ? `, ${plural(progress.chunks, "passage")}` : ""}`}>
      ${phases.map(([name, words], i) => html`<span
        class=${cls(i < at && "past", i === at && "now")}>${words}</span>`)}</div>
      <p class="tiny faint num">${progress ? `${plural(progress.documents,
        "document")}, ${plural(progress.chunks, "passage")}${progress.eta_s
        ? `, about ${Math.ceil(progress.eta_s)} s left` : ""}` : "on its way"}</p>`}
    ${outcome && html`<p class=${cls("small row", isRefused(outcome) && "bad-text")}
      role=${isRefused(outcome) ? "alert" : undefined}>
      <${Icon} name=${isRefused(outcome) ? "warning" : "check"} />${outcomeWords(outcome)}</p>
      ${outcome.skipped.map((each) => html`<p class="small warn-text">${each.source.replace(/^upload:/, "")}: ${each.reason}
      </p>`)}`}
    ${error && html`<p class="small bad-text" role="alert">${error.message}</p>`}</li>`;
}
