"""Explain the scores of two digits, one of a kind the network knows and one it does not.

Run with ``python examples/explain_digits.py docs/images/explain.png``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor

from scodkit import Categorical, Monitor
from scodkit.cli.demo import load_digits, train
from scodkit.explain import plots


def median(scores: Tensor) -> int:
    """Return the place of the sample in the middle."""
    return int(scores.argsort()[len(scores) // 2])


def bars(axes: Any, names: Sequence[str], values: Tensor, title: str) -> None:
    """Draw shares in per cent of their sum, in an order that is the same in both digits."""
    shares = 100 * values / values.sum()
    axes.barh(range(len(names)), shares.tolist(), color=plots.RAISES)
    axes.set(yticks=range(len(names)), yticklabels=names, xlim=(0, 100))
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Fit on the digits 0-4, explain a held-out one and one of 5-9, draw."""
    mpl.rcParams.update({"font.size": 9.5, "axes.titlesize": 10})
    digits = load_digits()
    x, y = digits.train_x, digits.train_y
    net = train(x, y)
    monitor = Monitor(net, Categorical(), rank=50).fit([x], progress=False)
    references = monitor.references([x], progress=False)

    figure = plots.new_figure(4.8, 7.4)
    for part, kind, pictures, names in zip(
        figure.subfigures(1, 2, wspace=0.04),
        ("held out", "never seen"),
        (digits.test_x, digits.novel_x),
        (digits.test_y, digits.novel_y),
        strict=True,
    ):
        i = median(monitor.score(pictures))
        one = pictures[i : i + 1]
        told = monitor.explain(one, saliency=True, references=references)
        assert told.saliency is not None
        assert told.nearest is not None
        head, layers, classes, nearest = part.subfigures(
            4, 1, height_ratios=(1.5, 1, 1.25, 1.15)
        )
        part.suptitle(f"a {int(names[i])}, {kind}", weight="bold", fontsize=11)
        head.suptitle(f"predicted {told.predictions[0]}\nscore {float(told.score):.2g} nats")
        image, slopes = head.subplots(1, 2, width_ratios=(1, 1.3))
        plots.image(image, one[0], "")
        plots.slope_map(slopes, told.saliency.gradient[0])
        slopes.set_title("slope,\nnats per unit", fontsize=9)
        kinds = [name.partition(" (")[0] for name in told.layers.names]
        bars(layers.subplots(), kinds, told.layers.values[0], "% of score, by layer")
        shown = told.directions
        bars(classes.subplots(), shown.names, shown.values[0], "% of score, by class")
        nearest.suptitle("nearest training images,\ndistance in √nats", fontsize=9)
        found = zip(told.nearest.index[0].tolist(), told.nearest.distance[0], strict=True)
        for axes, (j, far) in zip(nearest.subplots(1, 3), found, strict=True):
            plots.image(axes, x[j], f"a {int(y[j])}: {far:.2g}")
    figure.savefig(sys.argv[1], metadata=plots.png_metadata(figure))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
