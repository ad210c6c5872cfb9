"""Realised false-alarm rates of calibrated scores, over many draws of the held-out data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import control
import look
import torch
from scipy import stats
from torch import Tensor

from scodkit import Calibration, Monitor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RATE, CONFIDENCE = 0.05, 0.9
DRAWS = 2000  # of held-out data
SIZES = (100, 1000)  # held-out samples
SCALES = torch.linspace(0.8, 1.6, 9)  # what inputs are multiplied with as they drift
POOL = 20_000


@dataclass(frozen=True)
class Found:
    """True false-alarm rates of thresholds, each from a held-out set of its own.

    Args:
        rates: By number of held-out samples and confidence (None for on average), ``(DRAWS,)``.
        drifted: Rates of 100 thresholds from 1,000 held-out samples each, on inputs that are
            scaled by each of `SCALES`, ``(scales, 100)``.
    """

    rates: dict[tuple[int, float | None], Tensor]
    drifted: Tensor


def find() -> Found:
    """Score a pool of new inputs once; draw held-out sets from it."""
    made = control.trained()
    monitor = Monitor(made.net, control.LIKELIHOOD, rank=50)
    monitor.fit(made.x.split(250), progress=False)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(POOL, 6, generator=draw, dtype=torch.float64)
    pool = monitor.score(inputs)
    rates = {
        (size, confidence): torch.stack(
            [rate_of(pool, size, confidence, draw) for _ in range(DRAWS)]
        )
        for size in SIZES
        for confidence in (None, CONFIDENCE)
    }
    thresholds = [threshold(pool, 1000, None, draw)[0] for _ in range(100)]
    drifted = torch.stack([monitor.score(scale * inputs[:5000]) for scale in SCALES])
    above = drifted[..., None] > torch.tensor(thresholds).double()
    return Found(rates, above.double().mean(1))


def threshold(
    pool: Tensor, size: int, confidence: float | None, draw: torch.Generator
) -> tuple[float, Tensor]:
    """Return the threshold of a random held-out set, and the scores that are not in it."""
    held, new = pool[torch.randperm(len(pool), generator=draw)].tensor_split([size])
    return Calibration(held).threshold(RATE, confidence=confidence), new


def rate_of(pool: Tensor, size: int, confidence: float | None, draw: torch.Generator) -> Tensor:
    """Return the false-alarm rate of the threshold of a random held-out set."""
    limit, new = threshold(pool, size, confidence, draw)
    return (new > limit).double().mean()


def draw(found: Found) -> Figure:
    """Draw the rates on average, with a confidence, and under drift."""
    figure, (average, confident, drifting) = look.panels((2.1, 2.1, 2.2))
    _histograms(average, found, None)
    look.title(average, "Asked for 5 %: the rates of 2,000 held-out sets")
    _histograms(confident, found, CONFIDENCE)
    look.title(confident, "The same with confidence=0.9")
    look.name_axes(confident, "realised false-alarm rate, %", "% of held-out sets")
    look.name_axes(average, "", "% of held-out sets")
    low, high = 100 * found.drifted.quantile(torch.tensor([0.05, 0.95]).double(), dim=1)
    drifting.fill_between(SCALES, low, high, color=look.BLUE, alpha=0.3, lw=0)
    drifting.plot(SCALES, 100 * found.drifted.mean(1), color=look.BLUE, marker="o", ms=3)
    drifting.axhline(100 * RATE, color="black", ls="--", lw=1)
    look.name_axes(drifting, "scale of new inputs (held-out data: 1)", "% alarms")
    drifting.set_ylim(0, None)
    look.title(drifting, "Under drift nothing is promised (band: 90 % of sets)")
    return figure


def _histograms(axes: Axes, found: Found, confidence: float | None) -> None:
    at = torch.linspace(0, 0.15, 301)
    width = 0.005
    bins = torch.arange(0, 0.1501, width)
    for size, colour in zip(SIZES, (look.ORANGE, look.BLUE), strict=True):
        rates = found.rates[size, confidence]
        share = torch.full_like(rates, 100 / len(rates))
        axes.hist(
            100 * rates, (100 * bins).tolist(), weights=share, color=colour, alpha=0.55,
            label=f"n = {size:,}: mean {100 * float(rates.mean()):.1f} %",
        )  # fmt: skip
        above = allowed(size, confidence)
        density = stats.beta(above + 1, size - above).pdf(at)
        axes.plot(100 * at, 100 * width * density, color=colour, lw=1.6)
    axes.axvline(100 * RATE, color="black", ls="--", lw=1)
    look.key(axes, loc="upper right")


def allowed(size: int, confidence: float | None) -> int:
    """Return how many of the held-out scores lie above their threshold."""
    scores = torch.arange(float(size))
    return int((scores > Calibration(scores).threshold(RATE, confidence=confidence)).sum())
