"""What alarms share: checks of scores, and saving and loading their state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from scodkit.errors import CalibrationError
from scodkit.numerics import artifact
from scodkit.numerics.artifact import Check, fields, refuse


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


def one_number(value: float | Tensor) -> float:
    """Return a number, or the one in a tensor, as a float.

    Args:
        value: A number, or a tensor that holds one.

    Raises:
        CalibrationError: If it is a tensor of no number or several.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise CalibrationError(
            f"expected one number at a time, got a tensor of shape {tuple(value.shape)}; type "
            "push(numbers[i])"
        )
    return float(value)


def one_score(score: float | Tensor) -> float:
    """Return a score as a float.

    Args:
        score: A number, or a tensor that holds one; infinity is the most atypical.

    Raises:
        CalibrationError: If it is NaN, minus infinity or not a single number.
    """
    number = one_number(score)
    # NaN is not above anything
    if not number > -torch.inf:
        raise CalibrationError(
            f"expected a score that is a number or infinity, got {number}; to have it count as "
            'most atypical, type push(float("inf"))'
        )
    return number


def many_scores(scores: Tensor) -> list[float]:
    """Return scores as floats, in their order.

    Args:
        scores: ``(T,)``; infinity is the most atypical.

    Raises:
        CalibrationError: If the shape is another, or there is a NaN or a minus infinity.
    """
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
