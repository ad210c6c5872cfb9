"""What a model fails on is said in words, wherever it is run; its own error is the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scodkit import Categorical, Fused, Monitor
from scodkit.baselines import KNN
from scodkit.errors import ModelCallError

RNG = np.random.default_rng(0)
TRAIN, HELD, NEW = (RNG.normal(size=(n, 4)) for n in (200, 120, 50))
LABELS = RNG.integers(0, 3, 200)
USES: dict[str, Callable[[Any, Any], Any]] = {
    "score": lambda own, x: own.score(x),
    "call": lambda own, x: own(x),
    "flag": lambda own, x: own.flag(x),
    "explain": lambda own, x: own.explain(x),
    "calibrate": lambda own, x: own.calibrate(x, progress=False),
    "features": lambda own, x: own.features(x),
    "selftest": lambda own, x: own.selftest(x),
    "compile": lambda own, x: own.compile(x),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def made(kind: Any, net: nn.Module | None = None, train: Any = TRAIN, held: Any = HELD) -> Any:
    own = kind(net or network(), Categorical()).fit(train, progress=False)
    return own if kind is KNN else own.calibrate(held, progress=False)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("use", USES)
def test_a_table_with_a_column_too_few_is_refused(use: str, count: int) -> None:
    with pytest.raises(ModelCallError, match=r"got shape \(., 3\), .*; pass inputs") as error:
        USES[use](made(Monitor), NEW[:count, :3])
    assert isinstance(error.value.__cause__, RuntimeError)


@pytest.mark.parametrize("kind", [Fused, KNN])
def test_other_detectors_refuse_it_too(kind: Any) -> None:
    own = made(kind)
    with pytest.raises(ModelCallError, match="pass inputs like those of the training"):
        own.score(NEW[:, :3])
    with pytest.raises(ModelCallError):
        kind(network(), Categorical()).fit(TRAIN[:, :3], progress=False)


@pytest.mark.parametrize("count", [1, 2])
def test_integers_are_named_as_such_in_any_number(count: int) -> None:
    with pytest.raises(ModelCallError, match=r"x / 255 .*x\.astype\('float32'\) for an array"):
        made(Monitor).score(np.ones((count, 4), dtype=int))


def test_images_with_channels_last_are_told_what_to_type() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * 36, 3))
    own = made(Monitor, net, RNG.random((40, 3, 8, 8)), RNG.random((30, 3, 8, 8)))
    images = RNG.random((5, 8, 8, 3))
    with pytest.raises(ModelCallError, match=r"x\.transpose\(0, 3, 1, 2\) for an array"):
        own.score(images)
    assert len(own.score(images.transpose(0, 3, 1, 2))) == 5
    with pytest.raises(ModelCallError, match="of a size"):
        own.score(RNG.random((5, 3, 9, 9)))


@pytest.mark.parametrize("given", [[TRAIN, LABELS], (TRAIN, LABELS.astype(float))])
def test_labels_in_place_of_a_batch_are_told_apart(given: Any) -> None:
    with pytest.raises(ModelCallError, match=r"if these are labels, type fit\(x, y\)"):
        Monitor(network(), Categorical()).fit(given, progress=False)


class Failing(nn.Module):
    """A model that can be made to raise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.error: list[BaseException] = []

    def forward(self, x: Tensor) -> Tensor:
        for error in self.error:
            raise error
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), torch.OutOfMemoryError("none left"), MemoryError("none")]
)
def test_a_lack_of_memory_and_an_interrupt_stay_what_they_are(error: BaseException) -> None:
    net = Failing()
    own = made(Monitor, net)
    net.error.append(error)
    for count in (1, 5):
        with pytest.raises(type(error)):
            own.score(NEW[:count])
