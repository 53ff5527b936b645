// Where one can go, what was talked about, who is served.
import { html, useState } from "../html.js";
import { dropChat } from "../chats.js";
import { forget, heads } from "../conversations.js";
import { ago } from "../format.js";
import { go, link } from "../router.js";
import { connection, info, key, settings, setSetting, useModel } from "../session.js";
import { useStore } from "../store.js";
import { Confirm } from "./dialog.js";
import { Icon } from "./icons.js";

const PLACES = [
  ["chat", "Chat"], ["compare", "Compare"], ["documents", "Documents"], ["cache", "Cache"],
    ["quality", "Quality"], ["system", "System"],
];
const OF_ENGINES = ["compare", "cache", "quality", "system"]; // a gateway has none to look at
const THEMES = [["system", "screen", "As the system"], ["light", "sun", "Light"],
  ["dark", "moon", "Dark"]];

export function Sidebar({ page, current, close }) {
  const places = useStore(info)?.engine ? PLACES : PLACES.filter(
    ([name]) => !OF_ENGINES.includes(name));
  return html`<aside id="sidebar" class="sidebar" aria-label="Navigation and conversations">
    <a class="brand" href=${link("chat")} onClick=${close}>
      <img src="ui/icon.svg" width="28" height="28" alt="" />
      <span class="brand-word">kvweave</span></a>
    <nav aria-label="Pages"><ul class="plain">${places.map(([name, words]) => html`<li>
      <a href=${link(name)} aria-current=${(page === "answer" ? "chat" : page) === name ? "page"
        : undefined} onClick=${close}><${Icon} name=${name} />${words}</a></li>`)}</ul></nav>
    <${Conversations} page=${page} current=${current} close=${close} />
    <${Foot} />
  </aside>`;
}

function Conversations({ page, current, close }) {
  const all = useStore(heads);
  const [doomed, setDoomed] = useState(null);
  const drop = async () => {
    const { id } = doomed;
    setDoomed(null);
    dropChat(id);
    await forget(id);
    if (page === "chat" && current === id) go("chat");
  };
  return html`<section class="conversations" aria-labelledby="conversations-title">
    <div class="row between"><h2 id="conversations-title">Conversations</h2>
      <a class="button bare small" href=${link("chat", "new")} onClick=${close}>
        <${Icon} name="plus" />New</a></div>
    ${all.length === 0 ? html`<p class="tiny faint">What you ask is listed here.</p>`
      : html`<ul class="plain">${all.map((each) => html`<li key=${each.id}>
      <a href=${link("chat", each.id)} class="cut" title=${`${each.title} · ${ago(each.updated)}`}
        aria-current=${page === "chat" && current === each.id ? "true" : undefined}
        onClick=${close}>${each.title}</a>
      <button class="bare icon small" aria-label=${`Delete the conversation ${each.title}`}
        onClick=${() => setDoomed(each)}><${Icon} name="trash" /></button></li>`)}</ul>`}
    ${doomed && html`<${Confirm} title="Delete this conversation?" action="Delete" onYes=${drop}
      onNo=${() => setDoomed(null)}>
      <p class="quiet">“${doomed.title}” and its answers go. The documents stay.</p><//>`}
  </section>`;
}

function Foot() {
  const { name } = useModel();
  const { theme } = useStore(settings);
  const mine = useStore(key);
  const leave = () => { key.set(null); connection.set("unauthorised"); };
  return html`<footer class="side-foot">
    <p class="tiny quiet cut" title=${name}>${name}</p>
    <div class="row between"><div class="segments" role="group" aria-label="Theme">
      ${THEMES.map(([name, icon, words]) => html`
      <button class="icon small" aria-pressed=${theme === name} aria-label=${words} title=${words}
        onClick=${() => setSetting("theme", name)}><${Icon} name=${icon} /></button>`)}</div>
      ${mine && html`<button class="bare small" onClick=${leave}>
        <${Icon} name="out" />Sign out</button>`}</div>
  </footer>`;
}
