"""GGUF files: read, checked and converted to a Hugging Face style model folder (`convert.py`)."""
