"""The OpenAI wire format and knowledge bases over HTTP: translation only.

`server.Server` is the door for a process, `http.build_http` the one for any ASGI server.

    http ─► routes/ ──► workers/ ─► a thread computes, or waits for the engine
              │            │
    client ◄─ wire/ ◄──────┘

`uploads/` takes documents in, `observe/` has logs, metrics and spans. Only `kvweave.app` is below.
"""
