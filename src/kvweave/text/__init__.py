"""Text and token ids: tokenizer, detokenizer, and the layout of a prompt by part."""
