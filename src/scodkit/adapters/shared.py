"""What adapters share: which detectors they take, how those are fitted, loaders of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from scodkit.baselines import Baseline
from scodkit.errors import OptionError, described
from scodkit.fused import Fused
from scodkit.monitor import Monitor

AnyDetector: TypeAlias = Monitor | Fused | Baseline


def checked(detector: object, instead: str) -> AnyDetector:
    """Return a detector, after a check that it is one of ours.

    Args:
        detector: What was passed.
        instead: What to type, for the message.

    Raises:
        OptionError: If it is something else.
    """
    if isinstance(detector, (Monitor, Fused, Baseline)):
        return detector
    raise OptionError(
        f"expected a Monitor, a Fused or a baseline, got {described(detector)}; type {instead}"
    )


def fit(detector: AnyDetector, known: Iterable[Any], held_out: Iterable[Any] | None) -> None:
    """Fit a detector, and calibrate it if it can be.

    Args:
        detector: Any of ours; baselines are not calibrated.
        known: Batches of training data.
        held_out: Batches for the calibration; None for none.
    """
    detector.fit(known, progress=False)
    if held_out is not None and not isinstance(detector, Baseline):
        detector.calibrate(held_out, progress=False)


@dataclass(frozen=True)
class Batches:
    """The batches of a loader, changed; it can be read as often as the loader.

    Args:
        loader: What is read.
        change: Returns the new batch, or None to leave one out.

    Examples:
        >>> list(Batches([1, 2, 3], lambda batch: None if batch == 2 else 10 * batch))
        [10, 30]
    """

    loader: Iterable[Any]
    change: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            changed = self.change(batch)
            if changed is not None:
                yield changed

    @property
    def dataset(self) -> Any:
        """The data set behind the loader, which a fit reads twice to notice augmentation."""
        return getattr(self.loader, "dataset", None)
