// Which knowledge base answers come from.
import { html, useEffect } from "../html.js";
import { get } from "../api.js";
import { settings, setSetting } from "../session.js";
import { makeStore, useStore } from "../store.js";

/** Knowledge bases of GET /v1/kb; null until they came. */
export const knowledgeBases = makeStore(null);

export async function refreshKbs() {
  const { data } = await get("v1/kb");
  knowledgeBases.set(data);
  const { kb } = settings.get();
  // one that was deleted meanwhile is not asked any more; the first one there is, is
  if (kb && !data.some((each) => each.name === kb)) setSetting("kb", data[0]?.name ?? null);
  else if (kb === null && data.length && !settings.get().kbLeft) setSetting("kb", data[0].name);
}

export function KbPicker({ label = "Knowledge base", withNone = true, shown = false }) {
  const kbs = useStore(knowledgeBases);
  const { kb } = useStore(settings);
  useEffect(() => { if (kbs === null) refreshKbs().catch(() => {}); }, []);
  const choose = (event) => {
    const name = event.target.value || null;
    settings.set((all) => ({ ...all, kb: name, kbLeft: name === null }));
  };
  return html`<label class=${shown ? "field" : "picker"}><span class=${shown ? "" : "sr"}>${label}
    </span>
    <select value=${kb ?? ""} onChange=${choose}>
      ${withNone && html`<option value="">No documents</option>`}
      ${(kbs ?? []).map(({ name, documents }) => html`<option key=${name} value=${name}
        selected=${name === kb}>${name} (${documents ?? "broken"})</option>`)}
    </select></label>`;
}
