"""Training data as baselines read it: inputs with targets, as often as a method needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scodkit.errors import BatchError, NonFiniteError, OptionError
from scodkit.fit.stream import batches_of, num_batches, open_stream
from scodkit.model.network import Inputs, Network

_TARGET_KEYS = ("label", "labels", "target", "targets")


@dataclass(frozen=True)
class TrainingData:
    """The batches of a fit; each iteration is one pass over them.

    Args:
        network: The model they are for.
        loader: Batches as the loader yields them.
        targets: Picks the targets from a batch; by default the second of a tuple, or what a
            dict has under ``label``, ``labels``, ``target`` or ``targets``.
        doing: What a progress bar says; None for no bar.
    """

    network: Network
    loader: Iterable[Any]
    targets: Callable[[Any], Any] | None = None
    doing: str | None = None

    def check_repeatable(self, method: str) -> None:
        """Make sure the batches can be read more than once.

        Args:
            method: Who wants to.

        Raises:
            OptionError: If they are an iterator, which is spent after one pass.
        """
        if iter(self.loader) is self.loader:
            raise OptionError(
                f"expected a loader that can be read more than once, as {method} needs, got "
                f"{type(self.loader).__name__}; pass a DataLoader or a list of batches"
            )

    def calls(self) -> Iterator[Inputs]:
        """Yield the model's inputs in each batch, one pass; empty batches are left out.

        Raises:
            BatchError: If there is not a single sample.
        """
        for call, _ in self._pass():
            yield call

    def pairs(self) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield the inputs and the targets ``(B, ...)`` of each batch, one pass.

        Raises:
            BatchError: If there is not a single sample, or a batch has no targets.
        """
        for call, batch in self._pass():
            targets = _default_targets(batch) if self.targets is None else self.targets(batch)
            if not isinstance(targets, Tensor) or targets.shape[:1] != (call.batch_size,):
                raise BatchError(
                    f"expected a batch with {call.batch_size} targets beside its inputs, got "
                    f"{_what(targets)}; let the loader yield (inputs, targets), or say where "
                    "they are: targets=lambda batch: ..."
                )
            yield call, targets.to(self.network.device)

    def _pass(self) -> Iterator[tuple[Inputs, Any]]:
        _, stream = open_stream(self.loader)
        total = num_batches(self.loader)
        seen = 0
        for batch in batches_of(
            stream, total, self.doing or "", self.doing is not None, leave=False
        ):
            call = self.network.inputs_of(batch)
            if call.batch_size:
                yield call, batch
            seen += call.batch_size
        if not seen:
            raise BatchError("expected training data with samples, got none")


def check_finite(values: Tensor, what: str) -> Tensor:
    """Return what a fit was about to use, or refuse it.

    Args:
        values: ``(B, ...)``.
        what: They are, for the message.

    Raises:
        NonFiniteError: If there is a NaN or an infinity among them.
    """
    good = values.isfinite().flatten(1).all(1) if values.ndim > 1 else values.isfinite()
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise NonFiniteError(
            f"expected finite {what}, got a NaN or an infinity in row {row} of a batch; mend "
            "or remove that sample"
        )
    return values


def _default_targets(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return next((batch[key] for key in _TARGET_KEYS if key in batch), None)
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[1]
    return None


def _what(found: object) -> str:
    if isinstance(found, Tensor):
        return f"{len(found) if found.ndim else 'a single'} of them"
    return "none" if found is None else type(found).__name__


def finite_samples(call: Inputs, output: Tensor) -> Tensor:
    """Return ``(B,)`` booleans: where neither inputs nor output have a NaN or an infinity."""
    tensors = [*call.tensors(), output]
    floating = [t.flatten(1) if t.ndim > 1 else t[:, None] for t in tensors]
    checks = [t.isfinite().all(1) for t in floating if t.is_floating_point()]
    return torch.stack(checks).all(0)
