// Server-sent events of a fetch: an EventSource can neither POST nor send a key.

/** Parsed JSON of each event. Returns after [DONE]; throws Cut if the stream ends before it. `hear`
 * is called with what a comment says, where that is JSON: what the server is at. */
export async function* readEvents(body, hear = () => {}) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        if (block.startsWith(": {")) hear(JSON.parse(block.slice(2)));
        const data = dataOf(block);
        if (data === "[DONE]") return;
        if (data !== "") yield JSON.parse(data);
      }
      if (done) throw new Cut();
    }
  } finally {
    reader.cancel().catch(() => {}); // a stream that is left early must not go on downloading
  }
}

/** The connection ended before the answer did. */
export class Cut extends Error {
  constructor() {
    super("The connection ended before the answer was complete.");
  }
}

function dataOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}
