// A question that must be answered first. The browser's own dialog keeps the focus inside.
import { html, useEffect, useId, useRef } from "../html.js";

export function Confirm({ title, children, action, onYes, onNo, busy }) {
  const dialog = useRef(null);
  const id = useId();
  useEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => { if (before?.isConnected) before.focus(); };
  }, []);
  return html`<dialog ref=${dialog} aria-labelledby=${id}
    onCancel=${(event) => { event.preventDefault(); onNo(); }}>
    <h2 id=${id}>${title}</h2>${children}
    <div class="row"><button onClick=${onNo} disabled=${busy} autofocus>Keep</button>
      <button class="danger" onClick=${onYes} disabled=${busy}>${busy ? "Deleting …" : action}
        </button></div>
  </dialog>`;
}
