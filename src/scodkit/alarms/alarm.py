"""What alarms share: checks of scores, and saving and loading their state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import Self

from scodkit.calibration import Calibration
from scodkit.errors import CalibrationError, described
from scodkit.numerics import artifact
from scodkit.numerics.artifact import Check, fields, refuse
from scodkit.scoring.score import Scored


class Resumable:
    """An alarm whose state can be saved, and resumed in another process.

    Attributes:
        kind: The kind of its files.
        plain: Checks of the attributes that are saved in a file's header under their names.
        others: Checks of the other entries of the header, by name.
        tensors: Checks of the tensors of a file, by name.
    """

    kind: ClassVar[str]
    plain: ClassVar[Mapping[str, Check]]
    others: ClassVar[Mapping[str, Check]] = {}
    tensors: ClassVar[Mapping[str, Check]] = {}

    def save(self, path: str | Path) -> None:
        """Write the state to a file, atomically; see `load`.

        Args:
            path: Where to.
        """
        header = {name: getattr(self, name) for name in self.plain}
        others, tensors = self._packed()
        artifact.write(path, self.kind, {**header, **others}, tensors)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the alarm that `save` wrote, to go on where it was, bit for bit.

        Args:
            path: Where from.

        Raises:
            ArtifactError: As a subclass: a file cut off, altered, or of another kind.
        """
        schema = fields({**cls.plain, **cls.others}, others=True)
        header, tensors = artifact.read(path, cls.kind, schema)
        fields(cls.tensors)(str(path), tensors)
        alarm = cls.__new__(cls)
        for name in cls.plain:
            setattr(alarm, name, header[name])
        if not alarm._unpack(header, tensors):
            refuse(f"one state of a {cls.kind} in {path}", "parts of several")
        return alarm

    def _packed(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the rest of the state: entries of the header, and tensors."""
        return {}, {}

    def _unpack(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """Restore what `_packed` returned; the plain attributes are set already.

        Returns:
            Whether the state is consistent.
        """
        return True


def are_scores(numbers: Tensor) -> bool:
    """Return whether numbers are scores: none of them NaN or minus infinity."""
    return bool((numbers > -torch.inf).all())


class Calibrated(Protocol):
    """What has held-out scores: a `Monitor`, a `Fused`."""

    calibration: Calibration | None


def calibration_of(source: Calibration | Calibrated) -> Calibration:
    """Return held-out scores, or those of a calibrated monitor.

    Args:
        source: The scores, or what has them.

    Raises:
        CalibrationError: If there are none.
    """
    found = source if isinstance(source, Calibration) else getattr(source, "calibration", None)
    if found is None:
        raise CalibrationError(
            f"expected a calibrated monitor or a Calibration, got {described(source)}; type "
            "monitor.calibrate(heldout_loader) first, or Calibration(scores) for scores"
        )
    return found


# numbers in whatever people hold: of a scored batch its scores or its p-values are meant
Numbers = float | Tensor | npt.NDArray[Any] | Scored


def scores_in(numbers: Numbers) -> Tensor:
    """Return scores as a tensor.

    Args:
        numbers: Those, or a scored batch.
    """
    return torch.as_tensor(numbers.score if isinstance(numbers, Scored) else numbers)


def p_values_in(numbers: Numbers) -> Tensor:
    """Return p-values as a tensor.

    Args:
        numbers: Those, or a scored batch.

    Raises:
        CalibrationError: If the batch was scored without a calibration.
    """
    if isinstance(numbers, Scored):
        if numbers.p_value is None:
            raise CalibrationError(
                "expected a batch with p-values, got one scored without a calibration; type "
                "monitor.calibrate(heldout_loader) first"
            )
        numbers = numbers.p_value
    # a float would be rounded to float32
    return torch.as_tensor(numbers, dtype=torch.float64 if isinstance(numbers, float) else None)


def one_number(numbers: Tensor) -> float:
    """Return the only number in a tensor.

    Args:
        numbers: A tensor that holds one.

    Raises:
        CalibrationError: If there is none, or several.
    """
    if numbers.numel() != 1:
        raise CalibrationError(
            f"expected one number at a time, got a tensor of shape {tuple(numbers.shape)}; "
            "type push(numbers[i]), or push_many(numbers) where there is one"
        )
    return float(numbers)


def one_score(score: Numbers) -> float:
    """Return a score as a float.

    Args:
        score: A number, an array or tensor that holds one, or a scored batch of one sample;
            infinity is the most atypical.

    Raises:
        CalibrationError: If it is NaN, minus infinity or not a single number.
    """
    number = score if isinstance(score, float) else one_number(scores_in(score))
    # NaN is not above anything
    if not number > -torch.inf:
        raise CalibrationError(
            f"expected a score that is a number or infinity, got {number}; to have it count as "
            'most atypical, type push(float("inf"))'
        )
    return number


def many_scores(given: Numbers) -> list[float]:
    """Return scores as floats, in their order.

    Args:
        given: ``(T,)``, or a scored batch; infinity is the most atypical.

    Raises:
        CalibrationError: If the shape is another, or there is a NaN or a minus infinity.
    """
    scores = scores_in(given)
    if scores.dim() != 1:
        raise CalibrationError(
            f"expected scores of shape (T,), got {tuple(scores.shape)}; type scores.flatten()"
        )
    numbers = scores.detach().cpu().double()
    bad = int((~(numbers > -torch.inf)).sum())
    if bad:
        raise CalibrationError(
            f"expected scores that are numbers or infinity, got {bad} of {len(numbers)} that "
            "are not; to have NaN count as most atypical, type "
            'scores.masked_fill(scores.isnan(), float("inf"))'
        )
    listed: list[float] = numbers.tolist()
    return listed
