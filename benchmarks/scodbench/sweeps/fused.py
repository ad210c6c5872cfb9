"""What each part of `Fused` is worth, whether its rates hold, and what it is fooled by.

One fit and one pass over the data of a domain give the parts of every sample; all rows are made
of these, and of the network's outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from scodbench.measure import POOLED, Setup
from scodbench.methods import METHODS, Case
from scodbench.rows import Row
from scodbench.samples import Samples
from scodbench.sweeps.points import RESAMPLES, sweep_row
from scodkit import Bernoulli, Categorical, Fused, LastLayers
from scodkit.baselines import MaxSoftmax, Naive
from scodkit.calibration import Calibration
from scodkit.errors import CalibrationError
from scodkit.fused.standard import Standard
from scodkit.metrics import separation
from scodkit.monitor import Monitor
from scodkit.scoring.evidence import is_classifier

_BATCH = 128
_SPLITS = 200
_RATES = (0.01, 0.05, 0.1)
_CONFIDENCE = 0.9
_HELD_OUT = 1000
_ABSURD_ON = 500
_MANY_WEIGHTS = 1_000_000  # with more of them backward passes take hours on a CPU
_FEW_OUTPUTS = 32  # with more of them SCOD takes minutes


@dataclass(frozen=True)
class Found:
    """What a network and `Fused` make of a set of inputs.

    Args:
        parts: Raw parts ``(n, P)``.
        score: Fused ``(n,)``.
        output: Of the network, ``(n, *shape)``.
        targets: True ones, ``(n, ...)``.
    """

    parts: Tensor
    score: Tensor
    output: Tensor
    targets: Tensor


def fused_sweep(setup: Setup) -> Iterator[Row]:
    """Yield the rows of a domain's network.

    Args:
        setup: Network and data.
    """
    fused = fitted(setup)
    known = look(fused, setup.splits.test, setup.device)
    held = look(fused, setup.splits.selection, setup.device)
    novel = {name: look(fused, own, setup.device) for name, own in setup.splits.novel.items()}
    for row in itertools.chain(
        _separations(fused, known, novel),
        _combinations(known, held, novel),
        _with_gradients(setup, fused),
        _false_alarms(fused, torch.cat([held.parts, known.parts])),
        _absurd(setup, fused),
        _failures(setup, fused, known, novel),
    ):
        choice = {"study": row.pop("study"), "name": row.pop("name")}
        yield sweep_row(setup, "fused", row.pop("ood", POOLED), choice, **row)


def fitted(setup: Setup, parameters: LastLayers | None = None) -> Fused:
    """Return `Fused`, fitted and calibrated on a domain's known data.

    Args:
        setup: Network and data.
        parameters: Which weights; None for what `Fused` chooses.
    """
    fused = Fused(setup.networks[0], setup.domain.likelihood, parameters=parameters)
    fused.fit(setup.fit_on.batches(_BATCH, setup.device), progress=False)
    held_out = setup.splits.selection.batches(_BATCH, setup.device)
    return fused.calibrate(held_out, progress=False)


def look(fused: Fused, samples: Samples, device: torch.device) -> Found:
    """Return what a network and `Fused` make of a set of inputs.

    Args:
        fused: Fitted and calibrated.
        samples: The inputs.
        device: Of the network.
    """
    parts_of, (standard, _) = fused._ready(), fused._calibrated()
    columns: list[tuple[Tensor, ...]] = []
    for x, targets in samples.batches(_BATCH, device):
        output, parts = parts_of(x)
        found = (parts, standard.contributions(parts).sum(1), output, targets)
        columns.append(tuple(column.cpu() for column in found))
    return Found(*(torch.cat(column) for column in zip(*columns, strict=True)))


def _separations(fused: Fused, known: Found, novel: dict[str, Found]) -> Iterator[Row]:
    """Yield AUROC and the like of the fused score, each part, and each choice of parts."""
    joined = torch.cat([own.parts for own in novel.values()])
    scores = torch.cat([own.score for own in novel.values()])
    sets = {**{name: own.score for name, own in novel.items()}, POOLED: scores}
    for ood, score in sets.items():
        yield _separation("fused", ood, known.score, score)
    for i, name in enumerate(fused.names):
        for ood, own in novel.items():
            yield _separation(name, ood, known.parts[:, i], own.parts[:, i])
        yield _separation(name, POOLED, known.parts[:, i], joined[:, i])
    standard, _ = fused._calibrated()
    mine, theirs = (standard.contributions(parts) for parts in (known.parts, joined))
    for size in range(2, len(fused.names) + 1):
        for chosen in itertools.combinations(range(len(fused.names)), size):
            some = list(chosen)
            name = " + ".join(fused.names[i] for i in some)
            yield _separation(name, POOLED, mine[:, some].sum(1), theirs[:, some].sum(1))


def _combinations(known: Found, held: Found, novel: dict[str, Found]) -> Iterator[Row]:
    """Yield AUROC and the like of the same parts, combined by their held-out p-values."""
    joined = torch.cat([own.parts for own in novel.values()])
    mine, theirs = (middle_p_values(parts, held.parts) for parts in (known.parts, joined))
    for name, rule in COMBINED.items():
        row = _separation(name, POOLED, rule(mine), rule(theirs))
        yield {**row, "study": "combination"}


def middle_p_values(parts: Tensor, held_out: Tensor) -> Tensor:
    """Return the p-value of each part, ties counted half, so that none is 0 or 1.

    Args:
        parts: ``(n, P)``, larger = more atypical.
        held_out: ``(m, P)``.

    Returns:
        ``(n, P)`` inside (0, 1), float64.

    Examples:
        >>> middle_p_values(torch.tensor([[2.0]]), torch.tensor([[1.0], [2.0], [3.0]]))
        tensor([[0.5000]], dtype=torch.float64)
    """
    columns = []
    for part, held in zip(parts.T, held_out.T.contiguous().sort(1).values, strict=True):
        below = torch.searchsorted(held, part.contiguous())
        at_most = torch.searchsorted(held, part.contiguous(), right=True)
        columns.append(1 - (0.5 + 0.5 * (below + at_most).double()) / (len(held) + 1))
    return torch.stack(columns, 1)


def _simes(p: Tensor) -> Tensor:
    places = torch.arange(1, p.shape[1] + 1, dtype=p.dtype)
    return -(p.sort(1).values / places).amin(1)


# larger = more atypical; p-values (n, P) in, scores (n,) out
COMBINED: dict[str, Callable[[Tensor], Tensor]] = {
    "Fisher": lambda p: -p.log().sum(1),
    "Stouffer": lambda p: -torch.special.ndtri(p).sum(1),
    "Simes": _simes,
    "smallest": lambda p: -p.amin(1),
}


def _with_gradients(setup: Setup, fused: Fused) -> Iterator[Row]:
    """Yield AUROC and the like of a classifier's `Fused` with backward passes."""
    network = setup.networks[0]
    outputs = network(setup.splits.test.take(slice(0, 1)).read(setup.device)[0]).numel()
    weights = sum(p.numel() for p in network.parameters())
    if not is_classifier(fused.likelihood) or outputs > _FEW_OUTPUTS or weights > _MANY_WEIGHTS:
        return
    full = fitted(setup, setup.domain.last_layers)
    known, *novel = (
        look(full, own, setup.device).score
        for own in (setup.splits.test, *setup.splits.novel.values())
    )
    row = _separation("last layers", POOLED, known, torch.cat(novel))
    yield {**row, "study": "backward passes"}


def _separation(name: str, ood: str, known: Tensor, unknown: Tensor) -> Row:
    figures = asdict(separation(known, unknown, resamples=RESAMPLES))
    return {"study": "separation", "name": name, "ood": ood, **figures}


def _false_alarms(fused: Fused, parts: Tensor) -> Iterator[Row]:
    """Yield mean false-alarm rates over random splits of known data.

    Every split is an even draw from all of them, so that the mean has no bias but that of
    `Fused`, and its standard error is that of so many draws.
    """
    count = min(_HELD_OUT, len(parts) // 2)
    generator = torch.Generator().manual_seed(0)
    rates: dict[tuple[float, float | None], list[float]] = {}
    for _ in range(_SPLITS):
        order = torch.randperm(len(parts), generator=generator)
        quarter, rest, new = order[: count // 4], order[count // 4 : count], order[count:]
        standard = Standard.of(parts[quarter])
        calibration = Calibration(standard.contributions(parts[rest]).sum(1))
        score = standard.contributions(parts[new]).sum(1)
        for rate, confidence in itertools.product(_RATES, (None, _CONFIDENCE)):
            try:
                flags = calibration.flag(score, rate, confidence=confidence)
            except CalibrationError:  # too few held-out samples for that
                continue
            rates.setdefault((rate, confidence), []).append(float(flags.double().mean()))
    for (rate, confidence), found in rates.items():
        each = torch.tensor(found, dtype=torch.float64)
        steps = count - count // 4 + 1
        yield {
            "study": "false alarms",
            "name": f"{rate}" if confidence is None else f"{rate}, confidence {confidence}",
            "rate": rate,
            "confidence": confidence,
            "expected": int(rate * steps + 1e-9) / steps if confidence is None else None,
            "mean": float(each.mean()),
            "standard_error": float(each.std() / _SPLITS**0.5),
            "within": float((each <= rate).double().mean()),
            "held_out": count,
        }


def _absurd(setup: Setup, fused: Fused) -> Iterator[Row]:
    """Yield shares flagged at 5 % of inputs that no classifier of images should take."""
    x, _ = setup.splits.test.take(slice(0, _ABSURD_ON)).read()
    few = setup.networks[0](x[:1].to(setup.device)).numel() <= _FEW_OUTPUTS
    if x.ndim != 4 or not is_classifier(fused.likelihood) or not few:
        return
    low, high = float(x.min()), float(x.max())
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "known": x,
        "known x 2": 2 * x,
        "known x 16": 16 * x,
        "known x 255": 255 * x,
        "all pixels 100": torch.full_like(x[:8], 100.0),
        "inverted": low + high - x,
        "blank": torch.full_like(x[:8], low),
        "white": torch.full_like(x[:8], high),
        "uniform noise": low + (high - low) * torch.rand(x.shape, generator=generator),
        "normal noise": torch.randn(x.shape, generator=generator),
    }
    scod = METHODS["scod_ll"](Case(setup.domain, setup.networks))
    assert isinstance(scod, Monitor)
    scod.fit(setup.fit_on.batches(_BATCH, setup.device), progress=False)
    scod.calibrate(setup.splits.selection.batches(_BATCH, setup.device), progress=False)
    for name, batch in inputs.items():
        flagged = {
            method: float(
                torch.cat([own.flag(part, 0.05) for part in torch.split(batch, _BATCH)])
                .double()
                .mean()
            )
            for method, own in (("fused", fused), ("scod", scod))
        }
        yield {"study": "absurd inputs", "name": name, **flagged}


def _failures(
    setup: Setup, fused: Fused, known: Found, novel: dict[str, Found]
) -> Iterator[Row]:
    """Yield how well scores rank a classifier's own mistakes, on known and on mixed data.

    The area under risk against coverage: mean share of mistakes among the inputs that score
    lowest, over all shares of them that are kept; lower is better. Unknown inputs count as
    mistakes.
    """
    likelihood = fused.likelihood
    single = known.output.ndim == 2 and (
        isinstance(likelihood, Categorical)
        or (isinstance(likelihood, Bernoulli) and known.output.shape[1] == 1)
    )
    if not single:
        return
    model = setup.networks[0]
    others = {"max softmax": MaxSoftmax(model, likelihood), "entropy": Naive(model, likelihood)}
    sets = [setup.splits.test, *setup.splits.novel.values()]
    scores = {"fused": [known.score, *(own.score for own in novel.values())]}
    for i, name in enumerate(fused.names):
        scores[name] = [known.parts[:, i], *(own.parts[:, i] for own in novel.values())]
    for name, method in others.items():
        scores[name] = [
            torch.cat([method.score(x) for x, _ in own.batches(_BATCH)]) for own in sets
        ]
    if known.output.shape[1] == 1:
        wrong = (known.output[:, 0] > 0) != known.targets.flatten().bool()
    else:
        wrong = known.output.argmax(1) != known.targets.flatten()
    unknown = torch.ones(sum(len(own.score) for own in novel.values()), dtype=torch.bool)
    for name, found in scores.items():
        row = {"study": "failures", "name": name, "error": float(wrong.double().mean())}
        row["aurc_known"] = area_under_risk(found[0], wrong)
        row["aurc_mixed"] = area_under_risk(torch.cat(found), torch.cat([wrong, unknown]))
        yield row


def area_under_risk(score: Tensor, wrong: Tensor) -> float:
    """Return the mean share of mistakes over all coverages; inputs that score low are kept.

    Args:
        score: ``(n,)``, larger = less to be trusted.
        wrong: ``(n,)``, True for mistakes.

    Examples:
        >>> area_under_risk(torch.tensor([1.0, 2.0]), torch.tensor([False, True]))
        0.25
    """
    ordered = wrong[score.argsort(stable=True)].double()
    kept = torch.arange(1, len(ordered) + 1, dtype=torch.float64)
    return float((ordered.cumsum(0) / kept).mean())
