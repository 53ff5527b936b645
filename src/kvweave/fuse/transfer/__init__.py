"""Bringing chunk KV to a device: pipeline, ring, groups, placement."""
