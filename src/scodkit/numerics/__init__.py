"""Numerics without networks: matrix products, kernels, random numbers, digests, files."""
