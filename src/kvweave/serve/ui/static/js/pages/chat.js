// Chat: ask, read, look at what it was answered from.
import { cls, html, useEffect, useRef, useState } from "../html.js";
import { kbPath, useResource } from "../api.js";
import { chatOf, freshChat } from "../chats.js";
import { heads } from "../conversations.js";
import { link, replace } from "../router.js";
import { settings } from "../session.js";
import { useStore } from "../store.js";
import { AnswerMessage, UserMessage } from "../widgets/messages.js";
import { ChunkView } from "../widgets/chunk_view.js";
import { Dial, DialWords, Modes } from "../widgets/dial.js";
import { Icon } from "../widgets/icons.js";
import { KbPicker, knowledgeBases } from "../widgets/kb_picker.js";
import { LibraryList } from "../widgets/library_list.js";
import { ModelPicker } from "../widgets/model_picker.js";
import { OptionFields } from "../widgets/option_fields.js";
import { Failure, Loading } from "../widgets/states.js";
import { FirstRun, SampleQuestions } from "./first_run.js";

export function Chat({ args: [id] }) {
  const known = useStore(heads);
  const isId = id && id !== "new" && id !== "start";
  useEffect(() => {
    // never an empty address: a reload comes back to the same conversation
    if (!isId && id !== "start") replace("chat",
      id === "new" || !known.length ? freshChat() : known[0].id);
  }, [id]);
  if (!isId) return null;
  return html`<${Conversation} key=${id} id=${id} />`;
}

function Conversation({ id }) {
  const chat = chatOf(id);
  const { title, messages, busy, loaded, error } = useStore(chat.store);
  const { kb } = useStore(settings);
  const kbs = useStore(knowledgeBases);
  const [panel, setPanel] = useState(null); // null, {library: true} or {kb, chunk}
  const [draft, setDraft] = useState("");
  const opener = useRef(null);
  useEffect(() => { chat.open(); }, [id]);
  const show = (next) => {
    opener.current = document.activeElement;
    setPanel(next);
  };
  const hide = () => {
    setPanel(null);
    if (opener.current?.isConnected) opener.current.focus();
  };
  const ask = (text) => { setDraft(""); chat.ask(text); };
  const empty = loaded && messages.length === 0;
  const isFirstRun = empty && kbs !== null && kbs.length === 0;
  return html`<div class=${cls("chat", panel && "with-panel")}>
    <section class="chat-main" aria-label="Conversation">
      <header class="chat-head"><h1 tabindex="-1" class="cut">${title || "New conversation"}</h1>
        <button class="small" aria-expanded=${panel !== null}
          onClick=${() => (panel ? hide() : show({ library: true }))}>
          <${Icon} name="book" />Library</button></header>
      ${error && html`<div class="chat-lane">
        <${Failure} error=${error} what="This conversation is not kept" /></div>`}
      <${Thread} messages=${messages} busy=${busy}>
        ${!loaded && !error && html`<${Loading} what="the conversation" />`}
        ${isFirstRun && html`<${FirstRun} ask=${ask} />`}
        ${empty && kbs?.length > 0 && html`<${Welcome} kb=${kb} ask=${ask} />`}
        ${messages.map((message, at) => (message.role === "user"
          ? html`<${UserMessage} key=${at} message=${message} busy=${busy}
            resend=${(text) => chat.ask(text, at)} />`
          : html`<${AnswerMessage} key=${at} message=${message} busy=${busy}
            retry=${() => chat.retry(at)} open=${(source) => show(
            { kb: message.meta.kb, chunk: source.chunk })} />`))}
      <//>
      <${Composer} draft=${draft} setDraft=${setDraft} busy=${busy} ask=${ask} stop=${chat.stop} />
    </section>
    ${panel && html`<${Panel} panel=${panel} setPanel=${setPanel} hide=${hide} kb=${kb} />`}
  </div>`;
}

/** Scrolls with a growing answer, unless the reader has scrolled away. */
function Thread({ messages, busy, children }) {
  const lane = useRef(null);
  const follows = useRef(true);
  useEffect(() => {
    follows.current = true;
  }, [messages.length]);
  useEffect(() => {
    if (follows.current) lane.current.scrollTop = lane.current.scrollHeight;
  }, [messages]);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = lane.current;
    follows.current = scrollHeight - scrollTop - clientHeight < 60;
  };
  return html`<div class="thread" ref=${lane} onScroll=${onScroll} tabindex="0" role="log"
    aria-label="Messages" aria-busy=${busy} aria-live="off">
    <div class="chat-lane stack wide">${children}</div></div>`;
}

const WITH_KB = "The passages that fit best go in front of your question. The model read them once "
  + "and reuses what it computed then; each answer shows what was reused.";
const WITHOUT_KB = "No knowledge base is chosen: the model answers from what it knows. Choose one "
  + "below to answer from your documents.";

function Welcome({ kb, ask }) {
  return html`<div class="welcome stack"><h2>${kb ? html`Ask about <em>${kb}</em>` : "Ask anything"}
    </h2>
    <p class="quiet">
      ${kb ? WITH_KB : WITHOUT_KB}</p>
    ${kb === "demo" ? html`<${SampleQuestions} ask=${ask} />` : kb && html`<${Inside} kb=${kb} />`}
      </div>`;
}

/** A few of the documents, so that one knows what can be asked. */
function Inside({ kb }) {
  const { data } = useResource(`${kbPath(kb, "documents")}?limit=9`);
  return data && html`<ul class="plain row" aria-label=${`Some documents of ${kb}`}>
    ${data.data.slice(0, 8).map((each) => html`<li>
    <a class="chip" href=${link("documents", kb, "document", each.id)}>${each.title || each.source}
    </a></li>`)}${data.data.length > 8 && html`<li class="tiny faint">and more</li>`}</ul>`;
}

function Composer({ draft, setDraft, busy, ask, stop }) {
  const area = useRef(null);
  const { kb } = useStore(settings);
  useEffect(() => {
    const { style } = area.current;
    style.height = "auto";
    style.height = `${Math.min(area.current.scrollHeight + 2, 220)}px`;
  }, [draft]);
  const send = () => { if (draft.trim() && !busy) ask(draft.trim()); };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey
      && !event.isComposing) { event.preventDefault(); send(); }
  };
  return html`<div class="composer-place"><form class="composer"
    onSubmit=${(event) => { event.preventDefault(); send(); }}>
    <label class="sr" for="question">Your question</label>
    <textarea id="question" ref=${area} rows="1" value=${draft}
      placeholder=${kb ? `Ask about ${kb} …` : "Ask …"}
      onInput=${(event) => setDraft(event.target.value)} onKeyDown=${onKey} autocomplete="off">
      </textarea>
    <div class="composer-tools">
      <${ModelPicker} /><${KbPicker} />
      ${kb && html`<${OptionFields} />`}
      <${Dial} /><${Modes} />
      ${busy ? html`<button type="button" class="send" onClick=${stop}>
        <${Icon} name="stop" />Stop</button>`
    : html`<button type="submit" class="primary send" disabled=${!draft.trim()}>
      <${Icon} name="send" />Ask</button>`}
    </div></form><${DialWords} /></div>`;
}

function Panel({ panel, setPanel, hide, kb }) {
  const box = useRef(null);
  useEffect(() => { box.current.focus(); }, [panel]);
  return html`<aside class="panel" aria-label=${panel.chunk ? "Passage" : "Library"} tabindex="-1"
    ref=${box} onKeyDown=${(event) => event.key === "Escape" && hide()}>
    <header class="row between"><div class="row">
      ${panel.chunk && html`<button class="bare small" onClick=${() => setPanel({ library: true })}>
      <${Icon} name="left" />Library</button>`}
      <h2>${panel.chunk ? "Passage" : "Library"}</h2></div>
        <button class="bare icon small" aria-label="Close the panel" onClick=${hide}>
        <${Icon} name="close" /></button></header>
    ${panel.chunk ? html`<${ChunkView} key=${panel.chunk} kb=${panel.kb} id=${panel.chunk}
      open=${(chunk) => setPanel({ kb: panel.kb, chunk })} />`
    : html`<${LibraryList} kb=${kb} open=${(chunk) => setPanel({ kb, chunk })} />`}
  </aside>`;
}
