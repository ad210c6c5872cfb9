"""Readers, one for each format: a file in, plain tensors out; nothing in a file is executed."""
