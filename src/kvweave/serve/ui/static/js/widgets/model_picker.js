// Which model answers and is looked at, where the server has several.
import { html } from "../html.js";
import { info, setSetting, useModel } from "../session.js";
import { useStore } from "../store.js";
import { settleKb } from "./kb_picker.js";

export function ModelPicker({ shown = false, disabled = false }) {
  const models = useStore(info)?.models ?? [];
  const current = useModel();
  if (models.length < 2) return null;
  const choose = (event) => {
    setSetting("model", event.target.value);
    settleKb();
  };
  return html`<label class=${shown ? "field" : "picker"}><span class=${shown ? "" : "sr"}>Model
    </span>
    <select value=${current.name} disabled=${disabled} onChange=${choose}>
      ${models.map(({ name }) => html`<option key=${name} value=${name}
        selected=${name === current.name}>${name}</option>`)}
    </select></label>`;
}
