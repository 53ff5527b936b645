"""Array operators: each is a definition in plain PyTorch, a GPU kernel and a dispatcher.

`kernels/<operator>.py` holds the definition, which is what a CPU runs and what kernels are compared
with, and the function that callers use: it goes to the kernel where `dispatch.py` says that one can
run, to the definition everywhere else. The Triton kernels lie in `kernels/gpu/`; an operator
imports its kernel when a CUDA tensor arrives. `kernels/native/` has some of them in C, for CPUs.
Types that all sides name are in `types.py`. docs/gpu.md has a table of all of them.
"""
