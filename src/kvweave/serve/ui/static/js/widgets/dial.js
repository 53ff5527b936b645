// One dial from exact to fastest: named positions, and plain words for the trade-off.
import { html } from "../html.js";
import { currentDial } from "../chats.js";
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
      onChange=${() => setSetting("dial", each.name)} /><span>${each.name}</span></label>`)}
      </fieldset>`;
}

export function DialWords() {
  useModel();
  return html`<p id="dial-words" class="tiny quiet dial-words"><strong>${currentDial()?.name}
    </strong> ${currentDial()?.words}</p>`;
}
