"""How results change with one choice: rank, prior, layers, sketch. Rows like any others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from scodbench.measure import Setup
from scodbench.rows import Row
from scodbench.samples import Loader
from scodbench.sweeps.points import judged
from scodkit.errors import OptionError
from scodkit.model.parameters import LastLayers, Selection
from scodkit.monitor import Monitor
from scodkit.sketch import Exact, FrequentDirections, Nystrom, Sketch, TwoSided

_BATCH = 128
_SHARES = (0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0)


def rank_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows over the rank, for several sketch sizes around the domain's."""
    for size in _sizes(setup):
        monitor = _fitted(setup, Nystrom(size=size), size)
        for rank in reversed(list(_powers(monitor.basis.rank))):  # it can only be lowered
            monitor.rank = rank
            yield from _judged(setup, monitor, "rank", size=size, rank=rank)


def prior_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows over the prior's variance ``eps^2``, eight decades to either side of one."""
    chosen = setup.domain.all_layers
    monitor = _fitted(setup, Nystrom(size=chosen.size), chosen.rank)
    for exponent in range(-8, 9):
        monitor.prior_scale = 10.0 ** (exponent / 2)
        yield from _judged(setup, monitor, "prior", prior_variance=10.0**exponent)


def layer_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows over the share of layers that is kept, counted from the output.

    The sketch is the same for all of them, that for the domain's last layers. A share of zero
    is the last linear layer alone. The domain's own last layers are marked as ``chosen``, and
    of shares that come to the same layers there is the largest.
    """
    sketch, rank = Nystrom(size=setup.domain.last.size), setup.domain.last.rank
    shares = _shares(setup)
    chosen = _num_chosen(setup, setup.domain.last_layers)
    by_weights = {_num_chosen(setup, layers): share for share, layers in shares.items()}
    for weights, share in by_weights.items():
        monitor = _fitted(setup, sketch, rank, shares[share])
        label = f"last {share:.0%}" if share else "last linear layer"
        about = {"layers": label, "weights": weights, "chosen": weights == chosen}
        captured = monitor.basis.captured
        yield from judged(
            setup, monitor, "layers", {"share": share}, captured=captured, **about
        )


def sketch_sweep(setup: Setup) -> Iterator[Row]:
    """Yield rows over the memory of a sketch, for each kind of sketch at equal memory."""
    for size in _sizes(setup):
        kinds: dict[str, tuple[Sketch, int]] = {
            "Nystrom": (Nystrom(size=size), size // 2),
            "TwoSided": (TwoSided(size=size), (size - 4) // 6),
            "FrequentDirections": (FrequentDirections(size=size // 2), size // 2),
        }
        for name, (sketch, rank) in kinds.items():
            held = _holds(sketch, _num_weights(setup.networks[0]), rank)
            if held in (size, size - 1):  # Frequent Directions has them in pairs
                monitor = _fitted(setup, sketch, rank)
                yield from _judged(setup, monitor, "sketch", size=size, sketch=name)


def fidelity(setup: Setup) -> Iterator[Row]:
    """Yield rows of the sketch and of the exact Fisher information, at the same rank."""
    chosen = setup.domain.all_layers
    for name, sketch in (("Nystrom", Nystrom(size=chosen.size)), ("Exact", Exact())):
        monitor = _fitted(setup, sketch, chosen.rank)
        yield from _judged(setup, monitor, "fidelity", sketch=name, rank=chosen.rank)


def _num_weights(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _fitted(setup: Setup, sketch: Sketch, rank: int, layers: Selection = "all") -> Monitor:
    monitor = Monitor(
        setup.networks[0], setup.domain.likelihood, rank, sketch=sketch, parameters=layers
    )
    return monitor.fit(Loader(setup.fit_on, _BATCH, setup.device), progress=False)


def _judged(setup: Setup, monitor: Monitor, sweep: str, **choice: object) -> Iterator[Row]:
    return judged(setup, monitor, sweep, choice, captured=monitor.basis.captured)


def _shares(setup: Setup) -> dict[float, LastLayers]:
    """Return choices of last layers by the share of layers they keep, in ascending order."""
    chosen = setup.domain.last_layers
    found = {0.0: LastLayers(count=1)}
    found |= {share: LastLayers(fraction=share) for share in _SHARES}
    if chosen.count is not None and chosen.count > 1:
        modules = setup.networks[0].modules()
        layers = sum(any(True for _ in m.parameters(recurse=False)) for m in modules)
        found[round(chosen.count / layers, 3)] = chosen
    return dict(sorted(found.items()))


def _num_chosen(setup: Setup, layers: LastLayers) -> int:
    """Return the number of weights in a choice of layers."""
    x, _ = setup.fit_on.take(slice(0, 2)).read(setup.device)
    monitor = Monitor(setup.networks[0], setup.domain.likelihood, parameters=layers)
    return monitor.plan(x).num_parameters


def _holds(sketch: Sketch, weights: int, rank: int) -> int | None:
    """Return how many vectors a sketch holds, None where it is too small for its rank."""
    try:
        return sketch.columns(weights, rank) if rank > 0 else None
    except OptionError:
        return None


def _sizes(setup: Setup) -> Iterable[int]:
    """Return the domain's sketch size and some parts of it, none above the matrix's own."""
    full, weights = setup.domain.all_layers.size, _num_weights(setup.networks[0])
    sizes = dict.fromkeys((max(10, full // 8), max(10, full // 4), full // 2, full))
    return [size for size in sizes if size <= weights]


def _powers(most: int) -> Iterable[int]:
    """Return 1, 2, 4 ... up to a number, and the number itself."""
    rank = 1
    while rank < most:
        yield rank
        rank *= 2
    yield most
