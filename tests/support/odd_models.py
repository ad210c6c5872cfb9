"""All the odd models, by name."""

from __future__ import annotations

from odd_batches import BATCHES
from odd_layers import LAYERS
from odd_networks import NETWORKS

ODD_MODELS = {model.name: model for model in (*LAYERS, *NETWORKS, *BATCHES)}
assert len(ODD_MODELS) == len(LAYERS) + len(NETWORKS) + len(BATCHES)

# left to plain autograd, sample by sample
LOOPED = {
    "prelu", "prelu per channel", "lstm", "gru", "rnn", "lstm both ways",
    "lstm of two layers", "lstm with projection", "lstm over time first", "packed lstm",
    "lstm cells", "one-hot by hand", "radial basis", "forces", "experts by mask",
    "experts by one-hot dispatch", "experts by index", "ragged",
}  # fmt: skip

# what the hook engine leaves to the functional one, or to plain autograd: right, but slower
SLOWER = LOOPED | {
    "bilinear", "weight norm", "weight norm by hooks", "spectral norm",
    "spectral norm of a convolution", "symmetric weights", "low-rank update",
    "low-rank weights", "standardised convolution", "orthogonal by exponential", "gru cells",
    "bag of words", "summed bag", "largest of a bag", "weighted bag", "bag by offsets",
    "positions", "attention with further keys",
    "attention by einsum", "transposed weights again", "slices of weights",
    "weights as long as the batch", "integers", "scalars", "temperature", "fourier layer",
    "scan over time", "scripted", "cosine similarity", "low-rank bilinear form",
    "fourier features", "codebook", "linear solve", "function map inside",
    "loop over samples", "sorted by value", "experts' weights by index",
    "samples in one row", "samples in one picture", "padded in front", "samples turned round",
}  # fmt: skip
