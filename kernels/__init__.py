"""Triton kernels and their torch references: plain tensors and scalars in, tensors out."""
