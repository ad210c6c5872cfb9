"""A regressor with a gap in its data: entropy has nothing to say, the score has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import look
import torch
from torch import Tensor, nn

from scodkit import Gaussian, Monitor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOISE = 0.1  # standard deviation of a target
INTERVALS = ((-4.0, -1.0), (1.5, 4.0))  # where there is data


@dataclass(frozen=True)
class Found:
    """A curve that was fitted in two intervals, and its score on a wider one.

    Args:
        x: Inputs of the training data, ``(M, 1)``.
        y: Their targets.
        at: Inputs to score, ``(n, 1)``.
        mean: Predictions there.
        truth: What the targets are noisy values of.
        score: Scores there, nats.
        entropy: Entropy of the predicted distribution there, nats.
        threshold: Score that 5 % of held-out inputs are above.
    """

    x: Tensor
    y: Tensor
    at: Tensor
    mean: Tensor
    truth: Tensor
    score: Tensor
    entropy: Tensor
    threshold: float

    @property
    def inside(self) -> Tensor:
        """Whether there was data, for each input that is scored."""
        x = self.at[:, 0]
        return sum((x >= a) & (x <= b) for a, b in INTERVALS) > 0

    @property
    def gap(self) -> Tensor:
        """Whether an input lies in the gap, or outside of all data, by half a unit or more."""
        x = self.at[:, 0]
        return ~(sum((x > a - 0.5) & (x < b + 0.5) for a, b in INTERVALS) > 0)


def truth(x: Tensor) -> Tensor:
    """Return the curve without noise."""
    return torch.sin(1.5 * x) + 0.3 * x


def draw_inputs(count: int) -> Tensor:
    """Return inputs ``(count, 1)``, evenly from both intervals."""
    parts = [a + (b - a) * torch.rand(count // 2, 1) for a, b in INTERVALS]
    return torch.cat(parts)


def find() -> Found:
    """Train on two intervals, fit, calibrate, score the line."""
    torch.manual_seed(0)
    x, heldout = draw_inputs(240), draw_inputs(400)
    y = truth(x) + NOISE * torch.randn_like(x)
    net = nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(1200):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
    monitor = Monitor(net, Gaussian(variance=NOISE**2), rank=100)
    monitor.fit([x], progress=False).calibrate([heldout], progress=False)
    assert monitor.calibration is not None
    at = torch.linspace(-7, 7, 281)[:, None]
    scored = monitor(at)
    mean = scored.output[:, 0]
    said = torch.distributions.Normal(mean, NOISE)  # what the likelihood says of an output
    threshold = monitor.calibration.threshold(0.05)
    return Found(x, y, at, mean, truth(at)[:, 0], scored.score, said.entropy(), threshold)


def draw(found: Found) -> Figure:
    """Draw the curve, the entropy and the score, one below the other."""
    figure, (curve, entropy, score) = look.panels((2.3, 1.2, 2.1))
    at = found.at[:, 0]
    for axes in (curve, entropy, score):
        for a, b in INTERVALS:
            axes.axvspan(a, b, color=look.BLUE, alpha=0.1, lw=0)
        axes.set_xlim(-7, 7)
    curve.plot(found.x, found.y, ".", color=look.BLUE, ms=3, label="training data")
    curve.plot(at, found.truth, color=look.GREY, ls=":", label="truth")
    curve.plot(at, found.mean, color="black", lw=1.5, label="prediction")
    look.key(curve, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.08))
    look.name_axes(curve, "", "y", ylim=(-3.6, 3.6))
    look.title(curve, "A network fitted in two intervals")
    entropy.plot(at, found.entropy, color=look.RED, lw=1.5)
    look.name_axes(entropy, "", "nats", ylim=(-2, 0))
    look.title(entropy, f"Entropy of its output: {float(found.entropy[0]):.2f} everywhere")
    score.semilogy(at, found.score, color=look.BLUE, lw=1.5)
    score.axhline(found.threshold, color="black", lw=1, ls="--")
    score.text(-6.9, 1.4 * found.threshold, "alarm at 5 %\nfalse alarms", **look.SMALL)
    look.name_axes(score, "input x (shaded: where there was data)", "nats")
    look.title(score, "SCOD score")
    return figure
