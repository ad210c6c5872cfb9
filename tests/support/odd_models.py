"""All the odd models, by name."""

from __future__ import annotations

from odd_batches import BATCHES
from odd_layers import LAYERS
from odd_networks import NETWORKS

ODD_MODELS = {model.name: model for model in (*LAYERS, *NETWORKS, *BATCHES)}
assert len(ODD_MODELS) == len(LAYERS) + len(NETWORKS) + len(BATCHES)

# left to plain autograd, sample by sample
LOOPED = {
    "prelu", "prelu per channel", "lstm with projection", "packed lstm", "radial basis",
    "forces", "experts by mask", "experts by one-hot dispatch", "experts by index", "ragged",
}  # fmt: skip

# what the hook engine leaves to the functional one, or to plain autograd: right, but slower
SLOWER = LOOPED | {
    "bilinear", "bag of words", "summed bag", "largest of a bag", "weighted bag",
    "bag by offsets", "attention with further keys", "attention by einsum", "temperature",
    "fourier layer", "scripted", "cosine similarity", "low-rank bilinear form", "codebook",
    "linear solve", "function map inside", "loop over samples", "sorted by value",
    "experts' weights by index", "samples in one row", "samples in one picture",
    "padded in front", "samples turned round",
}  # fmt: skip
