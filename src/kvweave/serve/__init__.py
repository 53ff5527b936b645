"""The OpenAI wire format over HTTP: translation only. `kvweave.serve.http.build_http` is the door.

http ─► chat ─► bridge ─► a worker thread computes
                  │
client ◄─ sse ◄─ mailbox
"""
