"""Array operators. Each file: the definition in plain PyTorch, which is also the CPU path."""
