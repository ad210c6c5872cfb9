"""Times predictions with and without a score, in turns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from scodkit.numerics.timing import in_turns


def prediction_times(
    score: Callable[[Tensor], object], model: nn.Module, x: Tensor
) -> dict[str, float]:
    """Return milliseconds a sample of a scored prediction and, beside it, of a bare one.

    Args:
        score: Predicts and scores a batch.
        model: Predicts.
        x: The batch, ``(n, ...)``.

    Returns:
        ``ms_b<n>`` and ``forward_ms_b<n>``.
    """

    def forward() -> object:
        with torch.no_grad():
            return model(x)

    seconds = in_turns({"ms": lambda: score(x), "forward_ms": forward}, x.device)
    return {f"{name}_b{len(x)}": s * 1e3 / len(x) for name, s in seconds.items()}
