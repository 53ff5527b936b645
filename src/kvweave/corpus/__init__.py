"""Documents in, chunks and vectors out. Knows text and vectors, never LLM tensors."""
