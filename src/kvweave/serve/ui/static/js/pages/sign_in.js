// The server has API keys: ask for one. It is kept in this tab's session storage and nowhere else.
import { html, useState } from "../html.js";
import { greet } from "../api.js";
import { connection, info, key } from "../session.js";
import { Icon } from "../widgets/icons.js";

export function SignIn() {
  const [typed, setTyped] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const enter = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    key.set(typed.trim());
    const before = info.get()?.tenant;
    try {
      await greet();
      // what another tenant had open here is not for this one, nor to be saved as this one's
      if (before !== undefined && before !== info.get().tenant) location.reload();
    } catch (failed) {
      key.set(null);
      connection.set("unauthorised");
      setError(failed.status === 401
        ? "This key is not known here. Ask whoever runs the server for one." : failed.message);
    }
    setBusy(false);
  };
  return html`<main class="sign-in"><form class="card stack" onSubmit=${enter}>
    <img src="ui/icon.svg" width="40" height="40" alt="" /><h1>Sign in to kvweave</h1>
    <p class="quiet small">This server asks for an API key. It stays in this tab and is forgotten
      when you close it.</p>
    <label class="field">API key<input type="password" value=${typed}
      onInput=${(event) => setTyped(event.target.value)} autocomplete="off" spellcheck="false"
      autofocus aria-invalid=${error ? "true" : undefined}
      aria-describedby=${error ? "sign-in-error" : undefined} /></label>
    ${error && html`<p id="sign-in-error" class="small bad-text" role="alert">${error}</p>`}
    <button class="primary" type="submit" disabled=${busy || !typed.trim()}><${Icon} name="lock" />
      ${busy ? "Asking …" : "Sign in"}</button></form></main>`;
}
