// Starts the page: asks the server who it is, then draws the shell and the page of the route.
import { cls, html, render, useEffect, useErrorBoundary, useRef, useState } from "./html.js";
import { greet } from "./api.js";
import { refresh } from "./conversations.js";
import { route, wasReplaced } from "./router.js";
import { connection, info, settings } from "./session.js";
import { useStore } from "./store.js";
import { Announcer } from "./widgets/announce.js";
import { Icon } from "./widgets/icons.js";
import { refreshKbs } from "./widgets/kb_picker.js";
import { Sidebar } from "./widgets/sidebar.js";
import { Failure, Loading } from "./widgets/states.js";
import { Cache } from "./pages/cache.js";
import { Chat } from "./pages/chat.js";
import { Compare } from "./pages/compare.js";
import { Details } from "./pages/details.js";
import { Documents } from "./pages/documents.js";
import { Quality } from "./pages/quality.js";
import { SignIn } from "./pages/sign_in.js";
import { System } from "./pages/system.js";

const PAGES = {
  chat: [Chat, "Chat"], answer: [Details, "Details of an answer"], compare: [Compare, "Compare"],
  documents: [Documents, "Documents"], cache: [Cache, "Cache"], quality: [Quality, "Quality"],
    system: [System, "System"],
};

function App() {
  const state = useStore(connection);
  const hello = useStore(info);
  const [failure, setFailure] = useState(null);
  const start = () => greet().then(() => setFailure(null), setFailure);
  useEffect(() => { start(); }, []);
  useEffect(() => {
    if (hello === null) return;
    setFailure(null);
    Promise.all([refresh(), refreshKbs()]).catch(() => {}); // their pages say what is wrong
  }, [hello?.model, hello?.version]);
  if (state === "unauthorised") return html`<${SignIn} /><${Announcer} />`;
  if (hello === null) {
    return html`<main class="page">${failure ? html`<${Failure} error=${failure} retry=${start} />`
      : html`<${Loading} what="kvweave" />`}</main>`;
  }
  return html`<${Shell} lost=${state === "lost"} /><${Announcer} />`;
}

function Shell({ lost }) {
  const [name, ...rest] = useStore(route);
  const [open, setOpen] = useState(false);
  const [Page, title] = PAGES[name] ?? PAGES.chat;
  const menu = useRef(null);
  const walked = useRef(false);
  useEffect(() => {
    document.title = `${title} · kvweave`;
    setOpen(false);
    // a new page is told to those who hear it; the first one begins at its top
    if (walked.current && !wasReplaced()) document.querySelector("main h1")?.focus(
      { preventScroll: true });
    walked.current = true;
  }, [name, rest[0]]);
  const onKey = (event) => {
    if (event.key === "Escape" && open) { setOpen(false); menu.current?.focus(); }
  };
  return html`<div class=${cls("shell", open && "menu-open")} onKeyDown=${onKey}>
    <a class="skip" href="#main"
      onClick=${(event) => { event.preventDefault(); document.getElementById(
      "main").focus(); }}>To the content</a>
    <header class="topbar"><button ref=${menu} class="bare icon" aria-expanded=${open}
      aria-controls="sidebar" aria-label="Menu" onClick=${() => setOpen(!open)}>
      <${Icon} name=${open ? "close" : "menu"} /></button><span class="brand-word">kvweave</span>
        <span class="faint small cut">${title}</span></header>
    <${Sidebar} page=${PAGES[name] ? name : "chat"} current=${rest[0]}
      close=${() => setOpen(false)} />
    ${open && html`<button class="scrim" tabindex="-1" aria-label="Close the menu"
      onClick=${() => setOpen(false)}></button>`}
    <main id="main" tabindex="0" aria-label="Page">
      ${lost && html`<div class="banner" role="alert"><${Icon} name="offline" />
        <span><strong>The server does not answer.</strong> What is shown is from
          before. This page keeps trying and goes on by itself.</span></div>`}
      <${Safe} key=${name}><${Page} args=${rest} /><//>
    </main>
  </div>`;
}

/** A page that breaks says so, and the rest stays usable. */
function Safe({ children }) {
  const [error, reset] = useErrorBoundary((caught) => console.error(caught));
  if (!error) return children;
  return html`<div class="page"><div class="notice bad" role="alert"><${Icon} name="warning" />
    <div class="stack">
    <p><strong>This page failed:</strong> ${String(
      error.message ?? error)}. It is a bug of ours; the browser's console says more.</p>
    <div><button class="small" onClick=${reset}>Draw it again</button></div></div></div></div>`;
}

settings.set((all) => all); // writes defaults once, so that theme.js finds them
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
