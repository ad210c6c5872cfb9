"""Groups of samples that are calibrated apart from each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scodkit.errors import CalibrationError


def predicted_class(output: Tensor) -> Tensor:
    """Return the class each sample is taken for, ``(B,)``: the largest of its logits.

    Args:
        output: Logits ``(B, classes)``; a single one counts as that of the second of two.

    Examples:
        >>> predicted_class(torch.tensor([[0.1, 2.0], [3.0, -1.0]]))
        tensor([1, 0])
    """
    if output.shape[1] == 1:
        return (output[:, 0] > 0).long()
    return output.argmax(1)


def groups_of(by: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
    """Return the groups a function puts samples in, ``(B,)`` in int64 on the CPU.

    Args:
        by: Maps outputs to groups.
        output: ``(B, *shape)``.

    Raises:
        CalibrationError: If it returns anything but one integer per sample.
    """
    groups = by(output)
    whole = isinstance(groups, Tensor) and not (
        groups.is_floating_point() or groups.is_complex()
    )
    if not whole or groups.shape != output.shape[:1]:
        got = f"{groups.dtype} {tuple(groups.shape)}" if isinstance(groups, Tensor) else groups
        raise CalibrationError(
            f"expected one integer per sample, of shape ({len(output)},), from by=..., got "
            f"{got}; type by=predicted_class, or return such a tensor"
        )
    return groups.to("cpu", torch.int64)
