"""What projecting the weights costs: all layers, whole and projected, at the same rank."""

from __future__ import annotations

from collections.abc import Iterator

from scodbench.measure import Setup
from scodbench.rows import Row
from scodbench.samples import Loader
from scodbench.sweeps.points import judged
from scodkit.model.projected import Moments, Projected
from scodkit.monitor import Monitor
from scodkit.sketch import Nystrom

# sweeps of their own, as a large network takes minutes for each on a GPU
PROJECTED, PROJECTED_KFAC, PROJECTED_RANDOM = (
    "projected",
    "projected_kfac",
    "projected_random",
)
RANKS = (4, 8, 16, 32)
WHOLE, NONE = "whole", "none"  # weights; curvature

_BATCH = 128
_NO_DATA = 1e-10  # scale of a prior so narrow that no data adds anything


def projected_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows of whole weights, of no curvature, and of projections that are learnt.

    Args:
        setup: Network and data.
    """
    monitor = _fitted(setup, None)
    yield from _judged(setup, monitor, PROJECTED, WHOLE, None)
    monitor.prior_scale = _NO_DATA
    yield from _judged(setup, monitor, PROJECTED, NONE, None)
    yield from _ranks(setup, PROJECTED, "gradient")


def projected_kfac_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows of projections learnt from KFAC's moments.

    Args:
        setup: Network and data.
    """
    yield from _ranks(setup, PROJECTED_KFAC, "kfac")


def projected_random_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows of random projections.

    Args:
        setup: Network and data.
    """
    yield from _ranks(setup, PROJECTED_RANDOM, "random")


def _ranks(setup: Setup, sweep: str, moments: Moments) -> Iterator[Row]:
    for rank in RANKS:
        monitor = _fitted(setup, Projected(rank=rank, moments=moments, seed=setup.seed))
        yield from _judged(setup, monitor, sweep, moments, rank)


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


def _judged(
    setup: Setup, monitor: Monitor, sweep: str, kind: str, rank: int | None
) -> Iterator[Row]:
    basis = monitor.basis
    return judged(
        setup,
        monitor,
        sweep,
        {"projections": kind, "projection_rank": rank},
        captured=basis.captured,
        inside=basis.inside,
        weights=monitor.fitted.parameters.num_parameters,
        rank=basis.rank,
    )
