"""One method on one trained network: fitted, timed, judged; a row for each unknown set."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn

from scodkit.baselines import Baseline, Detector, KFACLaplace
from scodkit.bench.domain import Domain, Splits
from scodkit.bench.methods import METHODS, TUNED, Case
from scodkit.bench.metrics import separation
from scodkit.bench.rows import Row
from scodkit.bench.samples import Loader, Samples
from scodkit.errors import MissingPeerError, ScodError
from scodkit.monitor import Monitor
from scodkit.version import __version__

POOLED = "pooled"
_FIT_BATCH = 128
_BATCHES = (1, 64)  # that are timed
_TIMED_RUNS = 7
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
    """

    domain: Domain
    splits: Splits
    seed: int
    networks: Sequence[nn.Module]
    device: torch.device

    @property
    def fit_on(self) -> Samples:
        """What methods learn from."""
        return self.splits.train.take(slice(0, self.domain.fit_on))


def measure(setup: Setup, method: str) -> list[Row]:
    """Return the rows of a method, pooled last; one without figures where it is not for this.

    Args:
        setup: Network and data.
        method: One of `METHODS`.

    Raises:
        MissingPeerError: If a library the method stands on is not installed.
    """
    about = {"method": method, **description(setup)}
    try:
        detector = METHODS[method](Case(setup.domain, setup.networks))
        fit_s = _fit(detector, setup, tuned=method in TUNED)
        # of the known test samples under no name
        sets: Mapping[str, Samples] = {"": setup.splits.test, **setup.splits.novel}
        scores = {name: scores_of(detector, own, setup.device) for name, own in sets.items()}
    except MissingPeerError:
        raise  # of this machine, not of the method
    except (ScodError, np.linalg.LinAlgError) as error:
        why = str(error)
        return [{"id": _id(about, POOLED), **about, "ood": POOLED, "auroc": None, "why": why}]
    costs = {
        **_times(detector, setup),
        "fit_s": fit_s,
        "bytes": kept_bytes(detector),
        "captured": detector.basis.captured if isinstance(detector, Monitor) else None,
    }
    known = scores.pop("")
    rows = []
    for ood, found in (*scores.items(), (POOLED, torch.cat(list(scores.values())))):
        figures = asdict(separation(known, found))
        sizes = {"num_known": len(known), "num_unknown": len(found)}
        row = {"id": _id(about, ood), **about, "ood": ood, **figures, **sizes, **costs}
        if isinstance(detector, Monitor):
            row["histogram"] = histogram(known, found)
        rows.append(row)
    return rows


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
        "device": device_name(setup.device),
        "scodkit": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _id(about: Row, ood: str) -> str:
    return f"{about['domain']}/{ood}/{about['method']}/{about['seed']}"


def _fit(detector: Detector, setup: Setup, tuned: bool) -> float:
    began = time.perf_counter()
    detector.fit(Loader(setup.fit_on, _FIT_BATCH, setup.device), progress=False)
    if tuned:
        assert isinstance(detector, KFACLaplace)
        held_out = setup.splits.selection.take(slice(0, _TUNE_ON))
        detector.tune(Loader(held_out, _FIT_BATCH, setup.device), progress=False)
    _wait(setup.device)
    return time.perf_counter() - began


def scores_of(detector: Detector, samples: Samples, device: torch.device) -> Tensor:
    """Return the score ``(n,)`` of every sample, on the CPU."""
    batches = samples.batches(_FIT_BATCH, device)
    return torch.cat([detector.score(x).cpu() for x, _ in batches])


def _times(detector: Detector, setup: Setup) -> dict[str, float]:
    """Return milliseconds a sample of scored predictions and, beside them, of bare ones."""
    found = {}
    model = setup.networks[0]
    for size in _BATCHES:
        x, _ = setup.splits.test.take(slice(0, size)).read(setup.device)

        def forward(x: Tensor = x) -> object:
            with torch.no_grad():
                return model(x)

        def score(x: Tensor = x) -> object:
            return detector.score(x)

        runs = {f"ms_b{size}": score, f"forward_ms_b{size}": forward}
        for name, seconds in _in_turns(runs, setup.device).items():
            found[name] = seconds * 1e3 / len(x)
    return found


def _in_turns(
    runs: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, float]:
    """Return the median seconds of each run; they take turns, to share a slow moment."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(_TIMED_RUNS + 1):
        for name, run in runs.items():
            _wait(device)
            began = time.perf_counter()
            run()
            _wait(device)
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in seconds.items()}


def kept_bytes(detector: Detector) -> int:
    """Return the bytes a detector keeps for scoring, besides the one network."""
    if isinstance(detector, Monitor):
        return detector.basis.vectors.nbytes + detector.basis.values.nbytes
    assert isinstance(detector, Baseline)
    others = detector._models()[1:]
    weights = sum(p.nbytes for model in others for p in model.parameters())
    return weights + sum(tensor.nbytes for tensor in detector._ready().values())


def device_name(device: torch.device) -> str:
    """Return a device in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
