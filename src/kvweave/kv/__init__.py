"""Chunk KV: named by content, stored position-free, found in the fastest tier that has it.

Nothing is imported here, so that `kvweave cache ls` reads folders without loading torch. Start with
`keys` (names), `format/` (bytes), `tiers/` (places) and `store` (the whole).
"""
