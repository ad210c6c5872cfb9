"""All the odd models, by name."""

from __future__ import annotations

from odd_batches import BATCHES
from odd_layers import LAYERS
from odd_networks import NETWORKS

ODD_MODELS = {model.name: model for model in (*LAYERS, *NETWORKS, *BATCHES)}
assert len(ODD_MODELS) == len(LAYERS) + len(NETWORKS) + len(BATCHES)
