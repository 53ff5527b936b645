"""kvweave inside a stock vLLM: a KV connector, found by vLLM through a plug-in.

    scheduler process                          worker process
    connector ─► scheduler_half                connector ─► worker_half ─► fuse/prefill
                 │ what is stored? (store)                  │              adapter: vLLM's modules
                 │ may it be fused? (auto_reuse)            │              kv_blocks: vLLM's KV
                 │ fuse or not, salt the blocks             │
                 └──────── orders (a step) ────────────────►│ chunk_maker: chunk KV in idle steps
                 ◄──────── reports ─────────────────────────┘

Both halves make their names for chunk KV from the model's folder (identity), so that what kvweave
itself has encoded for the same weights is found here, and the other way round. Tensor-parallel
ranks are as many worker processes, each with names for its own heads. See docs/vllm.md.
"""
