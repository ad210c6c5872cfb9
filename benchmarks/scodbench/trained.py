"""Trained networks of the domains, kept in a cache under a hash of all they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import torch
from torch import nn

from scodbench.data.folder import cache_folder
from scodbench.domain import Domain, Splits
from scodbench.identity import in_words
from scodbench.training import train
from scodkit.errors import CorruptArtifactError
from scodkit.numerics import artifact

_KIND = "trained network"


def trained(
    domain: Domain,
    splits: Splits,
    seed: int,
    *,
    folder: Path | None = None,
    cache: Path | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> nn.Module:
    """Return a domain's network, trained from a seed now or at an earlier time.

    Args:
        domain: The domain.
        splits: Its data.
        seed: Of the training; networks whose weights come with the data have none.
        folder: Of the data.
        cache: Where trained networks are kept; the user's cache folder by default.
        device: Where to train, and where the network is to be.
        progress: Show a progress bar while training.

    Returns:
        The network, in eval mode.
    """
    if domain.weights is not None:
        model = domain.build()
        model.load_state_dict(dict(domain.weights(folder)))
        return model.to(device).eval()
    assert domain.recipe is not None
    about = {
        "domain": domain.name,
        "seed": seed,
        "recipe": domain.recipe.describe(),
        "network": in_words(domain.build()),
        "shapes": {n: list(p.shape) for n, p in domain.build().named_parameters()},
        "likelihood": repr(domain.likelihood),
        "train": [splits.train.digest(), splits.train.probe],
        "selection": [splits.selection.digest(), splits.selection.probe],
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    kept = cache_folder() / "nets" if cache is None else cache
    path = kept / f"{domain.name}_{seed}_{key}.safetensors"
    with contextlib.suppress(FileNotFoundError, CorruptArtifactError):  # then it is trained
        model = domain.build()
        model.load_state_dict(artifact.read(path, _KIND)[1])
        return model.to(device).eval()
    found = train(
        domain.build,
        domain.likelihood,
        domain.recipe,
        (splits.train, splits.selection),
        seed,
        device=device,
        progress=progress,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    losses = {"loss": found.loss, "epoch": found.epoch, "last_loss": found.last_loss}
    artifact.write(path, _KIND, {**about, **losses}, found.model.state_dict())
    return found.model
