"""What projecting the weights costs: all layers, whole and projected, at the same rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from scodbench.measure import Setup
from scodbench.rows import Row
from scodbench.samples import Loader
from scodbench.sweeps.points import judged
from scodkit.model.projected import Moments, Projected
from scodkit.monitor import Monitor
from scodkit.sketch import Nystrom

RANKS = (4, 8, 16, 32)
WHOLE, NONE = "whole", "none"  # weights; curvature

_BATCH = 128
_NO_DATA = 1e-10  # scale of a prior so narrow that no data adds anything


def projected_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows of whole weights, of none of the curvature, and of each kind of projections.

    Args:
        setup: Network and data.
    """
    monitor = _fitted(setup, None)
    yield from _judged(setup, monitor, WHOLE, None)
    monitor.prior_scale = _NO_DATA
    yield from _judged(setup, monitor, NONE, None)
    for moments in get_args(Moments):
        for rank in RANKS:
            monitor = _fitted(setup, Projected(rank=rank, moments=moments, seed=setup.seed))
            yield from _judged(setup, monitor, moments, rank)


def _fitted(setup: Setup, projected: Projected | None) -> Monitor:
    chosen = setup.domain.all_layers
    monitor = Monitor(
        setup.networks[0],
        setup.domain.likelihood,
        chosen.rank,
        sketch=Nystrom(size=chosen.size),
        parameters="all" if projected is None else projected,
    )
    return monitor.fit(Loader(setup.fit_on, _BATCH, setup.device), progress=False)


def _judged(setup: Setup, monitor: Monitor, kind: str, rank: int | None) -> Iterator[Row]:
    basis = monitor.basis
    return judged(
        setup,
        monitor,
        "projected",
        {"projections": kind, "projection_rank": rank},
        captured=basis.captured,
        inside=basis.inside,
        weights=monitor.fitted.parameters.num_parameters,
        rank=basis.rank,
    )
