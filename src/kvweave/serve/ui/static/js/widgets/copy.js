// Copies text; says so.
import { html, useState } from "../html.js";
import { announce } from "./announce.js";
import { Icon } from "./icons.js";

async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea"); // plain http has no clipboard of its own
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("this browser does not let pages copy");
  return undefined;
}

export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await toClipboard(text);
      setDone(true);
      announce("Copied.");
      setTimeout(() => setDone(false), 1500);
    } catch (error) {
      announce(`Not copied: ${error.message}`);
    }
  };
  return html`<button class="bare small" onClick=${copy}><${Icon} name=${done ? "check" : "copy"} />
    ${done ? "Copied" : label}</button>`;
}
