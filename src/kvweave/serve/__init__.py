"""The OpenAI wire format over HTTP: translation only. `kvweave.serve.http.build_http` is the door.

http ─► routes ─► asking ─► bridge ─► a worker thread computes, or waits for the engine
                              │
client ◄─ sse ◄─ chat ◄─── mailbox

What is no answer (uploads, searches, embeddings) goes through `tasks`.
"""
