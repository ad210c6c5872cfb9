"""How far a pass over the data has come, and the file it goes on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scodkit.errors import (
    CorruptArtifactError,
    MismatchError,
    MissingFileError,
    NonFiniteError,
)
from scodkit.fit.data import Seen, nothing
from scodkit.model.inputs import Inputs, Ranges, ranges_of, seen_in, widen
from scodkit.numerics import artifact
from scodkit.numerics.artifact import (
    DIGESTS,
    OBJECT,
    RANGES,
    all_of,
    fields,
    maybe,
    refuse,
    that,
    whole,
)
from scodkit.numerics.files import remove_leftovers
from scodkit.sketch import SketchState, documents

_KIND = "checkpoint"
_STATE = "state."
_SAMPLES, _BATCHES = "samples", "batches"
_COUNTS = {"samples": whole(), "skipped": whole()}
_HEADER = all_of(
    fields(
        {"state": documents.STATE, "identity": OBJECT, **_COUNTS},
        {"input_range": maybe(RANGES)},
        others=True,
    ),
    that(
        "as many samples as are in the sketch, or were skipped,",
        lambda header: header["state"]["num_data"] + header["skipped"] <= header["samples"],
    ),
)


class FiniteCheck:
    """Whether the samples of a piece were finite, to be asked once a GPU has found out."""

    def __init__(self, good: Tensor, finite: Tensor, first: int, progress: Progress) -> None:
        self._good, self._finite, self._first = good, finite, first
        self._batch, self._before = progress.batches, progress.samples

    def ask(self) -> None:
        """Refuse samples with a NaN or an infinity.

        Raises:
            NonFiniteError: With the first of them.
        """
        if bool(self._good.all()):
            return
        place = int((~self._good).nonzero()[0])
        what = "gradients" if bool(self._finite[place]) else "inputs or output"
        row = self._first + place
        raise NonFiniteError(
            f"expected finite numbers, got a NaN or an infinity in the {what} of sample "
            f"{self._before + row} (batch {self._batch}, row {row}); mend or remove it, "
            "or type fit(..., on_bad='skip') to leave such samples out and count them"
        )


@dataclass
class Progress:
    """How far a pass has come.

    Args:
        state: The sketch so far.
        batches: Batches finished.
        samples: Samples read, good or bad.
        digests: Hashes of the batches finished, kept only for checkpoints.
        skipped: Samples left out because they were not finite.
        unchecked: Pieces not yet known to be finite: asking at once would idle a GPU.
        seen: Which samples are in the sketch.
        ranges: Of the inputs, as `scodkit.ranges.widen` keeps them; None if a part of the
            pass did not look.
    """

    state: SketchState
    batches: int = 0
    samples: int = 0
    skipped: int = 0
    digests: list[int] = field(default_factory=list)
    unchecked: list[FiniteCheck] = field(default_factory=list)
    seen: Seen = field(default_factory=nothing)
    ranges: dict[str, Tensor] | None = field(default_factory=dict)

    def count(self, call: Inputs) -> None:
        """Note that a batch was read."""
        self.samples += call.batch_size
        if self.ranges is not None:
            widen(self.ranges, call)

    @property
    def input_range(self) -> Ranges | None:
        """The ranges of the inputs, if they are known."""
        return None if self.ranges is None else ranges_of(self.ranges)

    def check(self, but: int = 0) -> None:
        """Refuse pieces that were not finite, the last few left for later."""
        while len(self.unchecked) > but:
            self.unchecked.pop(0).ask()


@dataclass(frozen=True)
class Checkpoint:
    """A file for an unfinished pass.

    Args:
        path: Where it is.
        identity: What the pass is of; one of something else is not gone on with.
    """

    path: Path
    identity: dict[str, Any]

    def resume(self, state: SketchState) -> Progress:
        """Return how far an earlier pass has come; nowhere if there is no file.

        Args:
            state: The sketch of a pass that has seen nothing.

        Raises:
            MismatchError: If the file is one of another pass.
            CorruptArtifactError: If it is no checkpoint.
        """
        remove_leftovers(self.path)
        try:
            header, tensors = artifact.read(self.path, _KIND, _HEADER)
            checks = documents.state_checks(tensors, _STATE)
            checks[_BATCHES] = DIGESTS
            fields(checks, {_SAMPLES: DIGESTS})(str(self.path), tensors)
        except MissingFileError:
            return Progress(state)
        except CorruptArtifactError as error:
            raise CorruptArtifactError(
                f"expected a checkpoint or nothing at {self.path}, got something else, or a "
                f"checkpoint of an earlier version "
                f"({error}); choose another path, or delete that"
            ) from error
        differing = [
            f"{key}: {header['identity'].get(key)} there, {value} here"
            for key, value in self.identity.items()
            if header["identity"].get(key) != value
        ]
        if differing:
            raise MismatchError(
                f"expected a checkpoint of this fit at {self.path}, got one of another ("
                + "; ".join(differing)
                + "); delete it or choose another path"
            )
        held = next(iter(state.tensors.values()))
        resumed = documents.unpack_state(header["state"], tensors, _STATE, state.sketch)
        shape = (resumed.num_parameters, resumed.columns)
        dtypes = {tensor.dtype for tensor in resumed.tensors.values()}
        if shape != (state.num_parameters, state.columns) or dtypes != {held.dtype}:
            refuse(f"a sketch of {state.num_parameters} weights at {self.path}", "another")
        progress = Progress(
            resumed.to(held.device),
            samples=header["samples"],
            skipped=header["skipped"],
            digests=tensors[_BATCHES].tolist(),
            seen=Seen(tensors.get(_SAMPLES)),
        )
        progress.batches = len(progress.digests)
        ranges = header.get("input_range")  # checkpoints of earlier versions have none
        progress.ranges = None if ranges is None else seen_in(ranges, held.device)
        return progress

    def save(self, progress: Progress) -> None:
        """Write how far a pass has come, atomically."""
        header, tensors = documents.pack_state(progress.state, _STATE)
        counts = {name: getattr(progress, name) for name in _COUNTS}
        about = {"state": header, "identity": self.identity, **counts}
        about["input_range"] = progress.input_range
        tensors[_BATCHES] = torch.tensor(progress.digests, dtype=torch.int64)
        samples = progress.seen.all()
        if samples is not None:
            tensors[_SAMPLES] = samples
        artifact.write(self.path, _KIND, about, tensors)

    def check_batch(self, progress: Progress, number: int, digest: int | None) -> None:
        """Make sure a batch is the one that the pass came by before.

        Args:
            progress: As it was resumed.
            number: Of the batch.
            digest: Its hash; None if there is no such batch any more.

        Raises:
            MismatchError: If it is another.
        """
        if progress.digests[number] != digest:
            raise MismatchError(
                f"expected the data of the checkpoint at {self.path}, got other batches; go on "
                "with the same data in the same order, or delete the checkpoint"
            )
