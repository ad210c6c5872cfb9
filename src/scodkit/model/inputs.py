"""The model's inputs: how they are picked from a batch, their form and their ranges."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from scodkit.errors import BatchError, SuspiciousInputWarning
from scodkit.model.frames import Columns, columns_of
from scodkit.model.kinds import LABEL_KEYS, is_array
from scodkit.numerics import artifact

# smallest and largest value of each floating input, by its position or keyword in the call
Ranges = dict[str, tuple[float, float]]

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# a value is far if it is outside its range by so many widths of the range. With n values seen,
# and exponential tails, a new one gets there with probability n^-4, with normal tails hardly
# ever; values of [0, 1] that were multiplied by 16 or 255 do
_FAR = 3
# one in so many calls on a GPU is checked
_CALLS = 32

# a form in the header of a file
FORM = artifact.fields(
    {"parts": artifact.whole(1), "axes": artifact.each(artifact.whole())},
    {
        "alike": artifact.maybe(artifact.whole()),
        "columns": artifact.table(artifact.each(artifact.TEXT)),
    },
)

_ALL_OF_THEM = "for the scores of all batches type monitor.score(iter(batches))"


class Inputs:
    """The arguments of one call of the model; tensors share their first axis, the batch.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments. Values that are not tensors are passed on as they are.

    Attributes:
        batch_size: Number of samples.
        shapes: Shape and dtype of each tensor.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        values = (*args, *kwargs.values()) if kwargs else args
        tensors, shapes, sizes = [], [], set()
        for value in values:
            if isinstance(value, Tensor):
                tensors.append(value)
                shapes.append((value.shape, value.dtype))
                sizes.add(len(value) if value.ndim else None)
        if len(tensors) < len(values):
            _check_not_nested(values)
        if not sizes:
            raise BatchError(
                "expected at least one tensor among the model's inputs, got "
                f"{[type(value).__name__ for value in values]}; "
                "pick them with Monitor(..., inputs=lambda batch: ...)"
            )
        if len(sizes) > 1 or None in sizes:
            listed = [tuple(t.shape) for t in tensors]
            raise BatchError(
                "expected every input tensor to have the batch as its first axis, got shapes "
                f"{listed}; pick or reshape them with Monitor(..., inputs=lambda batch: ...)"
            )
        self.batch_size = len(tensors[0])
        self.shapes: tuple[Any, ...] = tuple(shapes)
        self._tensors: list[Tensor] = tensors

    @staticmethod
    def of(picked: object) -> Inputs:
        """Return the call with a tensor, a tuple, a list or a dict as its arguments.

        Raises:
            BatchError: If it is something else.
        """
        if isinstance(picked, Inputs):
            return picked
        if isinstance(picked, Tensor):
            return Inputs((picked,), {})
        if isinstance(picked, Mapping):
            return Inputs((), dict(picked))
        if isinstance(picked, (tuple, list)):
            return Inputs(tuple(picked), {})
        advice = "pass inputs=lambda batch: ... to the Monitor"
        if is_array(picked):
            raise BatchError(
                f"expected an array of numbers, got a {type(picked).__name__} of dtype "
                f"{np.asarray(picked).dtype}; drop or encode the columns that are not numbers, "
                "or type x.astype('float32')"
            )
        if isinstance(picked, Dataset):
            raise BatchError(
                f"expected a batch, or a loader of batches, got a {type(picked).__name__}; "
                "type DataLoader(dataset, batch_size=64)"
            )
        if isinstance(picked, Iterable):  # a loader, or something like it
            advice += f"; {_ALL_OF_THEM}"
        raise BatchError(
            f"expected a tensor, tuple, list or dict as a batch, got "
            f"{type(picked).__name__}; {advice}"
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors: positional ones first, then keywords in their order."""
        return self._tensors

    def floating(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the dense floating-point tensors that are not empty, detached, by name.

        Their names are their positions or keywords. Token ids and masks are not among them.
        """
        for key, value in chain(enumerate(self.args), self.kwargs.items()):
            is_dense = isinstance(value, Tensor) and value.layout is torch.strided
            if is_dense and value.dtype in _FLOATING and value.numel():
                yield str(key), value.detach()

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the same call with ``function`` applied to each tensor."""
        return self.with_tensors([function(t) for t in self._tensors])

    def with_tensors(self, tensors: Iterable[Tensor]) -> Inputs:
        """Return the same call with other tensors, in the order of `tensors`."""
        values = iter(tensors)
        args = [next(values) if isinstance(v, Tensor) else v for v in self.args]
        kwargs = self.kwargs and {
            k: next(values) if isinstance(v, Tensor) else v for k, v in self.kwargs.items()
        }
        return Inputs(tuple(args), kwargs)

    def check_some(self) -> None:
        """Make sure there is a sample to choose an engine with.

        Raises:
            BatchError: If there is none.
        """
        if self.batch_size == 0:
            raise BatchError("expected samples in the first batch, got none; leave it out")

    def samples(self, which: slice) -> Inputs:
        """Return the call restricted to a slice of samples."""
        return self.with_tensors([t[which] for t in self._tensors])

    def repeated(self, count: int) -> Inputs:
        """Return the call with each sample repeated in place, as ``repeat_interleave``."""
        return self.with_tensors([t.repeat_interleave(count, 0) for t in self._tensors])

    def joined(self, other: Inputs) -> Inputs:
        """Return the samples of both calls; only this one's if shapes or dtypes differ."""

        def alike(call: Inputs) -> list[Any]:
            return [(shape[1:], dtype) for shape, dtype in call.shapes]

        if alike(self) != alike(other):
            return self
        pairs = zip(self._tensors, other._tensors, strict=True)
        return self.with_tensors(map(torch.cat, pairs))

    def first(self, count: int) -> Inputs:
        """Return the call with its first samples; the last is repeated if there are fewer."""
        order = torch.arange(count).clamp_max(self.batch_size - 1)
        return self.map(lambda t: t[order.to(t.device)])


def _check_not_nested(values: Iterable[object]) -> None:
    """Make sure that no tensor is nested inside another argument.

    Raises:
        BatchError: If one is.
    """
    for value in values:
        inner = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(inner, (list, tuple)) and any(isinstance(v, Tensor) for v in inner):
            raise BatchError(
                f"expected tensors as the model's inputs, got a {type(value).__name__} of "
                "them; pass them one by one (inputs=lambda batch: (a, b) or {'name': a}), with "
                "a small module around the model that puts them together"
            )


@dataclass(frozen=True)
class Form:
    """The form of a fit's batches, which later batches are compared with.

    Args:
        parts: Number of elements of a tuple or list; 1 for anything else.
        axes: Number of axes of each input tensor.
        alike: Number of elements that are tensors of the first one's form; None if unknown.
        columns: Names of the columns of data frames, in their order; None if there were none.
    """

    parts: int
    axes: list[int]
    alike: int | None = None
    columns: Columns | None = None

    @staticmethod
    def of(batch: object, call: Inputs, by_name: bool = True) -> Form:
        """Return the form of a batch.

        Args:
            batch: As the loader yields it.
            call: The inputs in it.
            by_name: Whether columns of data frames are told apart by name.
        """
        parts, alike = 1, 0
        if isinstance(batch, (tuple, list)):
            parts, alike = len(batch), len(_alike(batch))
        axes = [tensor.ndim for tensor in call.tensors()]
        return Form(parts, axes, alike, columns_of(batch) if by_name else None)

    def document(self) -> dict[str, Any]:
        """Return the form as plain data, the arguments of `Form`."""
        told = asdict(self)
        if self.columns is None:
            del told["columns"]
        return told

    def check(self, call: Inputs) -> None:
        """Refuse a sample without a batch axis: some layers would treat it as a batch.

        Raises:
            BatchError: If every input lacks one axis.
        """
        if [len(shape) + 1 for shape, _ in call.shapes] == self.axes:
            shapes = [tuple(shape) for shape, _ in call.shapes]
            raise BatchError(
                f"expected inputs of {', '.join(map(str, self.axes))} axes, the batch first, "
                f"as in the fit, got shapes {shapes}; for a single sample type x[None]; "
                "otherwise pick the inputs with Monitor(..., inputs=lambda batch: ...)"
            )


def default_inputs(batch: object, forward: Callable[..., Any], form: Form | None) -> object:
    """Return the model's inputs in a batch by default rules, without a user's ``inputs``.

    Args:
        batch: As the loader yields it: of a tuple or list the first element is taken, of a dict
            the keys that ``forward`` names, without labels.
        forward: The model's method.
        form: Of the fit's batches, if known.

    Raises:
        BatchError: If the batch has no inputs of the model, or looks like several batches.
    """
    if isinstance(batch, (tuple, list)) and batch:
        _check_one_batch(batch, form)
        batch = batch[0]
    if not isinstance(batch, Mapping):
        return batch
    accepted = inspect.signature(forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    picked = {
        str(key): value
        for key, value in batch.items()
        if (anything or key in accepted) and key not in LABEL_KEYS
    }
    if not picked:
        raise BatchError(
            f"expected a dict with inputs of the model ({', '.join(accepted)}), got "
            f"{', '.join(map(str, batch))}; pick them with inputs=lambda batch: ..."
        )
    return picked


def _check_one_batch(batch: Sequence[object], form: Form | None) -> None:
    """Refuse several batches in place of one, of which all but the first would be dropped.

    Tensors of equal form may also be inputs and targets, as for an autoencoder: they are
    treated as such if the batches of the fit had as many of them or, if that is unknown, if
    they have equally many samples.

    Raises:
        BatchError: If the elements look like batches.
    """
    like = _alike(batch)
    if len(like) < 2:
        return
    several = len({len(p) for p in like}) > 1
    if form is not None:
        more = form.alike is not None and len(like) > form.alike
        several = several or more or form.parts != len(batch)
    if several:
        raise BatchError(
            f"expected one batch, got {len(like)} tensors that look like one each, of shapes "
            f"{[tuple(p.shape) for p in like]}; {_ALL_OF_THEM}; or, if the others are targets, "
            "pass batch[0], or inputs=lambda batch: batch[0] to the Monitor"
        )


def _alike(batch: Sequence[object]) -> list[Tensor]:
    """Return the elements that are tensors of the first one's form, but for their number."""
    first = batch[0] if batch else None
    if not isinstance(first, Tensor) or not first.ndim:
        return []
    tensors = [p for p in batch if isinstance(p, Tensor) and p.ndim]
    return [p for p in tensors if p.dtype == first.dtype and p.shape[1:] == first.shape[1:]]


def ordinary(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd can save: a copy if it was created in inference mode."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


# --- Ranges ---


def widen(seen: dict[str, Tensor], call: Inputs) -> None:
    """Extend the ranges seen so far by a batch, in place, without synchronising with a GPU.

    Token ids and boolean masks have no range; values that are not finite are left out.

    Args:
        seen: Smallest value (negated) and largest of each input, ``(2,)``; changed in place.
        call: The batch.
    """
    for name, value in call.floating():
        ends = extremes(value)
        seen[name] = ends.maximum(seen[name]) if name in seen else ends


def ranges_of(seen: Mapping[str, Tensor]) -> Ranges:
    """Return the ranges collected by `widen`, without inputs that were never finite."""
    listed = {name: ends.tolist() for name, ends in seen.items()}
    return {name: (-low, high) for name, (low, high) in listed.items() if high > -math.inf}


def seen_in(ranges: Ranges, device: torch.device) -> dict[str, Tensor]:
    """Return ranges in the form that `widen` takes, the inverse of `ranges_of`."""
    return {
        name: torch.tensor([-low, high], dtype=torch.float64, device=device)
        for name, (low, high) in ranges.items()
    }


def joined_ranges(one: Ranges | None, other: Ranges | None) -> Ranges | None:
    """Return the union of the ranges of two data sets; None if one is unknown."""
    if one is None or other is None:
        return None
    both = dict(one)
    for name, (low, high) in other.items():
        first, last = both.get(name, (low, high))
        both[name] = min(low, first), max(high, last)
    return both


def extremes(value: Tensor) -> Tensor:
    """Return the smallest finite value (negated) and the largest; -inf if there is none."""
    finite = value.isfinite()
    low = torch.where(finite, value, math.inf).amin()
    return torch.stack([-low, torch.where(finite, value, -math.inf).amax()]).double()


class RangeWatch:
    """Warns, once, of inputs that are far outside the range of the fit.

    A saturated classifier has no gradients left: inputs that were not scaled as in training
    then get scores near 0. A check of their range detects most of that. On a GPU the first
    call and every 32nd after it are checked: synchronising would idle it, and scaling that is
    missing is missing in every call.

    Args:
        seen: The ranges of the fit; None if they are unknown.
    """

    def __init__(self, seen: Ranges | None) -> None:
        self.seen = seen
        # by position or keyword; the range of a constant input has no width
        self._ranges = {
            int(name) if name.isdigit() else name: (low, high)
            for name, (low, high) in (seen or {}).items()
            if low < high
        }
        self._calls = 0

    def look(self, call: Inputs) -> bool:
        """Check the ranges of a batch.

        Args:
            call: The batch.

        Returns:
            Whether all inputs are known to be finite; False also if not all were checked.
        """
        num_finite = 0
        for name, value in chain(enumerate(call.args), call.kwargs.items()):
            if name not in self._ranges or not isinstance(value, Tensor):
                continue
            if not value.is_floating_point() or not value.numel():
                continue
            if value.is_cuda:
                self._calls += 1
                if self._calls % _CALLS != 1:
                    continue
            first, last = self._ranges[name]
            low, high = map(float, torch.aminmax(value.detach()))
            if math.isfinite(low + high):
                num_finite += 1
            else:  # non-finite samples score infinity: check the range of the others
                negated, high = extremes(value.detach()).tolist()
                low = -negated
            if min(low - first, last - high) < -_FAR * (last - first):
                self._ranges = {}
                warnings.warn(
                    f"expected inputs like those of the fit, where input {name} was from "
                    f"{first:.4g} to {last:.4g}, got some from {low:.4g} to {high:.4g}: scores "
                    "so far away from all data mean little, and a classifier's may be the "
                    "lowest there are; look how the inputs are scaled (forgot to divide by "
                    "255?)",
                    SuspiciousInputWarning,
                    stacklevel=4,
                )
                return False
        return num_finite == len(call.shapes)
