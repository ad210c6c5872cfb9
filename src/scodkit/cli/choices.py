"""Words on the command line, and the objects they stand for: the only place with both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from scodkit.cli.options import LikelihoodName, PrecisionName, SketchName
from scodkit.errors import OptionError
from scodkit.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)
from scodkit.model.parameters import LastLayers, Selection
from scodkit.sketch import Exact, FrequentDirections, Nystrom, Sketch, TwoSided

# the object, and which options of the command line it takes
_LIKELIHOODS: dict[LikelihoodName, tuple[type[Likelihood], tuple[str, ...]]] = {
    LikelihoodName.CATEGORICAL: (Categorical, ("directions", "class_dim")),
    LikelihoodName.GAUSSIAN: (Gaussian, ("variance",)),
    LikelihoodName.BERNOULLI: (Bernoulli, ()),
    LikelihoodName.HETEROSCEDASTIC: (HeteroscedasticGaussian, ()),
}
_SKETCHES: dict[SketchName, tuple[type[Sketch], tuple[str, ...]]] = {
    SketchName.NYSTROM: (Nystrom, ("size", "seed")),
    SketchName.TWO_SIDED: (TwoSided, ("size", "seed")),
    SketchName.FREQUENT_DIRECTIONS: (FrequentDirections, ("size",)),
    SketchName.EXACT: (Exact, ()),
}
PRECISIONS = {PrecisionName.BFLOAT16: torch.bfloat16}

_Name = TypeVar("_Name", LikelihoodName, SketchName)
_Made = TypeVar("_Made")


def likelihood_of(
    name: LikelihoodName,
    variance: Sequence[float] | None = None,
    directions: int | None = None,
    class_dim: int | None = None,
) -> Likelihood:
    """Return a likelihood with its options; None stands for an option that was not given.

    Examples:
        >>> likelihood_of(LikelihoodName.GAUSSIAN, variance=[0.5])
        Gaussian(variance=0.5)
    """
    given: dict[str, Any] = {"directions": directions, "class_dim": class_dim}
    if variance:
        given["variance"] = variance[0] if len(variance) == 1 else tuple(variance)
    return _made("likelihood", name, _LIKELIHOODS, given)


def sketch_of(name: SketchName, size: int | None = None, seed: int | None = None) -> Sketch:
    """Return a sketch with its options; None stands for an option that was not given."""
    return _made("sketch", name, _SKETCHES, {"size": size, "seed": seed})


def selection_of(
    last_layers: int | None, last_fraction: float | None, parameters: Sequence[str] | None
) -> Selection:
    """Return which weights are meant: at most one of three ways to say so, else all.

    Args:
        last_layers: How many layers, counted from the end.
        last_fraction: Share of the layers, counted from the end.
        parameters: Names or glob patterns.

    Raises:
        OptionError: If there is more than one.
    """
    given = {
        "--last-layers": last_layers,
        "--last-fraction": last_fraction,
        "--parameters": parameters or None,
    }
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1:
        raise OptionError(
            f"expected one way to choose weights, got {' and '.join(used)}; leave one out"
        )
    if parameters:
        return list(parameters)
    if used:
        return LastLayers(fraction=last_fraction, count=last_layers)
    return "all"


def _made(
    what: str,
    name: _Name,
    table: Mapping[_Name, tuple[type[_Made], tuple[str, ...]]],
    given: Mapping[str, Any],
) -> _Made:
    kind, takes = table[name]
    options = {option: value for option, value in given.items() if value is not None}
    for option in options:
        if option not in takes:
            owners = [other.value for other, (_, own) in table.items() if option in own]
            raise OptionError(
                f"expected no --{option.replace('_', '-')} with --{what} {name.value}: it "
                f"belongs to {' and '.join(owners)}; leave it out"
            )
    return kind(**options)
