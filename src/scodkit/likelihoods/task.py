"""What of a prediction matters downstream, and how much a change of it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vjp, vmap

from scodkit.errors import BatchError, OptionError
from scodkit.likelihoods import Gaussian, Likelihood


@dataclass(frozen=True)
class Task(Likelihood):
    """A function of the outputs that a decision rests on; scores then measure change in it.

    The fit is that of the network's own likelihood: what the data says of the weights does
    not depend on what the prediction is used for. Only the question asked of them changes,
    from "could the prediction be another one?" to "could the outcome be another one?".

    Args:
        outcome: Maps outputs ``(B, *shape)`` to outcomes ``(B, ...)``, sample by sample, with
            torch functions: a choice of outputs, a cost, a distance to a limit. It is called
            on the CPU too, so tensors of its own must follow ``output.device``.
        metric: How a change of the outcome counts. `Gaussian(variance)` by default: squared
            change over the variance; any other likelihood: as information about it.

    Examples:
        >>> steering = Task(lambda output: output[:, :1], Gaussian(0.01))
        >>> steering.factor(torch.zeros(1, 2))
        tensor([[[10.,  0.]]])
    """

    outcome: Callable[[Tensor], Tensor]
    metric: Likelihood = Gaussian()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        if not callable(self.outcome):
            raise OptionError(
                f"expected a function of the outputs, got {self.outcome!r}; type "
                "Task(lambda output: output[:, :1])"
            )
        if not isinstance(self.metric, Likelihood) or self.metric.draws:
            raise OptionError(
                f"expected a metric without random draws, got {self.metric!r}; type "
                "metric=Gaussian(variance)"
            )

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return rows ``(B, p, d)``: the metric's, pulled back through the outcome.

        Args:
            output: What the model returned, ``(B, *shape)``.
            keys: Ignored: nothing is drawn.
        """
        if output.is_inference():  # which cannot be differentiated
            with torch.inference_mode(False):
                output = output.clone()
        outcome, pull_back, *_ = vjp(self._outcome, output)
        rows = self.metric.factor(outcome).transpose(0, 1)
        at_output: Tensor = vmap(lambda row: pull_back(row.reshape(outcome.shape))[0])(rows)
        return at_output.flatten(2).transpose(0, 1)

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``p``, that of the metric on outcomes of such outputs."""
        outcome = self._outcome(torch.zeros(1, *shape))
        return self.metric.num_directions(outcome.shape[1:])

    @property
    def worst(self) -> bool:
        """See `Likelihood`: that of the metric."""
        return self.metric.worst

    def groups(self, shape: Sequence[int]) -> Tensor:
        """See `Likelihood.groups`.

        Returns:
            Those of the metric on outcomes, ``(p,)``.
        """
        return self.metric.groups(self._outcome(torch.zeros(1, *shape)).shape[1:])

    def by_position(self) -> Task:
        """See `Likelihood.by_position`.

        Returns:
            The same task, by the positions of outcomes.
        """
        return replace(self, metric=self.metric.by_position())

    def named(self) -> Task:
        """Return the same task with rows that each stand for something of the outcome."""
        return replace(self, metric=self.metric.named())

    def _outcome(self, output: Tensor) -> Tensor:
        result = self.outcome(output)
        if not isinstance(result, Tensor) or result.shape[:1] != output.shape[:1]:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise BatchError(
                f"expected an outcome of shape ({len(output)}, ...), one row per sample, got "
                f"{got}; keep the first axis: Task(lambda output: output[:, :1])"
            )
        return result if result.ndim > 1 else result[:, None]
