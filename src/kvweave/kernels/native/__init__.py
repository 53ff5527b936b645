"""CPU kernels in C, compiled on the machine that runs them.

`rows.c` is the source, with the headers beside it; `build.py` compiles it once and finds it again,
`library.py` loads it and says what it is. `product.py`, `operators.py`,
`layers.py` and `stored.py` check what C is given and call it.

A machine without a C compiler runs PyTorch's operators instead, with weights in float32.
"""
