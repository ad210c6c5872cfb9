"""What scores and fits cost: small networks, large ones, many outputs, many processes."""
