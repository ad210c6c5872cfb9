"""Data for the verbs: from a file or from the user's own code, into batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from scodkit.cli.files import (
    ArraySamples,
    Samples,
    SamplesShard,
    check_numbers,
    read_samples,
)
from scodkit.cli.loading import called, named
from scodkit.cli.output import note
from scodkit.errors import BatchError, NonFiniteError, OptionError
from scodkit.fit.reading import loader_like
from scodkit.parts import Shard, reads_all_once


@dataclass(frozen=True)
class Form:
    """What a sample looks like when the model takes it.

    Args:
        dtype: Of its numbers.
        shape: Of a sample; None where that is not known, before a fit.
        columns: Names of its numbers, if they have names.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    columns: tuple[str, ...] | None = None

    @classmethod
    def before_fit(cls, model: nn.Module) -> Form:
        """Return what is known from the model alone: the dtype of its weights."""
        dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
        return cls(next(dtypes, torch.float32))

    @classmethod
    def of_fit(cls, notes: Mapping[str, Any], model: nn.Module) -> Form:
        """Return what a monitor's fit has noted, or what the model says where it has not."""
        noted = notes.get("inputs")
        if noted is None:
            return cls.before_fit(model)
        columns = noted.get("columns")
        return cls(
            getattr(torch, noted["dtype"]),
            tuple(noted["shape"]),
            None if columns is None else tuple(columns),
        )

    def note(self) -> dict[str, Any]:
        """Return it as plain data, for `of_fit`."""
        columns = None if self.columns is None else list(self.columns)
        shape = None if self.shape is None else list(self.shape)
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": shape,
            "columns": columns,
        }

    def tensor(self, values: NDArray[Any], has_dtype: bool) -> Tensor:
        """Return samples as the model takes them.

        Args:
            values: ``(b, *shape)``.
            has_dtype: Whether their dtype was chosen, so that integers are not taken for
                floats: pixels from 0 to 255 may be meant to be divided first.

        Raises:
            BatchError: If they have another dtype or another number of axes than at the fit.
        """
        if self.shape is not None and values.ndim != 1 + len(self.shape):
            raise BatchError(
                f"expected samples of shape {self.shape}, as at the fit, in an array with one "
                f"more axis in front, got an array of shape {values.shape}; for a single "
                "sample type x[None]"
            )
        tensor = torch.from_numpy(_native(values))
        same_kind = tensor.is_floating_point() == self.dtype.is_floating_point
        if same_kind or not has_dtype:
            found = tensor.to(self.dtype)
            if not same_kind and not self.dtype.is_floating_point and (found != tensor).any():
                raise BatchError(
                    "expected whole numbers, as at the fit, got a fraction or a NaN; "
                    "pass what the model was trained with"
                )
            return found
        if self.shape is not None:
            wanted, came = str(self.dtype).removeprefix("torch."), values.dtype.name
            raise BatchError(
                f"expected numbers in {wanted}, as at the fit, got {came}; if they mean the "
                f"same, type x.astype('{wanted}')"
            )
        return tensor


class Batches:
    """Samples in batches, read as they are asked for.

    Args:
        samples: The samples.
        size: Samples in a batch.
        form: What they are to look like.
        finite: Refuse samples with a NaN or an infinity.
    """

    def __init__(self, samples: Samples, size: int, form: Form, finite: bool) -> None:
        self.dataset = samples
        self._size, self._form, self._finite = size, form, finite

    def __len__(self) -> int:
        return -(-len(self.dataset) // self._size)

    def __iter__(self) -> Iterator[Tensor]:
        for start in range(0, len(self.dataset), self._size):
            yield self.read(slice(start, start + self._size))

    def read(self, rows: slice) -> Tensor:
        """Return some samples as a batch, ``(b, *shape)``.

        Args:
            rows: Which.

        Raises:
            NonFiniteError: If there is a NaN or an infinity, and there must not be.
        """
        batch = self._form.tensor(self.dataset.read(rows), self.dataset.has_dtype)
        numbers = math.prod(batch.shape[1:])
        bad = ~batch.isfinite().reshape(len(batch), numbers).all(1)
        if self._finite and bool(bad.any()):
            first = (rows.start or 0) + int(bad.nonzero()[0])
            raise NonFiniteError(
                f"expected finite numbers, got a NaN, an infinity or an empty cell in sample "
                f"{self.dataset.name(first)} (samples are counted from 0); mend or remove it"
            )
        return batch

    def shard(self, index: int, count: int) -> Batches:
        """Return a part of them.

        Args:
            index: Which, from 0.
            count: How many parts there are.
        """
        part = SamplesShard(self.dataset, index, count)
        return Batches(part, self._size, self._form, self._finite)

    def form(self) -> Form:
        """Return what the first sample looks like."""
        first = self.read(slice(0, 1))
        return Form(first.dtype, tuple(first.shape[1:]), self.dataset.columns)


def batches_of(
    spec: str,
    size: int,
    form: Form,
    *,
    finite: bool = True,
    columns: Sequence[str] | None = None,
    progress: bool = False,
) -> Batches | Iterable[Any]:
    """Return batches of what the user names.

    Args:
        spec: A file of arrays, a folder of images, or a callable that returns a tensor or
            array, a ``Dataset``, or an iterable of batches; so is a tuple of tensors.
        size: Samples in a batch, of what is not in batches yet.
        form: What samples are to look like, if they come as arrays.
        finite: Refuse a NaN or an infinity in arrays.
        columns: Of a table, by name; those of the fit by default.
        progress: Show a progress bar where reading takes long.

    Raises:
        OptionError: If the callable returns something else.
    """
    path = Path(spec)
    if path.exists() or ":" not in spec:
        samples = read_samples(path, columns or form.columns, progress=progress)
        if isinstance(samples, ArraySamples) and samples.left_out:
            note(f"columns left out of {path}: {', '.join(samples.left_out)}")
        return Batches(samples, size, form, finite)
    found = called(named(spec, "data"), spec)
    if isinstance(found, Tensor):
        found = found.detach().cpu()
        found = (found.float() if found.dtype == torch.bfloat16 else found).numpy()
    if isinstance(found, np.ndarray):
        check_numbers(found, spec)
        return Batches(ArraySamples(found), size, form, finite)
    if isinstance(found, Dataset):
        return DataLoader(found, batch_size=size)
    if isinstance(found, Iterable) and not isinstance(found, (str, bytes, Mapping)):
        return found
    raise OptionError(
        f"expected {spec} to return a tensor, a Dataset or an iterable of batches, got a "
        f"{type(found).__name__}"
    )


def shard_of(
    batches: Batches | Iterable[Any], index: int, count: int
) -> Batches | Iterable[Any]:
    """Return a part of some batches: none padded, none in two parts.

    Args:
        batches: As `batches_of` returns them. Those that come in the user's own order are
            dealt out in turn; all are read for it.
        index: Which part, from 0.
        count: How many parts there are.

    Raises:
        OptionError: If it is a loader that cannot be divided.
    """
    if count == 1:
        return batches
    if isinstance(batches, Batches):
        return batches.shard(index, count)
    if isinstance(batches, DataLoader):
        if not reads_all_once(batches):
            raise OptionError(
                "expected a DataLoader that reads every item of its data set once, to be "
                "divided, got one with a sampler of its own, or that drops some; let the "
                "callable return a Dataset that is read by position"
            )
        part = Shard(batches.dataset, index, count)
        return loader_like(batches, part, batch_size=batches.batch_size)
    return itertools.islice(batches, index, None, count)


def _native(values: NDArray[Any]) -> NDArray[Any]:
    """Return an array of a dtype that torch has, in the machine's byte order.

    Raises:
        BatchError: If there is none that can hold it.
    """
    dtype = values.dtype.newbyteorder("=")
    if dtype.kind == "u" and dtype.itemsize > 1:
        dtype = np.dtype(np.int64)
        if values.size and values.max() > np.iinfo(np.int64).max:
            raise BatchError(
                f"expected integers that int64 can hold, got {values.max()}; type "
                "x.astype('float64')"
            )
    elif dtype.kind == "f" and dtype.itemsize > 8:
        dtype = np.dtype(np.float64)
    return np.ascontiguousarray(values, dtype=dtype)
