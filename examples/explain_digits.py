"""Explain the scores of two digits, one of a kind the network knows and one it does not.

Run with ``python examples/explain_digits.py docs/images/explain.png``.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor

from scodkit import Categorical, Monitor
from scodkit.cli.demo import load_digits, train
from scodkit.explain import plots


def median(scores: Tensor) -> int:
    """Return the place of the sample in the middle."""
    return int(scores.argsort()[len(scores) // 2])


def main() -> None:
    """Fit on the digits 0-4, explain a held-out one and one of 5-9, draw."""
    digits = load_digits()
    x, y = digits.train_x, digits.train_y
    net = train(x, y)
    monitor = Monitor(net, Categorical(), rank=50).fit([x], progress=False)
    references = monitor.references([x], progress=False)

    figure = plots.new_figure(12.0, 4.4)
    for part, kind, pictures, names in zip(
        figure.subfigures(2, 1, hspace=0.04),
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
        layers, classes = told.layers, told.directions
        panels = [
            partial(plots.image, pixels=one[0], title=f"a {int(names[i])}, {kind}"),
            partial(plots.slope_map, gradient=told.saliency.gradient[0]),
            partial(plots.shares, names=layers.names, values=layers.values, top=8),
            partial(plots.shares, names=classes.names, values=classes.values, top=8),
        ]
        for j, far in zip(
            told.nearest.index[0].tolist(), told.nearest.distance[0], strict=True
        ):
            title = f"a {int(y[j])}, at {far:.2g}"
            panels.append(partial(plots.image, pixels=x[j], title=title))
        title = f"predicted {told.predictions[0]}, score {float(told.score):.2g} nats"
        part.suptitle(title, fontsize=10, x=0.01, ha="left")
        places = part.subplots(1, len(panels), width_ratios=[1.2, 1.5, 1.9, 1.7, 1, 1, 1])
        for axes, draw in zip(places, panels, strict=True):
            draw(axes)
        places[2].set_title("by layer", fontsize=8)
        places[3].set_title("by class", fontsize=8)
        middle = places[5]
        place = {"transform": middle.transAxes, "ha": "center", "fontsize": 8}
        middle.text(0.5, 1.28, "nearest training images", **place)
    figure.savefig(sys.argv[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
