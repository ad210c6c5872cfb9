"""Draw the picture at the top of the README: ``make picture``.

A network learns how far a car needs to stop, from speeds of 20 to 100 km/h. Asked about 160
it answers as firmly as ever, and almost 50 m short. Its score tells.
"""

from __future__ import annotations

import sys
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor, nn

from scodkit import Gaussian, Monitor
from scodkit.explain.plots import png_metadata

BLUE, RED, GREY = "#0072B2", "#D55E00", "#8a8a8a"  # told apart by colour-blind readers
FALSE_ALARM = 0.05
ASKED = 1.6  # the speed whose answer is pointed at, in 100 km/h


def trained() -> tuple[Tensor, Tensor, nn.Module, Monitor]:
    """Return speeds ``(600, 1)``, distances ``(600, 1)``, the network and its monitor.

    The lines of the README.
    """
    torch.manual_seed(0)
    speed = 0.2 + 0.8 * torch.rand(600, 1)  # in 100 km/h
    distance = stopping_distance(speed) + 3 * torch.randn(600, 1)
    net = nn.Sequential(
        nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(1000):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(speed[:400]), distance[:400]).backward()
        optimizer.step()
    monitor = Monitor(net, Gaussian(variance=9.0))
    monitor.fit(speed[:400], progress=False).calibrate(speed[400:], progress=False)
    return speed, distance, net, monitor


def stopping_distance(speed: Tensor) -> Tensor:
    """Return metres: a second of reaction, then braking at 7 m/s^2; speeds in 100 km/h."""
    return 28 * speed + 55 * speed**2


def main() -> None:
    """Train, fit, score speeds from 0 to 180 km/h, draw."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {"font.size": 11.5, "axes.spines.top": False, "axes.spines.right": False}
    )
    speed, distance, net, monitor = trained()
    grid = torch.linspace(0, 1.8, 721)[:, None]
    with torch.no_grad():
        answer = net(grid)
    score = monitor.score(grid)
    alarms = monitor.flag(grid, false_alarm=FALSE_ALARM)

    figure, (above, below) = plt.subplots(
        2,
        1,
        figsize=(5.6, 6.0),
        dpi=150,
        sharex=True,
        height_ratios=(1.25, 1),
        layout="constrained",
    )
    _draw_answers(above, grid[:, 0], answer[:, 0], speed[:400], distance[:400])
    _draw_scores(below, grid[:, 0], score, monitor)
    for axis in (above, below):
        inside = 100 * grid[~alarms, 0]
        for low, high in ((0, inside.min()), (inside.max(), 180)):
            axis.axvspan(float(low), float(high), color=RED, alpha=0.10, lw=0)
    figure.savefig(sys.argv[1], facecolor="white", metadata=png_metadata(figure))


def _draw_answers(
    axis: Any, grid: Tensor, answer: Tensor, speed: Tensor, distance: Tensor
) -> None:
    axis.plot(100 * speed, distance, ".", color=GREY, ms=3, label="training data")
    axis.plot(
        100 * grid, stopping_distance(grid), ":", color="black", lw=1.6, label="the truth"
    )
    axis.plot(100 * grid, answer, color=BLUE, lw=2.2, label="network, ± 2 sd of its noise")
    axis.fill_between(100 * grid, answer - 6, answer + 6, color=BLUE, alpha=0.3, lw=0)
    asked = torch.tensor(ASKED)
    says = float(answer[(grid - asked).abs().argmin()])
    true = float(stopping_distance(asked))
    axis.annotate(
        "", (160, true - 2), (160, says + 3), arrowprops={"arrowstyle": "<->", "color": "black"}
    )
    place = float(answer[-1]) + 8  # between the truth and the network, up to the right edge
    axis.text(163, place, f"{round(true) - round(says)} m\nshort", linespacing=1.0, fontsize=11)
    axis.text(
        178, 8, "the entropy of its answer\nis the same everywhere", ha="right", style="italic"
    )
    axis.set(ylabel="stopping distance (m)", ylim=(-8, 225), xlim=(0, 180))
    axis.set_title("The network is as sure as ever …", loc="left", weight="bold", fontsize=12.5)
    axis.legend(loc="upper left", frameon=False, fontsize=10.5)


def _draw_scores(axis: Any, grid: Tensor, score: Tensor, monitor: Monitor) -> None:
    assert monitor.calibration is not None
    threshold = monitor.calibration.threshold(FALSE_ALARM)
    axis.plot(100 * grid, score, color=BLUE, lw=2.2)
    axis.axhline(threshold, color=RED, lw=1.4, ls="--")
    axis.text(60, threshold * 1.6, "5 % false alarms", color=RED, ha="center")
    for place in (10, 140):
        axis.text(place, 1.2e3, "alarm", color=RED, ha="center", va="center", fontsize=11)
    axis.set(yscale="log", xlabel="speed (km/h)", ylabel="SCOD score (nats)", ylim=(1e-3, 4e3))
    axis.set_title("… its SCOD score is not", loc="left", weight="bold", fontsize=12.5)


if __name__ == "__main__":
    main()
