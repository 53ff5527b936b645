"""Array operators: each is a definition in plain PyTorch, a GPU kernel and a dispatcher.

`kernels/<operator>.py` holds the definition, which is what a CPU runs and what kernels are compared
with, and the function that callers use: it goes to the kernel where `dispatch.py` says that one can
run, to the definition everywhere else. The Triton kernels lie in `kernels/gpu/`; an operator
imports its kernel when a CUDA tensor arrives. Types that both sides name are in `types.py`.

    operator                           definition            kernel
    attention over positions           attention, scattered  gpu/attention, rows, row_plan, hopper
    the same over pages                paged_attention       gpu/attention; gpu/decode, recordable
    rotation, RMS norm, gate           rope, norm, gate      gpu/elementwise
    fresh rows turned and put down     place                 gpu/place
    chunk rows moved by a vector       shift                 gpu/shift
    stored bytes to rows in place      unpack                gpu/unpack
    attention that each key gets       column_scores         gpu/columns; batched_scores, in PyTorch
    a small table to the device        host                  gpu/tables
    products, quantisation             linear, quantise      those of PyTorch
"""
