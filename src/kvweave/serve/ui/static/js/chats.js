// A chat that goes on while its page is not shown: messages, the answer under way, stop, retry.
import { stream } from "./api.js";
import { load, newId, save } from "./conversations.js";
import { percent, timesOf } from "./format.js";
import { currentModel, namedModel, settings } from "./session.js";
import { makeStore } from "./store.js";
import { announce } from "./widgets/announce.js";
import { chosenOptions } from "./widgets/option_fields.js";
import { stageOf } from "./widgets/times_bar.js";

const chats = new Map();
const DRAWN_EACH_MS = 40;
const DRAWN_CHARS_PER_MS = 500; // a long answer is drawn less often: most of the time stays free
const LONGEST_TITLE = 60;

/** The chat of a conversation. Its store holds { id, title, kb, messages, busy, loaded, error }. */
export function chatOf(id) {
  if (!chats.has(id)) chats.set(id, makeChat(id));
  return chats.get(id);
}

export const freshChat = () => {
  const id = newId();
  const chat = makeChat(id);
  chats.set(id, chat);
  chat.store.set((was) => ({ ...was, loaded: true }));
  return id;
};

export function dropChat(id) {
  chats.get(id)?.stop();
  chats.delete(id);
}

function makeChat(id) {
  const store = makeStore({ id, title: "", kb: null, messages: [], busy: false, loaded: false,
    error: null });
  let control = null;
  const change = (part) => store.set((was) => ({ ...was, ...part }));

  async function open() {
    if (store.get().loaded) return;
    try {
      const kept = await load(id);
      change(kept ? { ...kept, loaded: true, error: null } : { loaded: true, error: null });
    } catch (error) {
      change({ error });
    }
  }

  /** Ask `text` behind the first `at` messages; what stood behind them goes. */
  async function ask(text, at = store.get().messages.length) {
    if (store.get().busy) return;
    const { kb } = settings.get();
    const before = store.get().messages.slice(0, at);
    const question = { role: "user", content: text };
    const answer = { role: "assistant", content: "",
      meta: { kb, ...namedModel(), dial: currentDial()?.name, state: "waiting",
        stage: stageOf({ name: kb ? "searching" : "sending" }) } };
    const title = store.get().title || text.trim().replace(/\s+/g, " ").slice(0, LONGEST_TITLE);
    change({ messages: [...before, question, answer], busy: true, title, kb, error: null });
    control = new AbortController();
    await listen(requestOf(id, before, text), answer);
    control = null;
    change({ busy: false });
    const failed = answer.meta.state === "failed";
    announce(failed ? `The answer failed: ${answer.meta.error}` : "The answer is complete.");
    save(store.get()).catch((error) => change({ error }));
  }

  async function listen(body, answer) {
    let drawn = 0;
    const draw = (force) => {
      const pause = Math.max(DRAWN_EACH_MS, answer.content.length / DRAWN_CHARS_PER_MS);
      if (!force && performance.now() - drawn < pause) return;
      drawn = performance.now();
      store.set((was) => ({ ...was, messages: [...was.messages.slice(0, -1),
        { ...answer, meta: { ...answer.meta } }] }));
    };
    const asked = performance.now();
    const hear = (stage) => {
      answer.meta.stage = stageOf(stage, answer.meta.stage);
      draw(true);
    };
    try {
      for await (const event of stream("v1/chat/completions",
        { body, signal: control.signal, hear })) {
        if (!answer.meta.answer) hear({ name: "waiting", others: 0 }); // its search is over
        answer.meta.answer = event.id;
        const choice = event.choices[0];
        if (choice?.delta?.content) {
          if (answer.content === "") answer.meta.seen_ms = performance.now() - asked;
          answer.content += choice.delta.content;
          answer.meta.state = "streaming";
        }
        if (choice?.finish_reason) {
          answer.meta.finish = choice.stopped_because ?? choice.finish_reason;
        }
        Object.assign(answer.meta, summary(event));
        draw(false);
      }
      answer.meta.state = "done";
    } catch (error) {
      answer.meta.state = error.name === "AbortError" ? "stopped" : "failed";
      if (error.name !== "AbortError") answer.meta.error = error.message;
      if (error.status === 0) answer.meta.cut = true;
    }
    delete answer.meta.stage;
    draw(true);
  }

  return {
    store, open, ask,
    stop: () => control?.abort(),
    /** Ask the question in front of message `at` again. */
    retry: (at) => ask(store.get().messages[at - 1].content, at - 1),
  };
}

/** What is kept of an answer's last event. */
function summary({ explain, sources, usage }) {
  const kept = {};
  if (sources) kept.sources = sources;
  if (usage) kept.completion_tokens = usage.completion_tokens;
  if (explain) {
    kept.times = timesOf(explain.timeline_ms);
    kept.full_ms = explain.full_ms ?? null;
    kept.copied = explain.copies?.copied ?? 0;
    kept.tokens = explain.tokens;
    kept.strategy = explain.strategy;
    kept.ratio = explain.ratio;
    kept.why = explain.why;
  }
  return kept;
}

/** The position of the dial, or the mode under "More" that was chosen in its place. */
export function currentDial() {
  const { dial = [], strategies = [] } = currentModel() ?? {};
  const { kb, mode, share } = settings.get();
  const own = kb && strategies.find((each) => each.name === mode);
  if (own) return modeOf(own, share);
  return dial.find((each) => each.name === settings.get().dial) ?? dial.find(
    (each) => each.name === "auto") ?? null;
}

function modeOf({ name, ratio: usual }, share) {
  const ratio = usual > 0 ? share ?? usual : null;
  const most = ratio === null ? "" : `, ${percent(ratio)} of the reused tokens recomputed`;
  return { name, reuse: { strategy: name, ratio }, needs_chunks: true,
    words: `The mode of that name${most}, whatever was measured. Answers may differ.` };
}

function requestOf(id, before, text) {
  const { kb } = settings.get();
  const body = {
    ...namedModel(), messages: [...history(before), { role: "user", content: text }],
    stream: true, stream_options: { include_usage: true }, explain: true,
  };
  const reuse = currentDial()?.reuse;
  if (kb) {
    body.kb = kb;
    body.conversation_id = id;
    Object.assign(body, chosenOptions());
    if (reuse) body.reuse = reuse;
  } else if (reuse && !currentDial().needs_chunks) {
    body.reuse = reuse;
  }
  return body;
}

/** Questions that were answered, with their answers: a failed one is no part of the conversation.
 * */
function history(messages) {
  const turns = [];
  for (let at = 0; at + 1 < messages.length; at += 2) {
    if (messages[at + 1].content) turns.push(messages[at], messages[at + 1]);
  }
  return turns.map(({ role, content }) => ({ role, content }));
}
