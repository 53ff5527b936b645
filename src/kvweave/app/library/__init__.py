"""A knowledge base together with its chunk KV."""
