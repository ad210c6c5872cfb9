"""The uncertainty score: its formula, and the pass that computes it."""
