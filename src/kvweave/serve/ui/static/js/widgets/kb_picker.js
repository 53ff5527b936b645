// Which knowledge base answers come from.
import { html, useEffect } from "../html.js";
import { get } from "../api.js";
import { currentModel, hasSeveral, settings, setSetting, useModel } from "../session.js";
import { makeStore, useStore } from "../store.js";

/** Knowledge bases of GET /v1/kb; null until they came. */
export const knowledgeBases = makeStore(null);

export async function refreshKbs() {
  const { data } = await get("v1/kb");
  knowledgeBases.set(data);
  settleKb();
}

/** Whether the model that was chosen answers from it: it was cut with one tokenizer. */
const fits = (each) => !hasSeveral() || each.models.includes(currentModel().name);

/** One that was deleted meanwhile, or that the model does not fit, is not asked any more; the first
 * one there is, is. */
export function settleKb() {
  const { kb, kbLeft } = settings.get();
  const known = (knowledgeBases.get() ?? []).filter(fits);
  if (kb && !known.some((each) => each.name === kb)) setSetting("kb", known[0]?.name ?? null);
  else if (kb === null && known.length && !kbLeft) setSetting("kb", known[0].name);
}

export function KbPicker({ label = "Knowledge base", withNone = true, shown = false }) {
  const kbs = useStore(knowledgeBases);
  const { kb } = useStore(settings);
  useModel();
  useEffect(() => { if (kbs === null) refreshKbs().catch(() => {}); }, []);
  const choose = (event) => {
    const name = event.target.value || null;
    settings.set((all) => ({ ...all, kb: name, kbLeft: name === null }));
  };
  return html`<label class=${shown ? "field" : "picker"}><span class=${shown ? "" : "sr"}>${label}
    </span>
    <select value=${kb ?? ""} onChange=${choose}>
      ${withNone && html`<option value="">No documents</option>`}
      ${(kbs ?? []).map((each) => html`<option key=${each.name} value=${each.name}
        selected=${each.name === kb} disabled=${!fits(each)}>
        ${each.name} (${fits(each) ? each.documents ?? "broken" : "for other models"})</option>`)}
    </select></label>`;
}
