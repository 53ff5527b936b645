"""Runs the decoder: sampling and the generation loop. Knows token ids, never text."""
