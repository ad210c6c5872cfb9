"""One method on one trained network: fitted, timed, judged; a row for each unknown set."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from scodbench.domain import Domain, Splits
from scodbench.identity import machine, network_id
from scodbench.methods import HESSIAN, METHODS, TUNED, Case
from scodbench.rows import Row
from scodbench.samples import Loader, Samples
from scodbench.timing import prediction_times
from scodkit import Fused
from scodkit.baselines import Detector, KFACLaplace
from scodkit.comparison import kept_bytes
from scodkit.metrics import separation
from scodkit.monitor import Monitor
from scodkit.numerics.timing import wait_for

POOLED = "pooled"
# samples at a time; on a GPU more, where these are small
_BATCH, _MOST, _LARGE = 128, 512, 2**25
_BATCHES = (1, 64)  # that are timed
_HELD = 2**30  # bytes of samples that are held in memory for a fit, at most, on a CPU
_BINS = 40
_TUNE_ON = 1000


@dataclass(frozen=True)
class Setup:
    """What a method is measured on.

    Args:
        domain: The domain.
        splits: Its data.
        seed: Of the network.
        networks: The network, then others for ensembles, on the device.
        device: Where all of it runs.
        processes: How many such processes work on this machine.
        alone: Within this context the others wait: what is timed must not share the machine.
    """

    domain: Domain
    splits: Splits
    seed: int
    networks: Sequence[nn.Module]
    device: torch.device
    processes: int = 1
    alone: Callable[[], AbstractContextManager[None]] = nullcontext

    @functools.cached_property
    def network(self) -> str:
        """Eight letters for the networks' weights."""
        return network_id(self.networks)

    @property
    def fit_on(self) -> Samples:
        """What methods learn from."""
        return self.splits.train.take(slice(0, self.domain.fit_on))


def measure(setup: Setup, method: str) -> list[Row]:
    """Return the rows of a method, pooled last.

    Args:
        setup: Network and data.
        method: One of `METHODS`.

    Raises:
        ScodError: As a subclass: the method is not for this domain, or failed on it.
    """
    detector = METHODS[method](Case(setup.domain, setup.networks))
    fit_s = fit(detector, setup, method)
    known = scores_of(detector, setup.splits.test, setup.device)
    novel = setup.splits.novel.items()
    scores = {name: scores_of(detector, own, setup.device) for name, own in novel}
    scores[POOLED] = torch.cat(list(scores.values()))
    about = {"method": method, **description(setup)}
    rows = []
    for ood, found in scores.items():
        figures = asdict(separation(known, found))
        sizes = {"num_known": len(known), "num_unknown": len(found)}
        name = f"{setup.domain.name}/{ood}/{method}/{setup.seed}"
        row = {"id": name, **about, "ood": ood, **figures, **sizes}
        if isinstance(detector, Monitor):
            row["histogram"] = histogram(known, found)
        rows.append(row)
    costs = {
        "fit_s": fit_s,
        "bytes": kept_bytes(detector),
        "captured": detector.basis.captured if isinstance(detector, Monitor) else None,
        **_times(detector, setup),  # last, so that others wait for nothing else
    }
    return [{**row, **costs} for row in rows]


def histogram(known: Tensor, unknown: Tensor) -> dict[str, list[float]]:
    """Return shares of scores in bins over their logarithm to base ten.

    Args:
        known: Scores ``(n,)``, >= 0.
        unknown: Scores ``(m,)``.

    Returns:
        ``edges`` of the bins, and the shares ``known`` and ``unknown`` in each; scores of zero
        and infinity are counted in the outermost bins.
    """
    logs = [scores.double().clamp(1e-30, 1e30).log10() for scores in (known, unknown)]
    joined = torch.cat(logs)
    low, high = float(joined.quantile(0.001)), float(joined.quantile(0.999))
    edges = torch.linspace(low, max(high, low + 1e-6), _BINS + 1, dtype=torch.float64)
    shares = [torch.histogram(part.clamp(low, high), edges).hist / len(part) for part in logs]
    return {
        "edges": [round(edge, 4) for edge in edges.tolist()],
        "known": [round(share, 5) for share in shares[0].tolist()],
        "unknown": [round(share, 5) for share in shares[1].tolist()],
    }


def description(setup: Setup) -> Row:
    """Return what every row says of the network, the machine and the versions."""
    return {
        "domain": setup.domain.name,
        "seed": setup.seed,
        "network": setup.network,
        "processes": setup.processes,
        **machine(setup.device),
    }


def fit(detector: Detector, setup: Setup, method: str) -> float:
    """Fit a method with the data at hand.

    Args:
        detector: What `METHODS` makes of the setup.
        setup: Network and data.
        method: Its name, which says what it learns from.

    Returns:
        The seconds it took.
    """
    most = setup.domain.hessian_on if method in HESSIAN else setup.domain.fit_on
    learnt = _at_hand(setup.fit_on.take(slice(0, most)), setup.device)
    tune_on = setup.splits.selection.take(slice(0, _TUNE_ON))
    needed = method in TUNED or isinstance(detector, Fused)
    held_out = _at_hand(tune_on, setup.device) if needed else ()
    wait_for(setup.device)
    began = time.perf_counter()
    detector.fit(learnt, progress=False)
    if method in TUNED:
        assert isinstance(detector, KFACLaplace)
        detector.tune(held_out, progress=False)
    if isinstance(detector, Fused):
        detector.calibrate(held_out, progress=False)
    wait_for(setup.device)
    return time.perf_counter() - began


def _at_hand(samples: Samples, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
    """Return batches that need not be made first: in memory, or made once and kept as bytes."""
    loader = Loader(samples, _batch_size(samples, device), device)
    x, _ = samples.take(slice(0, 1)).read(device)
    if device.type == "cuda" or x.nbytes * len(samples) <= _HELD:
        return list(loader)
    for _ in loader:
        pass
    return loader


def _batch_size(samples: Samples, device: torch.device) -> int:
    """Return how many samples to take at a time: small ones leave a GPU idle."""
    if device.type != "cuda":
        return _BATCH
    x, _ = samples.take(slice(0, 1)).read(device)
    return min(_MOST, max(_BATCH, _LARGE // x.nbytes))


def scores_of(detector: Detector, samples: Samples, device: torch.device) -> Tensor:
    """Return the score ``(n,)`` of every sample, on the CPU."""
    batches = samples.batches(_batch_size(samples, device), device)
    return torch.cat([detector.score(x).cpu() for x, _ in batches])


def _times(detector: Detector, setup: Setup) -> dict[str, float]:
    found: dict[str, float] = {}
    batches = [setup.splits.test.take(slice(0, size)).read(setup.device) for size in _BATCHES]
    with setup.alone():
        for x, _ in batches:
            found |= prediction_times(detector.score, setup.networks[0], x)
    return found
