"""A model's name to files on this machine: embedded wheels, GGUF, safetensors, the model cache."""
