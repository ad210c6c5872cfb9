"""What a `Monitor` and every method it is compared with have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from typing_extensions import Self

from scodkit.score import Scored


@runtime_checkable
class Detector(Protocol):
    """Tells known inputs from others, by a score: larger = more atypical.

    Examples:
        >>> from scodkit import Categorical, Monitor
        >>> from torch import nn
        >>> isinstance(Monitor(nn.Linear(2, 3), Categorical()), Detector)
        True
    """

    def fit(self, loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Learn from training data, and return the detector itself."""

    def score(self, batch: object) -> Tensor:
        """Return the scores ``(B,)`` of a batch."""

    def __call__(self, batch: object) -> Scored:
        """Return the prediction and the scores of a batch."""
