"""The uncertainty score: its formula, and the scored forward pass."""
