"""Making chunk KV: contexts, encoders, and what is stored beside the layers."""
