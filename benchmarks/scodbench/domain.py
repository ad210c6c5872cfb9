"""A domain: a network, the data it is trained on, and inputs it was not trained for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from scodbench.samples import Samples
from scodbench.training import Recipe
from scodkit.likelihoods import Likelihood
from scodkit.model.parameters import LastLayers


@dataclass(frozen=True)
class Splits:
    """The data of a domain; no sample is in two of them.

    Args:
        train: What the network is trained on, and what methods learn from.
        selection: Known inputs to choose the epoch with, to tune and to calibrate on.
        test: Known inputs that nothing was chosen with.
        novel: Sets of unknown inputs, by name; nothing is ever chosen with them.
        mixed: Inputs of all kinds with true targets, some of which the network gets wrong;
            None where there are none.
    """

    train: Samples
    selection: Samples
    test: Samples
    novel: Mapping[str, Samples]
    mixed: Samples | None = None


@dataclass(frozen=True)
class SketchSize:
    """How much of the curvature is sketched and kept.

    Args:
        size: ``T``, vectors held during the fit.
        rank: ``k``, vectors kept.
    """

    size: int
    rank: int


@dataclass(frozen=True)
class Domain:
    """One of the paper's domains.

    Args:
        name: As in rows and on the command line.
        title: As in tables and figures.
        likelihood: What distribution the output parametrises.
        build: Makes the network, untrained.
        splits: Reads the data from a folder; None for where data is looked for.
        recipe: How the network is trained; None where its weights come with the data.
        weights: Reads those weights.
        all_layers: Sketch over all weights.
        last_layers: The paper's last layers.
        last: Sketch over those.
        local_rank: Eigenvectors of the Hessian that Local Ensembles keep.
        fit_on: Training samples that methods learn from, at most.
        hessian_on: Those whose Hessian Local Ensembles take, which multiply it with hundreds of
            vectors one after the other; at most.
        ensemble: Whether there are several trained networks to make an ensemble of.
    """

    name: str
    title: str
    likelihood: Likelihood
    build: Callable[[], nn.Module]
    splits: Callable[[Path | None], Splits]
    all_layers: SketchSize
    last_layers: LastLayers
    last: SketchSize
    local_rank: int
    recipe: Recipe | None = None
    weights: Callable[[Path | None], Mapping[str, Tensor]] | None = None
    fit_on: int = 5000
    hessian_on: int = 1000
    ensemble: bool = True
