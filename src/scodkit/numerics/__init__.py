"""Numerics that know nothing of networks: products, kernels, random numbers, digests, files."""
