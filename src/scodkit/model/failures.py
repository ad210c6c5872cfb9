"""Why a model fails on a batch, in words; the model's own error is the cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scodkit.errors import ModelCallError, ScodError, first_line
from scodkit.model.inputs import Form, Inputs

if TYPE_CHECKING:
    from scodkit.model.network import Network

# axes of a batch of images
_IMAGES = 4


def check_runs(network: Network, call: Inputs, error: Exception, form: Form | None) -> None:
    """Explain an error in computing with a model by a failure of the model itself.

    The model is run on the batch once more, plainly: it is to blame if that fails. Errors of
    this package, and a lack of memory, are left as they are.

    Args:
        network: The model.
        call: The inputs it was given.
        error: What was raised.
        form: Of the batches of the fit, if known.

    Raises:
        ModelCallError: If the model fails on the batch.
    """
    explained = isinstance(error, ScodError) and not isinstance(error, ModelCallError)
    cause = None if explained or _lacks_memory(error) else _failure(network, call)
    if cause is None:
        return
    shapes = ", ".join(str(tuple(shape)) for shape, _ in call.shapes)
    axes = [len(shape) for shape, _ in call.shapes]
    own = cause.__cause__ if isinstance(cause, ModelCallError) else cause
    got = f"got shape {shapes}, on which it raised {first_line(own or cause)}"
    if form is not None and form.axes != axes:
        raise ModelCallError(
            f"expected batches with inputs of {', '.join(map(str, form.axes))} axes, as the "
            f"first of the fit, {got}; if these are labels, type fit(x, y), or let the loader "
            "yield (inputs, labels)"
        ) from own
    if isinstance(cause, ScodError):
        raise cause
    raise ModelCallError(
        f"expected inputs that the model can be run on, {got}; {_advice(network, call)}"
    ) from own


def check_dtypes(network: Network, call: Inputs, error: RuntimeError) -> None:
    """Explain a failure by inputs of another dtype than the weights', if that is likely.

    Args:
        network: The model.
        call: The inputs it was given.
        error: What it raised.

    Raises:
        ModelCallError: If it is.
    """
    weights = {p.dtype for p in network.model.parameters() if p.is_floating_point()}
    inputs = {t.dtype for t in call.tensors() if t.is_floating_point()}
    advice = ""
    if weights and not inputs and takes(network, call, min(weights, key=str)):
        inputs = {t.dtype for t in call.tensors()}
        advice = "x / 255 for bytes of images, or "
    if network.precision is None and inputs - weights and weights:
        dtypes = " or ".join(sorted(map(str, weights)))
        dtype = dtypes.split(" ")[0]
        raise ModelCallError(
            f"expected inputs in {dtypes}, as the model's weights are, got "
            f"{', '.join(sorted(map(str, inputs)))}, and the model failed on them; type "
            f"{advice}x.to({dtype}), or x.astype({dtype.removeprefix('torch.')!r}) for an array"
        ) from error


def takes(network: Network, call: Inputs, dtype: torch.dtype | None = None) -> bool:
    """Return whether the model can be run on inputs, in another dtype if one is given."""
    if dtype is not None:
        call = call.map(lambda t: t.to(dtype))
    return _failure(network, call) is None


def _failure(network: Network, call: Inputs) -> Exception | None:
    """Return what the model raises on inputs; None if it can be run, or memory is short."""
    try:
        with network.evaluating(), torch.no_grad():
            network(call)
    except Exception as error:  # whatever a model raises
        return None if _lacks_memory(error) else error
    return None


def _lacks_memory(error: Exception) -> bool:
    short = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    words = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")
    return short or any(word in str(error) for word in words)


def _advice(network: Network, call: Inputs) -> str:
    """Return what to type where the model fails on a batch: if possible, what works."""

    def channels_first(tensor: Tensor) -> Tensor:
        return tensor.movedim(-1, 1) if tensor.ndim == _IMAGES else tensor

    images = any(tensor.ndim == _IMAGES for tensor in call.tensors())
    if images and takes(network, call.map(channels_first)):
        return (
            "its channels come last: type x.permute(0, 3, 1, 2), or x.transpose(0, 3, 1, 2) "
            "for an array"
        )
    return "pass inputs like those of the training: as many columns or channels, and of a size"
