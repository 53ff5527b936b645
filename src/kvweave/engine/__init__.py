"""Computes the requests of one model on one thread. Knows token ids, never text."""
