"""What is looked at on the first batch, so that a fit is refused at once or not at all."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scodkit import errors
from scodkit.factors.pieces import distinct
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.parts import read_by_position

# samples of the first batch whose outputs are looked at
_LOOKED_AT = 16

# samples to choose an engine with, no two alike; and batches to look for them in
_DISTINCT = 3
_AHEAD = 16


def first_output(
    network: Network, likelihood: Likelihood, batch: object, call: Inputs
) -> Tensor:
    """Return the model's output on the first samples; refuse what cannot be right.

    Args:
        network: The model, held in eval mode.
        likelihood: Of its outputs.
        batch: As the loader yielded it.
        call: The inputs in it.

    Returns:
        ``(b, *shape)``, detached, of the samples of `looked_at`.

    Raises:
        BatchError: If there are no samples, weights have no gradients, or the likelihood does
            not take the outputs.
        ModelCallError: If the model cannot be run on the batch.
    """  # noqa: DOC501 (others are passed on)
    call.check_some()
    _check_not_quantised(network.model)
    try:
        with torch.no_grad():
            output = network(looked_at(call))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model raises
        advice = _advice(network, batch, call)
        if "DefaultCPUAllocator" in str(error) or (
            isinstance(error, errors.ScodError) and advice is None
        ):
            raise
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise errors.ModelCallError(
            "expected a batch that the model can be run on, but it raised "
            f"{errors.first_line(cause)}; "
            + (advice or "pick its inputs with Monitor(..., inputs=lambda batch: ...)")
        ) from cause
    likelihood.check_output(output)
    return output


def looked_at(call: Inputs) -> Inputs:
    """Return the first samples of a batch; not all, if there are three or more.

    A model that takes as many samples as the batch has, and not fewer, is found out so.
    """
    return call.samples(slice(0, min(_LOOKED_AT, max(2, call.batch_size - 1))))


def check_deterministic(network: Network, call: Inputs, output: Tensor, loader: object) -> None:
    """Make sure the model and the data give the same answer twice.

    Args:
        network: The model, held in eval mode.
        call: The first batch.
        output: What the model made of its first samples, from `first_output`.
        loader: What the batch came from; a map-style data set behind it is read twice.

    Raises:
        NondeterministicError: If either differs.
    """
    with torch.no_grad():
        again = network(looked_at(call))
    scale = float(output.abs().nan_to_num(0.0, 0.0, 0.0).max()) if output.numel() else 0.0
    if not torch.allclose(output, again, rtol=1e-3, atol=1e-3 * scale, equal_nan=True):
        raise errors.NondeterministicError(
            "expected the same output twice for the same batch in eval mode, got two; is there "
            "dropout that ignores eval mode, or sampling inside forward? Remove it, or type "
            "fit(..., check_deterministic=False)"
        )
    dataset: Any = getattr(loader, "dataset", None)
    if read_by_position(dataset) and len(dataset) and not _same(dataset[0], dataset[0]):
        raise errors.NondeterministicError(
            "expected the data set to give the same item twice, but item 0 differs between "
            "two reads; switch random augmentation off for fitting, or type "
            "fit(..., check_deterministic=False) to fit on augmented data"
        )


def with_example(
    network: Network, first: Inputs, batches: Iterable[Any]
) -> tuple[Inputs, Iterable[Any]]:
    """Return samples to choose an engine with, and all batches again.

    Those of the first batch, unless they are too few, or alike: then more batches are read.

    Args:
        network: Takes inputs out of batches.
        first: The inputs of the first batch.
        batches: All of them.
    """
    stream = iter(batches)
    example, read = first, [next(stream)]
    while len(distinct(example, _DISTINCT)) < _DISTINCT and len(read) < _AHEAD:
        more = list(itertools.islice(stream, 1))
        if not more:
            break
        read += more
        example = example.joined(network.inputs_of(more[0]))
    return example, itertools.chain(read, stream)


def _check_not_quantised(model: nn.Module) -> None:
    """Refuse models whose weights were rounded to integers.

    Raises:
        BatchError: If there are such.
    """
    for name, module in model.named_modules():
        kind = type(module)
        packed = kind.__module__.startswith("torch.") and ".quantized." in kind.__module__
        if packed and not kind.__name__.endswith("FloatFunctional"):
            raise errors.BatchError(
                f"expected weights that have gradients, got a quantised model ({name or 'it'} "
                f"is a {kind.__name__} from {kind.__module__}), whose weights are integers; "
                "fit and score with the model in floating point that it was made from"
            )


def _advice(network: Network, batch: object, call: Inputs) -> str | None:
    """Return what to type where a model fails on the first batch: something that works."""
    forward = inspect.signature(network.model.forward)
    parts = list(batch) if isinstance(batch, (tuple, list)) else []
    try:
        forward.bind(*call.args, **call.kwargs)
    except TypeError:
        needed = [p for p in forward.parameters.values() if p.default is p.empty]
        picked = ", ".join(f"batch[{i}]" for i in range(len(needed)))
        picked = f"({picked})" if len(needed) <= len(parts) else "..."
        return (
            f"it takes the inputs {forward}, and got {len(call.tensors())} of a batch of "
            f"{len(parts) or 'one'}; type Monitor(..., inputs=lambda batch: {picked})"
        )
    for place, part in enumerate(parts[1:], start=1):
        if isinstance(part, Tensor) and _takes(network, part):
            return (
                f"it can be run on part {place} of the batch; type Monitor(..., "
                f"inputs=lambda batch: batch[{place}])"
            )
    if _takes(network, call.map(lambda t: t[None])):
        return "these look like a single sample: type x[None] for a batch of one"
    if call.batch_size > 2 and _takes(network, call):
        return (
            f"it takes {call.batch_size} samples at a time and not fewer, and a score must not "
            "depend on its batch: is there a weight as long as the batch?"
        )
    return None


def _takes(network: Network, batch: object) -> bool:
    """Return whether a model can be run on a batch, or on such inputs."""
    try:
        with torch.no_grad():
            network(network.inputs_of(batch))
    except Exception:
        return False
    return True


def _same(a: Any, b: Any) -> bool:
    """Return whether two items agree; those that cannot be compared are taken to."""
    if isinstance(a, (Tensor, np.ndarray)):
        real = np.asarray(a).dtype.kind in "fc"
        return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=real))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return True
