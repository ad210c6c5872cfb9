"""One pass over the training data: the loop, its data, memory, checkpoints and processes."""
