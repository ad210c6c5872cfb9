"""A network of two weights: the changes of them that the data allows, and what inputs see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import look
import torch
from torch import Tensor, nn

from scodkit import Gaussian, Monitor
from scodkit.sketch import Exact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOISE = 0.1  # standard deviation of a target
KNOWN, FAR = 0.5, 4.0  # one input among the data, one outside


class TwoWeights(nn.Module):
    """``outer * tanh(inner * x)``: near zero only the product of both weights matters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.outer = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions ``(B, 1)``."""
        return self.outer * torch.tanh(self.inner * x)


@dataclass(frozen=True)
class Found:
    """The fitted network, in weight space and at its output.

    Args:
        x: Inputs of the data, ``(M, 1)``.
        y: Their targets.
        weights: The trained weights ``(inner, outer)``.
        kept: Direction of the largest eigenvalue, ``(2,)``.
        values: Eigenvalues of the Fisher information, ``(2,)``.
        around: Weights on the ellipse, ``(steps, 2)``.
        at: Inputs to predict, ``(n, 1)``.
        mean: Predictions there, ``(n,)``.
        score: Scores there, nats.
        slopes: Gradients of the prediction at `KNOWN` and at `FAR`, ``(2, 2)``.
        scores: Scores at `KNOWN` and at `FAR`.
    """

    x: Tensor
    y: Tensor
    weights: Tensor
    kept: Tensor
    values: Tensor
    around: Tensor
    at: Tensor
    mean: Tensor
    score: Tensor
    slopes: Tensor
    scores: Tensor

    @property
    def shares(self) -> Tensor:
        """Share of each squared gradient along the direction that the data determines."""
        return (self.slopes @ self.kept).square() / self.slopes.square().sum(1)


def predicted(weights: Tensor, x: Tensor) -> Tensor:
    """Return predictions ``(steps, n)`` of networks with other weights.

    Args:
        weights: ``(steps, 2)``.
        x: ``(n, 1)``.
    """
    return weights[:, 1:] * torch.tanh(weights[:, :1] * x.T)


def loss(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return ``-log`` of the posterior, without its constant, for each ``(steps, 2)``."""
    errors = (predicted(weights, x) - y.T).square().sum(1) / (2 * NOISE**2)
    return errors + weights.square().sum(1) / 2


def find() -> Found:
    """Train the two weights, fit a monitor, walk around its ellipse."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    y = 1.6 * torch.tanh(0.6 * x) + NOISE * torch.randn(40, 1, dtype=torch.float64)
    net = TwoWeights()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        value = loss(torch.stack([net.inner, net.outer])[None], x, y).sum()
        torch.autograd.backward(value)
        return float(value.detach())

    optimizer.step(closure)
    monitor = Monitor(net, Gaussian(variance=NOISE**2), rank=2, sketch=Exact())
    monitor.fit([x], progress=False)
    values, vectors = monitor.basis.values, monitor.basis.vectors
    weights = torch.stack([net.inner, net.outer]).detach()
    # semi-axes of the ellipse: roots of the eigenvalues of (2 M F + I / eps^2)^-1
    axes = vectors / (2 * len(x) * values + 1).sqrt()
    angles = torch.linspace(0, 2 * math.pi, 361, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()], 1)
    at = torch.linspace(-5, 5, 201, dtype=torch.float64)[:, None]
    two = torch.tensor([[KNOWN], [FAR]], dtype=torch.float64)
    slopes = torch.func.jacrev(lambda w: predicted(w[None], two)[0])(weights)
    return Found(
        x=x, y=y, weights=weights, kept=vectors[:, 0], values=values,
        around=weights + circle @ axes.T, at=at, mean=predicted(weights[None], at)[0],
        score=monitor.score(at), slopes=slopes, scores=monitor.score(two),
    )  # fmt: skip


def draw(found: Found) -> Figure:
    """Draw the weights above and the predictions below."""
    figure, (above, below) = look.panels((4.0, 2.9))
    _weights(above, found)
    _predictions(below, found)
    return figure


def _weights(axes: Axes, found: Found) -> None:
    inner, outer = (torch.linspace(a, b, 160, dtype=torch.float64) for a, b in AREA)
    grid = torch.cartesian_prod(inner, outer)
    height = loss(grid, found.x, found.y).view(160, 160).T
    lowest = float(loss(found.weights[None], found.x, found.y))
    levels = [lowest + step for step in (0.5, 2, 8, 32, 128)]
    axes.contour(inner, outer, height, levels=levels, colors=look.GREY, linewidths=0.8)
    axes.text(0.14, 0.68, "lines of equal loss", color="dimgrey", **look.SMALL)
    axes.fill(*found.around.T, color=look.GREEN, alpha=0.35, lw=0)
    axes.plot(*found.around.T, color=look.GREEN, lw=1.5)
    start = found.weights
    axes.plot(*start, "o", color="black", ms=4)
    for slope, colour, text, place in zip(
        found.slopes,
        (look.BLUE, look.RED),
        (
            f"gradient at x = {KNOWN}:\nacross the ellipse",
            f"gradient at x = {FAR:g}:\nmostly along it",
        ),
        ((0, 7), (6, 0)),
        strict=True,
    ):
        tip = start + 0.55 * slope / slope.norm()
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tip.tolist(), start.tolist(), arrowprops=arrow)
        axes.annotate(
            text, tip.tolist(), place, textcoords="offset points", color=colour, **look.SMALL
        )
    look.name_axes(axes, "weight inside the tanh", "weight outside", aspect="equal")
    look.title(axes, "Weights: the data forbids one direction")


AREA = ((0.1, 1.7), (0.65, 2.25))


def _predictions(axes: Axes, found: Found) -> None:
    at, half = found.at[:, 0], NOISE * found.score.sqrt()
    axes.fill_between(
        at, found.mean - half, found.mean + half, color=look.GREEN, alpha=0.3, lw=0
    )
    for curve in predicted(found.around[::15], found.at):
        axes.plot(at, curve, color=look.GREEN, lw=0.5)
    axes.plot(at, found.mean, color="black", lw=1.5)
    axes.plot(found.x[:, 0], found.y[:, 0], ".", color=look.GREY, ms=4)
    for x, score, colour in zip((KNOWN, FAR), found.scores, (look.BLUE, look.RED), strict=True):
        axes.axvline(x, color=colour, lw=1.2, ls="--")
        text = f" score {float(score):.2g} nats"
        side = "left" if x == KNOWN else "right"
        axes.text(x, -1.85 if x == KNOWN else -1.35, text, color=colour, ha=side, **look.SMALL)
    look.name_axes(axes, "input x", "prediction")
    look.title(axes, "Predictions of all weights on that ellipse")
