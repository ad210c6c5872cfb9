"""Small detectors in float64: every form in which models return boxes, of the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draws import noise
from engines import randomised
from scodkit import Categorical, Gaussian, Heads, Monitor
from scodkit.sketch import Exact

TRAIN, HELDOUT, TEST = noise(30, 3, seed=1), noise(40, 3, seed=2), noise(7, 3, seed=3)
QUERIES, CLASSES, SIDES = 4, 3, 2
LIKELIHOODS = {
    "class": Categorical(),
    "box": Gaussian((0.1, 0.4)),
    "scene": Categorical(),
}
OF_BOXES = ("class", "box")
HEADS = {
    "all": Heads(LIKELIHOODS, boxes=OF_BOXES),
    "mask": Heads(LIKELIHOODS, boxes=OF_BOXES, present="kept"),
    "lists": Heads(LIKELIHOODS, boxes=OF_BOXES, most=QUERIES),
}


class Detector(nn.Module):
    """Classes and sides for each of some queries, and a class of the whole scene.

    Images have from none to four boxes.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.body = nn.Sequential(nn.Linear(3, 6), nn.Tanh())
        self.classes = nn.Linear(6, QUERIES * CLASSES)
        self.sides = nn.Linear(6, QUERIES * SIDES)
        self.scene = nn.Linear(6, 2)
        self.register_buffer("least", torch.tensor([-1.5, 0.5, -0.3, 2.0]))

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = self.body(x)
        classes = self.classes(features).view(-1, QUERIES, CLASSES)
        sides = self.sides(features).view(-1, QUERIES, SIDES)
        kept = x.sum(1, keepdim=True) > self.least
        found = {"scene": self.scene(features), "features": features}
        if self.form != "lists":
            return {**found, "class": classes, "box": sides, "kept": kept}
        return {
            **found,
            "class": [each[there] for each, there in zip(classes, kept, strict=True)],
            "box": [each[there] for each, there in zip(sides, kept, strict=True)],
        }


def detector(form: str) -> nn.Module:
    return randomised(Detector(form))


def monitor_of(form: str, **options: Any) -> Monitor:
    """A fitted monitor with all of the curvature."""
    monitor = Monitor(detector(form), HEADS[form], rank=300, sketch=Exact(), **options)
    return monitor.fit([TRAIN], progress=False)


class OneOutput(nn.Module):
    """One head of a detector, or one box of it, as a model of its own: plain torch."""

    def __init__(self, model: nn.Module, head: str, box: int | None) -> None:
        super().__init__()
        self.model, self.head, self.box = model, head, box

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x)[self.head]
        return output if self.box is None else output[:, self.box]
