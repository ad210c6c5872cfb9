"""Rates within each class: one threshold for all, and one of each class's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import look
import torch
from torch import Tensor

from scodkit import Calibration, Categorical, Monitor, predicted_class
from scodkit.cli.demo import load_digits, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATE, SPLITS, CLASSES = 0.05, 1000, 5


@dataclass(frozen=True)
class Found:
    """False-alarm rates of digits 0-4, by the class the network takes them for.

    Args:
        pooled: With one threshold for all classes, ``(SPLITS, CLASSES)``.
        by_class: With a threshold for each class.
    """

    pooled: Tensor
    by_class: Tensor


def find() -> Found:
    """Split digits into held-out and new ones, again and again."""
    digits = load_digits()
    net = train(digits.train_x, digits.train_y)
    monitor = Monitor(net, Categorical(), rank=50).fit([digits.train_x], progress=False)
    scored = monitor(torch.cat([digits.heldout_x, digits.test_x]))
    score, group = scored.score.double(), predicted_class(scored.output)
    draw = torch.Generator().manual_seed(0)
    pooled, by_class = [], []
    for _ in range(SPLITS):
        held, new = torch.randperm(len(score), generator=draw).tensor_split(2)
        one = Calibration(score[held]).flag(score[new], RATE)
        each = Calibration(score[held], group[held])
        own = each.flag(score[new], RATE, groups=group[new])
        pooled.append(rates(one, group[new]))
        by_class.append(rates(own, group[new]))
    return Found(torch.stack(pooled), torch.stack(by_class))


def rates(flags: Tensor, group: Tensor) -> Tensor:
    """Return the share of flags in each class, ``(CLASSES,)``."""
    return torch.stack([flags[group == k].double().mean() for k in range(CLASSES)])


def draw(found: Found) -> Figure:
    """Draw both kinds of rate beside each other."""
    figure, (axes,) = look.panels((2.6,))
    places = range(CLASSES)
    for side, rate, colour, name in (
        (-0.2, found.pooled, look.ORANGE, "one threshold"),
        (0.2, found.by_class, look.BLUE, "by=predicted_class"),
    ):
        mean, error = 100 * rate.mean(0), 100 * rate.std(0) / SPLITS**0.5
        heights, bars = mean.tolist(), (2 * error).tolist()
        at = [place + side for place in places]
        axes.bar(at, heights, 0.4, yerr=bars, color=colour, label=name)
    axes.axhline(100 * RATE, color="black", ls="--", lw=1)
    axes.set_xticks(places, [f"digit {k}" for k in places])
    look.name_axes(axes, "predicted class", "false alarms, %")
    look.title(axes, "Mean rates of 1,000 splits, 5 % asked for")
    look.key(axes)
    return figure
