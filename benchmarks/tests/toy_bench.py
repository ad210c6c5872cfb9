"""The command ``scodbench`` with a domain that takes no time, and methods that end badly.

``held`` does not end as long as the file exists that the variable TOY_HOLD names; ``killed``
kills its process; ``watched`` writes down what it does when.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scodbench import jobs, methods
from scodbench.cli import main
from scodbench.domain import Domain, SketchSize, Splits
from scodbench.samples import TensorSamples
from scodbench.training import Recipe
from scodkit import Gaussian, LastLayers, baselines


def normal(count: int, seed: int, shift: float = 0.0) -> TensorSamples:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)) + shift
    return TensorSamples(x, x.sum(1, keepdim=True))


def splits(folder: Path | None) -> Splits:
    return Splits(normal(40, 0), normal(20, 1), normal(30, 2), {"far": normal(30, 3, 2.0)})


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


TOY = Domain(
    name="toy",
    title="Toy",
    likelihood=Gaussian(),
    build=build,
    splits=splits,
    recipe=Recipe(torch.optim.Adam, rate=0.01, batch=20, epochs=2),
    all_layers=SketchSize(12, 4),
    last_layers=LastLayers(count=1),
    last=SketchSize(5, 2),
    local_rank=2,
)


class Held(baselines.Naive):
    def fit(self, loader: Any, *, progress: bool = True) -> Any:
        while Path(os.environ["TOY_HOLD"]).exists():
            time.sleep(0.01)
        return self


class Killed(baselines.Naive):
    def fit(self, loader: Any, *, progress: bool = True) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Watched(baselines.Naive):
    """Writes down which process fitted, and scored one sample, from when to when."""

    def fit(self, loader: Any, *, progress: bool = True) -> Any:
        began = time.monotonic()
        time.sleep(0.2)
        self._note("fit", began)
        return self

    def score(self, batch: object) -> Any:
        began = time.monotonic()
        found = super().score(batch)
        if len(found) == 1:  # as only what is timed
            self._note("timed", began)
        return found

    def _note(self, what: str, began: float) -> None:
        path = Path(os.environ["TOY_HOLD"]).with_name("watched")
        with path.open("a") as file:
            file.write(f"{os.getpid()} {what} {began} {time.monotonic()}\n")


if __name__ in ("__main__", "__mp_main__"):  # and in the processes that it starts
    jobs.ALL_DOMAINS["toy"] = TOY
    for name, kind in (("held", Held), ("killed", Killed), ("watched", Watched)):
        methods.METHODS[name] = lambda case, kind=kind: kind(
            case.networks[0], case.domain.likelihood
        )

if __name__ == "__main__":
    main()
