"""How results change with one choice: rank, prior, layers, sketch. Rows like any others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from scodkit.bench.domain import Domain
from scodkit.bench.measure import Setup, description
from scodkit.bench.metrics import separation
from scodkit.bench.rows import Row
from scodkit.bench.samples import Loader, Samples
from scodkit.monitor import Monitor
from scodkit.parameters import LastLayers, Selection
from scodkit.sketch import Exact, FrequentDirections, Nystrom, Sketch, TwoSided

_BATCH = 128
_RESAMPLES = 200
# most samples of a set, so that a sweep of many points stays short
_JUDGED_ON = 1000

Sweep = Callable[[Setup], Iterator[Row]]


def rank_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows over the rank, for several sketch sizes around the domain's."""
    for size in _sizes(setup.domain):
        monitor = _fitted(setup, Nystrom(size=size), size)
        for rank in reversed(list(_powers(monitor.basis.rank))):  # it can only be lowered
            monitor.rank = rank
            yield from _rows(setup, monitor, "rank", size=size, rank=rank)


def prior_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows over the prior's variance ``eps^2``, eight decades around one."""
    chosen = setup.domain.all_layers
    monitor = _fitted(setup, Nystrom(size=chosen.size), chosen.rank)
    for exponent in range(-8, 9):
        monitor.prior_scale = 10.0 ** (exponent / 2)
        yield from _rows(setup, monitor, "prior", prior_variance=10.0**exponent)


def layer_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows over the share of layers that is kept, counted from the output."""
    for share in (0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0):
        size = setup.domain.last if share < 1 else setup.domain.all_layers
        layers = LastLayers(fraction=share) if share < 1 else "all"
        monitor = _fitted(setup, Nystrom(size=size.size), size.rank, layers)
        weights = monitor.basis.vectors.shape[0]
        yield from _rows(setup, monitor, "layers", share=share, weights=weights)


def sketch_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows over the memory of a sketch, for each kind of sketch at equal memory."""
    for size in _sizes(setup.domain):
        kinds: dict[str, tuple[Sketch, int]] = {
            "Nystrom": (Nystrom(size=size), size // 2),
            "TwoSided": (TwoSided(size=size), max(1, (size - 4) // 6)),
            "FrequentDirections": (FrequentDirections(size=size // 2), size // 2),
        }
        for name, (sketch, rank) in kinds.items():
            monitor = _fitted(setup, sketch, rank)
            yield from _rows(setup, monitor, "sketch", size=size, sketch=name)


def fidelity(setup: Setup) -> Iterator[Row]:
    """Yield rows of the sketch and of the exact Fisher information, at the same rank."""
    chosen = setup.domain.all_layers
    for name, sketch in (("Nystrom", Nystrom(size=chosen.size)), ("Exact", Exact())):
        monitor = _fitted(setup, sketch, chosen.rank)
        yield from _rows(setup, monitor, "fidelity", sketch=name, rank=chosen.rank)


SWEEPS: dict[str, Sweep] = {
    "rank": rank_sweep,
    "prior": prior_sweep,
    "layers": layer_sweep,
    "sketch": sketch_sweep,
    "fidelity": fidelity,
}


def applies(sweep: str, domain: Domain) -> bool:
    """Return whether a sweep is for a domain: the exact Fisher is for small networks only."""
    large = domain.name in ("cifar10", "taxinet")
    return not (large and sweep in ("fidelity", "sketch", "rank"))


def _fitted(setup: Setup, sketch: Sketch, rank: int, layers: Selection = "all") -> Monitor:
    monitor = Monitor(
        setup.networks[0], setup.domain.likelihood, rank, sketch=sketch, parameters=layers
    )
    return monitor.fit(Loader(setup.fit_on, _BATCH, setup.device), progress=False)


def _rows(setup: Setup, monitor: Monitor, sweep: str, **choice: object) -> Iterator[Row]:
    known = _scores(setup, monitor, setup.splits.test)
    captured = monitor.basis.captured
    for ood, samples in setup.splits.novel.items():
        found = separation(known, _scores(setup, monitor, samples), resamples=_RESAMPLES)
        yield {
            "id": "/".join(
                [sweep, setup.domain.name, ood, *map(str, choice.values()), str(setup.seed)]
            ),
            "sweep": sweep,
            **description(setup),
            "ood": ood,
            **choice,
            "auroc": found.auroc,
            "auroc_low": found.auroc_low,
            "auroc_high": found.auroc_high,
            "captured": captured,
        }


def _scores(setup: Setup, monitor: Monitor, samples: Samples) -> Tensor:
    few = samples.take(slice(0, _JUDGED_ON))
    return torch.cat([monitor.score(x).cpu() for x, _ in few.batches(_BATCH, setup.device)])


def _sizes(domain: Domain) -> Iterable[int]:
    """Return the domain's sketch size, and some parts of it."""
    full = domain.all_layers.size
    return dict.fromkeys((max(10, full // 8), max(10, full // 4), full // 2, full))


def _powers(most: int) -> Iterable[int]:
    """Return 1, 2, 4 ... up to a number, and the number itself."""
    rank = 1
    while rank < most:
        yield rank
        rank *= 2
    yield most
