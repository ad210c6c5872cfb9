"""Draw scores of digits a network knows and of digits it does not: ``make picture``."""

from __future__ import annotations

import sys

import matplotlib as mpl
import torch

from scodkit import Categorical, Monitor
from scodkit.cli.demo import load_digits, train

KNOWN, NOVEL = "#0072B2", "#D55E00"  # told apart by colour-blind readers


def spread(scores: torch.Tensor) -> torch.Tensor:
    """Return six samples, from the least to the most atypical, evenly by rank."""
    ranks = torch.linspace(0, len(scores) - 1, 6).round().long()
    return scores.argsort()[ranks]


def main() -> None:
    """Fit on the digits 0-4, score both kinds, draw."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["font.size"] = 11.5
    digits = load_digits()
    test, novel = digits.test_x, digits.novel_x
    net = train(digits.train_x, digits.train_y)
    monitor = Monitor(net, Categorical(), rank=50).fit([digits.train_x], progress=False)
    monitor.calibrate([digits.heldout_x], progress=False)
    assert monitor.calibration is not None
    threshold = monitor.calibration.threshold(0.05)
    scores, novel_scores = monitor.score(test), monitor.score(novel)

    figure = plt.figure(figsize=(5.6, 5.4), dpi=150, layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    axis = top.subplots()
    bins = torch.logspace(torch.log10(scores.min()), torch.log10(novel_scores.max()), 45)
    for values, colour, label in (
        (scores, KNOWN, "digits 0-4, held out"),
        (novel_scores, NOVEL, "digits 5-9, never seen"),
    ):
        share = torch.full((len(values),), 100 / len(values))
        axis.hist(
            values, bins=bins.tolist(), weights=share, alpha=0.65, color=colour, label=label
        )
    axis.set_ylim(0, axis.get_ylim()[1] * 1.35)
    axis.axvline(threshold, color="black", lw=1.2, ls="--")
    axis.annotate(
        "alarm (5 %\nfalse alarms)",
        (threshold, axis.get_ylim()[1]),
        xytext=(5, -3),
        textcoords="offset points",
        va="top",
    )
    axis.set(xscale="log", xlabel="SCOD score (nats)", ylabel="% of images")
    axis.legend(loc="upper left", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)

    cells = bottom.subplots(2, 6)
    rows = (
        ("0-4", test, scores, KNOWN, spread(scores)),
        ("5-9", novel, novel_scores, NOVEL, spread(novel_scores)),
    )
    for cell_row, (name, pictures, values, colour, chosen) in zip(cells, rows, strict=True):
        cell_row[0].set_ylabel(name, color=colour, weight="bold")
        for cell, i in zip(cell_row, chosen.tolist(), strict=True):
            cell.imshow(pictures[i, 0], cmap="gray_r")
            flagged = float(values[i]) > threshold
            cell.set_title(f"{float(values[i]):.2g}" + (" !" if flagged else ""), fontsize=11)
            cell.set(xticks=[], yticks=[])
            for spine in cell.spines.values():
                spine.set(color=colour, lw=2)
    bottom.suptitle("from least to most atypical ( ! = alarm )", fontsize=11.5)
    figure.savefig(sys.argv[1], facecolor="white", metadata={"Software": None})


if __name__ == "__main__":
    main()
