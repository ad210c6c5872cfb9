"""A network of which only some outputs count."""

from __future__ import annotations

from torch import Tensor, nn


class FirstOutputs(nn.Module):
    """A network cut down to its first outputs.

    Args:
        model: The whole network, with outputs ``(B, d)``.
        count: How many of them stay.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model = model
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        """Return the first outputs, ``(B, count)``."""
        output: Tensor = self.model(x)
        return output[:, : self.count]
