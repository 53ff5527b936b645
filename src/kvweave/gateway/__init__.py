"""A front for engines that run elsewhere: retrieval and prompts here, tokens there.

    question ─► answerer.py: search, dedup, order ─► prompts.py ─► fleet.py: which replica?
                                                                      │
    pieces   ◄─ answer.py: one attempt after another ◄─ replies.py ◄─ connections.py

`gateway.Gateway` is a `ModelHost` as `Weave` is one, so the server's routes speak to either. No
model is loaded: a tokenizer at most, and the embedder of the knowledge bases.
"""
