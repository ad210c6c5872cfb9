"""A classifier of two moons: where four scores raise an alarm, on a map of all inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import look
import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn

from scodkit import Calibration, Categorical, Fused, Monitor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 91  # points along each side of the map
CENTRE, HALF = (0.5, 0.25), 4.5
FAR = 1.0  # from the nearest training input: outside of the data
DECAYS = (1e-2, 0.0)  # weight decay of the network that is drawn, and of another one
# between the moons; outside of the data, beside the boundary; there, deep inside one class
PLACES = {"A": (0.5, 0.25), "B": (-2.9, -3.0), "C": (-3.0, 3.0)}


@dataclass(frozen=True)
class Map:
    """What the scores of one network say of every point of the map.

    Args:
        p_values: Of each point, by the name of the score, ``(SIDE ** 2,)``.
        entropy: Of the softmax, nats.
        score: Of SCOD, nats.
        upper: The certificate's upper bound on the exact score, nats.
    """

    p_values: dict[str, Tensor]
    entropy: Tensor
    score: Tensor
    upper: Tensor

    def flagged(self, name: str, where: Tensor) -> float:
        """Return the share of the points in a region that raise an alarm at 5 %."""
        return float((self.p_values[name] <= 0.05)[where].double().mean())


@dataclass(frozen=True)
class Found:
    """Maps of two networks, which differ in their weight decay.

    Args:
        x: Training inputs, ``(M, 2)``.
        points: Points of the map, ``(SIDE ** 2, 2)``.
        maps: By weight decay.
    """

    x: Tensor
    points: Tensor
    maps: dict[float, Map]

    def place(self, letter: str) -> Tensor:
        """Return which point of the map is nearest to a marked place."""
        return (self.points - torch.tensor(PLACES[letter])).norm(dim=1).argmin()

    @property
    def far(self) -> Tensor:
        """Whether a point is outside of the data."""
        return torch.cdist(self.points, self.x).min(1).values > FAR


def moons(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels."""
    x, y = make_moons(count, noise=0.15, random_state=seed)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def map_of(decay: float, x: Tensor, y: Tensor, heldout: Tensor, points: Tensor) -> Map:
    """Train a classifier and return what the scores say of it.

    Args:
        decay: Weight decay of the training.
        x: Training inputs.
        y: Their labels.
        heldout: Other inputs, to calibrate with.
        points: What to score.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=decay)
    for _ in range(600):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(net(x), y))
        optimizer.step()
    monitor = Monitor(net, Categorical(), rank=50).fit([x], progress=False)
    # a quarter of the held-out inputs standardises its parts
    fused = Fused(net, Categorical()).fit([x], progress=False)
    fused.calibrate([heldout], progress=False)

    def scores(inputs: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            logits = net(inputs)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        largest = -logits.max(1).values
        return {"Entropy": entropy, "Max logit": largest, "SCOD": monitor.score(inputs)}

    found, held = scores(points), scores(heldout)
    p_values = {name: Calibration(held[name]).p_value(found[name]) for name in found}
    p_values["Fused"] = torch.as_tensor(fused(points).p_value)
    upper = monitor.certify(points).upper
    return Map(p_values, found["Entropy"], found["SCOD"], upper)


def find() -> Found:
    """Map two networks."""
    (x, y), (heldout, _) = moons(400, seed=0), moons(1000, seed=1)
    line = torch.linspace(-HALF, HALF, SIDE)
    points = torch.cartesian_prod(line, line) + torch.tensor(CENTRE)
    maps = {decay: map_of(decay, x, y, heldout, points) for decay in DECAYS}
    return Found(x, points, maps)


def draw(found: Found) -> Figure:
    """Draw four maps of the first network."""
    figure, every_axes = look.panels((2.5, 2.5), columns=2)
    shown = found.maps[DECAYS[0]]
    across, up = found.points.view(SIDE, SIDE, 2).permute(2, 0, 1).numpy()
    for axes, (name, p_value) in zip(every_axes, shown.p_values.items(), strict=True):
        p_map = p_value.view(SIDE, SIDE).numpy()
        colours = axes.pcolormesh(
            across, up, 100 * (1 - p_map), vmin=0, vmax=100, cmap="cividis", rasterized=True
        )
        axes.contour(across, up, p_map, levels=[0.05], colors="black", linewidths=1.2)
        axes.plot(*found.x[::2].T, ".", color="white", ms=1.5)
        axes.set_aspect("equal")
        share = 100 * shown.flagged(name, found.far)
        look.title(axes, f"{name}: alarms on {share:.0f} %")
        for letter, (x, y) in PLACES.items():
            box = {"boxstyle": "circle,pad=0.15", "fc": "white", "ec": "black", "lw": 0.8}
            axes.text(x, y, letter, ha="center", va="center", bbox=box, **look.SMALL)
    for axes in every_axes[::2]:
        axes.set_ylabel("second input", **look.LABEL)
    for axes in every_axes[2:]:
        axes.set_xlabel("first input", **look.LABEL)
    bar = figure.colorbar(colours, ax=every_axes, location="bottom", aspect=40, pad=0.02)
    bar.ax.tick_params(labelsize=look.SIZE - 1)
    bar.set_label("% of held-out inputs that score lower (line: alarm at 95)", **look.LABEL)
    return figure
