"""Triton kernels. Imported by the operator that uses them, and only where Triton is there."""
