"""Fisher factors: what matters at the output, pulled back to the weights."""
