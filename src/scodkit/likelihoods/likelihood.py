"""What every likelihood offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scodkit.errors import OptionError

# metadata of options that came later: files leave them out while they have their default, and
# are then as they were before
LATER = {"later": True}


class Likelihood(ABC):
    """Square root of the output Fisher information of a family of distributions."""

    @property
    def draws(self) -> bool:
        """Whether `factor` draws random numbers, and so needs the samples' keys."""
        return False

    @abstractmethod
    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return rows ``R`` of shape ``(B, p, d)`` with ``R^T R`` the output Fisher.

        Args:
            output: What the model returned, ``(B, *shape)``, with ``d = prod(shape)``.
            keys: One integer per sample, ``(B,)``; likelihoods that draw random numbers draw
                the same ones for the same key, whatever else is in the batch.

        Returns:
            Rows in the dtype of ``output``. They can be differentiated where that has a graph,
            unless they are drawn.
        """

    @abstractmethod
    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``p`` for outputs of trailing shape ``shape``."""

    @property
    def worst(self) -> bool:
        """Whether a sample's score is that of its worst group of rows, not that of all."""
        return False

    def groups(self, shape: Sequence[int]) -> Tensor:
        """Return which group each row is of, ``(p,)`` in int64: pixel, token; else all of 0.

        A score is a sum over rows, so that the scores of a sample's groups add up to its own.

        Args:
            shape: Of a sample's output.
        """
        return torch.zeros(self.num_directions(shape), dtype=torch.int64)

    def by_position(self) -> Likelihood:
        """Return the likelihood whose groups are the positions of an output, not pooled.

        Raises:
            OptionError: If outputs have no positions, or rows are not of single ones.
        """
        raise OptionError(
            f"expected a likelihood of several positions, got {self!r}; type "
            "Categorical(class_dim=-1, directions=1) for sequences (B, S, C), or "
            "monitor.score(batch) for the score of a sample"
        )

    def check_output(self, output: Tensor) -> None:  # noqa: B027 (most take anything)
        """Refuse outputs that cannot be what this likelihood takes.

        Args:
            output: Of the model on the first samples of a fit, ``(B, *shape)``.

        Raises:
            BatchError: With what to type; nothing is known to be wrong by default.
        """

    def curvature_times(
        self, output: Tensor, vectors: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        """Return ``F_theta v`` for vectors at the output, without forming ``F_theta``.

        This default goes through the rows of `factor`; families with a closed form override
        it, and need no memory beyond that of the vectors.

        Args:
            output: What the model returned, ``(B, *shape)``, with ``d = prod(shape)``.
            vectors: ``q`` vectors for each sample, ``(B, q, d)``.
            keys: As in `factor`.

        Returns:
            ``(B, q, d)``, in the dtype of ``vectors``.
        """
        rows = self.factor(output, keys).to(vectors.dtype)
        return vectors @ rows.mT @ rows

    @property
    def closed(self) -> bool:
        """Whether `curvature_times` and `curvature_trace` form no rows."""
        return False

    def curvature_trace(self, output: Tensor) -> Tensor:
        """Return ``tr F_theta`` for each sample, ``(B,)`` in float64, >= 0.

        Args:
            output: What the model returned, ``(B, *shape)``.
        """
        return self.factor(output).double().square().sum((1, 2))

    def named(self) -> Likelihood:
        """Return a likelihood of the same Fisher information with a row for each output.

        For explanations: what is scored may need fewer rows, which mix outputs.
        """
        return self

    def picking(self, outputs: Callable[[Any], Any] | None) -> Callable[[Any], Tensor] | None:
        """Return what picks this likelihood's output from a model's result; None for all of it.

        Args:
            outputs: The user's own function, if there is one.
        """
        return outputs

    def shown(self, output: Tensor) -> Tensor | Mapping[str, Tensor]:
        """Return the output as the user knows it, from the tensor that is scored.

        Args:
            output: ``(B, *shape)``.
        """
        return output


def between_0_and_1(values: Tensor) -> bool:
    """Return whether there are values, and all look like probabilities."""
    return bool(values.numel()) and bool(((values >= 0) & (values <= 1)).all())
