"""The OpenAI wire format and knowledge bases over HTTP: translation only.

`server.Server` serves in a process; `http.build_http` makes the application for any ASGI server.

    http ─► routes/ ──► workers/ ─► a thread computes, or waits for the engine
              │            │
    client ◄─ wire/ ◄──────┘

`access/` says who and what is let in, and how it is refused. `uploads/` takes documents in,
`observe/` has logs, metrics and spans. Only `kvweave.app` is below.
"""
