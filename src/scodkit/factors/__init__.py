"""Fisher factors: square roots of the output's Fisher information, pulled back to weights."""
