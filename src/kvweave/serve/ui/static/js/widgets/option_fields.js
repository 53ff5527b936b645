// Controls for the options of a question that the server names: GET /v1/info has their words, bounds
// and defaults.
import { html } from "../html.js";
import { info, setSetting, settings } from "../session.js";
import { useStore } from "../store.js";

/** The options that were chosen here, as fields of a chat request. */
export function chosenOptions() {
  const chosen = settings.get();
  return Object.fromEntries((info.get()?.options ?? []).map(({ name }) => [name, chosen[name]])
    .filter(([, value]) => value !== null && value !== undefined));
}

export function OptionFields() {
  const options = useStore(info)?.options ?? [];
  const chosen = useStore(settings);
  return options.map((each) => html`<label key=${each.name} class="option-field" title=${each.help}>
    <span>${each.label}</span><${Control} option=${each}
      value=${chosen[each.name] ?? each.default} /></label>`);
}

function Control({ option, value }) {
  const { name, kind, choices, least, most } = option;
  const set = (next) => setSetting(name, next);
  if (kind === "switch") return html`<input type="checkbox" checked=${value}
    onChange=${(event) => set(event.target.checked)} />`;
  if (kind === "choice") return html`<select value=${value}
    onChange=${(event) => set(event.target.value)}>${choices.map((each) => html`<option key=${each}
    value=${each} selected=${each === value}>${each}</option>`)}</select>`;
  if (kind === "text") return html`<input value=${value ?? ""}
    onChange=${(event) => set(event.target.value || null)} />`;
  const within = (number) => Math.min(most ?? number, Math.max(least ?? number, number));
  return html`<input type="number" min=${least} max=${most} value=${value}
    onChange=${(event) => set(within(Number(event.target.value) || option.default))} />`;
}
