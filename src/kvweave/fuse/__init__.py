"""Chunk KV: computed once behind the preamble, woven into any prompt later."""
