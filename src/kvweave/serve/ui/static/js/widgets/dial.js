// One dial from exact to fastest: named positions, and plain words for the trade-off. Under "More"
// every mode there is, by name.
import { html } from "../html.js";
import { currentDial } from "../chats.js";
import { wayWords } from "../format.js";
import { setSetting, settings, useModel } from "../session.js";
import { useStore } from "../store.js";

export function Dial() {
  const dial = useModel()?.dial ?? [];
  const { kb } = useStore(settings);
  const chosen = currentDial();
  if (!chosen) return null;
  return html`<fieldset class="dial"><legend class="sr">From exact to fastest</legend>
    ${dial.map((each) => html`<label key=${each.name} title=${each.words}
    class=${each.needs_chunks && !kb ? "out" : ""}>
    <input type="radio" name="dial" value=${each.name} checked=${each.name === chosen.name}
      disabled=${each.needs_chunks && !kb} aria-describedby="dial-words"
      onChange=${() => { setSetting("dial", each.name); setSetting("mode", null); }} /><span>${each.name}</span></label>`)}
      </fieldset>`;
}

/** Every strategy that can be asked for, in place of a position of the dial. */
export function Modes() {
  const strategies = useModel()?.strategies ?? [];
  const { kb, mode, share } = useStore(settings);
  const own = strategies.find((each) => each.name === mode);
  if (!kb || !strategies.length) return null;
  const choose = (name) => { setSetting("mode", name || null); setSetting("share", null); };
  const setShare = (text) => setSetting("share", text === "" ? null
    : Math.min(1, Math.max(0, Number(text) / 100)));
  return html`<details class="modes small" open=${!!own}><summary>More</summary>
    <label class="option-field"><b>Mode</b><select value=${own?.name ?? ""}
      onChange=${(event) => choose(event.target.value)}>
      <option value="" selected=${!own}>as the dial says</option>
      ${strategies.map(({ name }) => html`<option key=${name} value=${name}
      selected=${name === own?.name}>${wayWords(name)}</option>`)}
      <${RefusedWays} shown=${mode} /></select></label>
    ${own?.ratio > 0 && html`<label class="option-field"><b>Recompute %</b><input type="number"
      min="0" max="100" step="1" value=${Math.round(100 * (share ?? own.ratio))}
      onChange=${(event) => setShare(event.target.value)} /></label>`}</details>`;
}

/** Options for the modes that the model is not ready for, with the reason. `shown` is selected. */
export function RefusedWays({ shown }) {
  const { strategies = [], refused = [] } = useModel() ?? {};
  const isKnown = [...strategies, ...refused].some((each) => each.name === shown);
  const all = !shown || isKnown ? refused : [...refused, { name: shown, why: "not served here" }];
  return all.map(({ name, why }) => html`<option key=${name} value=${name} title=${why} disabled
    selected=${name === shown}>${wayWords(name)} (not for this model: ${why})</option>`);
}

export function DialWords() {
  useModel();
  return html`<p id="dial-words" class="tiny quiet dial-words"><strong>${currentDial()?.name}
    </strong> ${currentDial()?.words}</p>`;
}
