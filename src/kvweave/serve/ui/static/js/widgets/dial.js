// One dial from exact to fastest, with plain words for the trade-off.
import { html, useId } from "../html.js";
import { currentDial } from "../chats.js";
import { info, setSetting, settings } from "../session.js";
import { useStore } from "../store.js";

export function Dial() {
  const dial = useStore(info)?.dial ?? [];
  useStore(settings);
  const chosen = currentDial();
  const id = useId();
  if (!chosen) return null;
  const at = dial.findIndex((each) => each.name === chosen.name);
  const choose = (event) => setSetting("dial", dial[Number(event.target.value)].name);
  return html`<div class="dial" title=${chosen.words}>
    <label for=${id}>How: <strong>${chosen.name}</strong></label>
    <div class="dial-track"><span aria-hidden="true">exact</span>
      <input id=${id} type="range" min="0" max=${dial.length - 1} step="1" value=${at} onInput=${choose}
        aria-valuetext=${`${chosen.name}: ${chosen.words}`} /><span aria-hidden="true">fastest</span></div>
    <p class="tiny quiet dial-words">${chosen.words}</p>
  </div>`;
}
