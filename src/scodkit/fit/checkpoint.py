"""How far a pass over the data has come, and the file it goes on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scodkit import errors
from scodkit.fit.data import Seen, batch_digest
from scodkit.model.inputs import Inputs, Ranges, ranges_of, seen_in, widen
from scodkit.numerics import artifact
from scodkit.numerics.files import remove_leftovers
from scodkit.sketch import SketchState, documents

_KIND = "checkpoint"
_STATE = "state."
_SAMPLES, _BATCHES = "samples", "batches"
_HEADER = artifact.all_of(
    artifact.fields(
        {
            "state": documents.STATE,
            "identity": artifact.OBJECT,
            "samples": artifact.whole(),
            "skipped": artifact.whole(),
        },
        {"input_range": artifact.maybe(artifact.RANGES)},
        others=True,
    ),
    artifact.that(
        "as many samples as are in the sketch, or were skipped,",
        lambda header: header["state"]["num_data"] + header["skipped"] <= header["samples"],
    ),
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
        unchecked: Pieces not yet known to be finite, see `check_later`.
        seen: Which samples are in the sketch.
        ranges: Of the inputs, see `widen`; None if a part of the pass did not look.
    """

    state: SketchState
    batches: int = 0
    samples: int = 0
    skipped: int = 0
    digests: list[int] = field(default_factory=list)
    unchecked: list[tuple[Tensor, Tensor, int, int, int]] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)
    ranges: dict[str, Tensor] | None = field(default_factory=dict)

    def count(self, call: Inputs) -> None:
        """Note that a batch was read."""
        self.batches += 1
        self.samples += call.batch_size
        if self.ranges is not None:
            widen(self.ranges, call)

    @property
    def input_range(self) -> Ranges | None:
        """The ranges of the inputs, if they are known."""
        return None if self.ranges is None else ranges_of(self.ranges)

    def check_later(self, good: Tensor, finite: Tensor, first: int) -> None:
        """Note a piece to `check`: waiting for its numbers at once would idle a GPU.

        Args:
            good: Which of its samples are finite in all, gradients included, ``(b,)``.
            finite: Which are in inputs and output, ``(b,)``.
            first: Row of its first sample in the batch.
        """
        self.unchecked.append((good, finite, first, self.batches, self.samples))

    def check(self, but: int = 0) -> None:
        """Refuse samples with a NaN or an infinity.

        Args:
            but: How many of the last pieces are left for later.

        Raises:
            NonFiniteError: With the first of them.
        """
        while len(self.unchecked) > but:
            good, finite, first, batch, samples = self.unchecked.pop(0)
            if bool(good.all()):
                continue
            place = int((~good).nonzero()[0])
            what = "gradients" if bool(finite[place]) else "inputs or output"
            row = first + place
            raise errors.NonFiniteError(
                f"expected finite numbers, got a NaN or an infinity in the {what} of sample "
                f"{samples + row} (batch {batch}, row {row}); mend or remove it, or type "
                "fit(..., on_bad='skip') to leave such samples out and count them"
            )


@dataclass(frozen=True)
class Checkpoint:
    """A file for an unfinished pass.

    Args:
        path: Where it is; None for no file, where all methods do nothing.
        identity: What the pass is of; that of another pass is refused.
        every: Batches between two writes.
    """

    path: Path | None
    identity: dict[str, Any]
    every: int

    def resume(self, state: SketchState) -> Progress:
        """Return how far an earlier pass has come; nowhere if there is no file.

        Args:
            state: The sketch of a pass that has seen nothing.

        Raises:
            MismatchError: If the file is one of another pass.
            CorruptArtifactError: If it is no checkpoint.
        """
        if self.path is None:
            return Progress(state)
        remove_leftovers(self.path)
        try:
            header, tensors = artifact.read(self.path, _KIND, _HEADER)
            checks = documents.state_checks(tensors, _STATE)
            checks[_BATCHES] = artifact.DIGESTS
            artifact.fields(checks, {_SAMPLES: artifact.DIGESTS})(str(self.path), tensors)
        except errors.MissingFileError:
            return Progress(state)
        except errors.CorruptArtifactError as error:
            raise errors.CorruptArtifactError(
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
            raise errors.MismatchError(
                f"expected a checkpoint of this fit at {self.path}, got one of another ("
                + "; ".join(differing)
                + "); delete it or choose another path"
            )
        resumed = documents.unpack_state(header["state"], tensors, _STATE, state.sketch)
        shape, device = (resumed.num_parameters, resumed.columns), state.squared_norm.device
        dtypes = {tensor.dtype for tensor in resumed.tensors.values()}
        if shape != (state.num_parameters, state.columns) or dtypes != {state.dtype}:
            artifact.refuse(
                f"a sketch of {state.num_parameters} weights at {self.path}", "another"
            )
        progress = Progress(
            resumed.to(device),
            samples=header["samples"],
            skipped=header["skipped"],
            digests=tensors[_BATCHES].tolist(),
            seen=Seen(tensors.get(_SAMPLES)),
        )
        progress.batches = len(progress.digests)
        ranges = header.get("input_range")  # checkpoints of earlier versions have none
        progress.ranges = None if ranges is None else seen_in(ranges, device)
        return progress

    def covers(self, progress: Progress, number: int, call: Inputs) -> bool:
        """Return whether a batch was read before the checkpoint was written.

        Args:
            progress: Of the pass.
            number: Of the batch.
            call: Its inputs.
        """
        if number >= progress.batches:
            return False
        self._check_data(progress.digests[number] == batch_digest(call))
        return True

    def note(self, progress: Progress, call: Inputs) -> None:
        """Note that a batch was added to the sketch; write the file if it is time to."""
        if self.path is not None:
            progress.digests.append(batch_digest(call))
            if progress.batches % self.every == 0:
                progress.check()
                self._write(self.path, progress)

    def finish(self, progress: Progress, batches: int) -> None:
        """Write the file at the end of the data.

        Args:
            progress: Of the pass.
            batches: How many there were.
        """
        if self.path is not None:
            self._check_data(batches >= progress.batches)
            self._write(self.path, progress)

    def _write(self, path: Path, progress: Progress) -> None:
        header, tensors = documents.pack_state(progress.state, _STATE)
        full = {
            "state": header,
            "identity": self.identity,
            "samples": progress.samples,
            "skipped": progress.skipped,
            "input_range": progress.input_range,
        }
        tensors[_BATCHES] = torch.tensor(progress.digests, dtype=torch.int64)
        samples = progress.seen.all()
        if samples is not None:
            tensors[_SAMPLES] = samples
        artifact.write(path, _KIND, full, tensors)

    def _check_data(self, same: bool) -> None:
        """Make sure the data is that of the checkpoint.

        Raises:
            MismatchError: If it is not.
        """
        if not same:
            raise errors.MismatchError(
                f"expected the data of the checkpoint at {self.path}, got other batches; go on "
                "with the same data in the same order, or delete the checkpoint"
            )
