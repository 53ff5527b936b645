"""CPU kernels in C, compiled on the machine that runs them.

`rows.c` is the source, `build.py` compiles it once and finds it again, `library.py` loads it and
says what it is. A machine without a C compiler runs PyTorch's operators instead; which of the two
computes a product is measured (product_probe.py), and nothing but the speed depends on it.
"""
