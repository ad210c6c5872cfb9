"""A named set of inputs with their scores: what a report is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.errors import BatchError, OptionError
from scodkit.monitor import Monitor


@dataclass(frozen=True)
class ScoredSet:
    """A named set of inputs with their scores.

    Args:
        name: As readers know it.
        scores: ``(n,)``, nats (squared units), larger = more atypical; infinite is fine.
        known: Whether the inputs are of the kind the network was trained on.
        inputs: As the model takes them: ``(n, *shape)``, or a sequence of ``n`` tensors
            that is asked only for the few it takes. Without them the report has no pictures
            and no shares of layers.
        outputs: ``(n, *shape)``, what the model returned.
        p_values: ``(n,)`` in (0, 1], smaller = more atypical. Needed only where the monitor
            is calibrated by group; otherwise they follow from the scores.
        labels: What each input is, in a few words: its class, its file.

    Raises:
        BatchError: If a score is not a number, or lengths differ.
        OptionError: If there is no name.

    Examples:
        >>> own = ScoredSet("validation", torch.tensor([0.1, 0.3]), known=True)
        >>> len(own)
        2
    """

    name: str
    scores: Tensor
    known: bool
    inputs: Tensor | Sequence[Tensor] | None = None
    outputs: Tensor | None = None
    p_values: Tensor | None = None
    labels: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise OptionError('expected a name of the set, got none; type name="validation"')
        scores = self.scores.detach().to("cpu", torch.float64)
        if scores.ndim != 1 or not len(scores) or bool(scores.isnan().any()):
            raise BatchError(
                f"expected one score or more in {self.name!r}, of shape (n,), none of them "
                f"NaN, got shape {tuple(scores.shape)} with {int(scores.isnan().sum())} NaN; "
                "type scores=monitor.score(inputs)"
            )
        object.__setattr__(self, "scores", scores)
        for what in ("inputs", "outputs", "p_values", "labels"):
            given = getattr(self, what)
            if given is not None and len(given) != len(scores):
                raise BatchError(
                    f"expected as many {what} as scores in {self.name!r}, {len(scores)}, got "
                    f"{len(given)}; pass those of the same inputs"
                )

    def __len__(self) -> int:
        return len(self.scores)

    @classmethod
    def of(
        cls,
        monitor: Monitor,
        name: str,
        inputs: Tensor,
        *,
        known: bool,
        labels: Sequence[str] | None = None,
        batch_size: int = 256,
    ) -> ScoredSet:
        """Score inputs with a monitor.

        Args:
            monitor: Fitted; p-values come with the scores if it is calibrated.
            name: As readers know the set.
            inputs: ``(n, *shape)``, as the model takes them.
            known: Whether they are of the kind the network was trained on.
            labels: What each input is, in a few words.
            batch_size: Inputs scored at a time.

        Returns:
            The set, with predictions.

        Raises:
            BatchError: If there are no inputs.

        Examples:
            >>> from torch import nn
            >>> from scodkit import Gaussian
            >>> _ = torch.manual_seed(0)
            >>> x = torch.randn(50, 2)
            >>> monitor = Monitor(nn.Linear(2, 1), Gaussian(), 2).fit([x], progress=False)
            >>> ScoredSet.of(monitor, "the same", x, known=True).outputs.shape
            torch.Size([50, 1])
        """
        if not len(inputs):
            raise BatchError(f"expected inputs in {name!r}, got none; leave the set out")
        parts = [monitor(batch) for batch in torch.split(inputs, batch_size)]
        p_values = [part.p_value for part in parts if part.p_value is not None]
        return cls(
            name,
            torch.cat([part.score for part in parts]),
            known,
            inputs.detach(),
            torch.cat([part.output.detach() for part in parts]).cpu(),
            torch.cat(p_values) if p_values else None,
            labels,
        )

    @property
    def shape(self) -> torch.Size | None:
        """Shape of an input; None where there are none."""
        return None if self.inputs is None else self.inputs[0].shape

    def batch(self, places: Sequence[int]) -> Tensor:
        """Return some inputs, ``(len(places), *shape)``.

        Args:
            places: Which ones, counted from 0.

        Raises:
            BatchError: If there are no inputs.
        """
        if self.inputs is None:
            raise BatchError(f"expected inputs in {self.name!r}, got a set without them")
        return torch.stack([self.inputs[place] for place in places])

    def spread(self, count: int) -> list[int]:
        """Return places of samples from the least to the most atypical, evenly by rank.

        Args:
            count: At most so many; both ends are among them.

        Examples:
            >>> ScoredSet("a", torch.tensor([5.0, 1.0, 3.0, 4.0]), known=True).spread(3)
            [1, 3, 0]
        """
        ranks = torch.linspace(0, len(self) - 1, min(count, len(self))).round().long()
        return [int(place) for place in self.scores.argsort(stable=True)[ranks]]
