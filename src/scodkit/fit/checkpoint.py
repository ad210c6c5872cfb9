"""How far a pass over the data has come, and the file it goes on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scodkit import errors
from scodkit.fit.data import Seen, batch_digest
from scodkit.model.input_range import InputRange
from scodkit.model.inputs import Inputs, Ranges, ranges_of, seen_in, widen
from scodkit.numerics import artifact
from scodkit.numerics.files import remove_leftovers
from scodkit.sketch import SketchState, documents

_KIND = "checkpoint"
_STATE = "state."
_COLUMNS = "columns."
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
    """How far a pass over the data has come, in memory and in a file if there is one.

    Args:
        state: The sketch so far.
        path: The file; None for none.
        identity: What the pass is of, as plain data; the file of another pass is refused.
        every: Batches between two writes of the file.
        samples: Samples read, good or bad.
        skipped: Samples left out because they were not finite.
        digests: Hashes of the batches read, needed with a file only.
        seen: Which samples are in the sketch.
        batches: Batches read.
        unchecked: Pieces not yet known to be finite, see `check_later`.
        ranges: Of the inputs, see `widen`; None if a part of the pass did not look.
        columns: Of tables among them; likewise.
    """

    state: SketchState
    path: Path | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    every: int = 1
    samples: int = 0
    skipped: int = 0
    digests: list[int] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)
    batches: int = 0
    unchecked: list[tuple[Tensor, Tensor, int, int, int]] = field(default_factory=list)
    ranges: dict[str, Tensor] | None = field(default_factory=dict)
    columns: InputRange | None = field(default_factory=InputRange)

    def resume(self, path: Path, identity: dict[str, Any], every: int) -> None:
        """Go on where an earlier pass was, if there is a file of it, and keep that file.

        Args:
            path: Where the file is, or will be.
            identity: As above.
            every: As above.

        Raises:
            MismatchError: If the file is one of another pass.
            CorruptArtifactError: If it is no checkpoint.
        """
        self.path, self.identity, self.every = path, identity, every
        remove_leftovers(path)
        try:
            header, tensors = artifact.read(path, _KIND, _HEADER)
            checks = documents.state_checks(tensors, _STATE)
            checks[_BATCHES] = artifact.DIGESTS
            columns = {n: t for n, t in tensors.items() if n.startswith(_COLUMNS)}
            others = {_SAMPLES: artifact.DIGESTS, **dict.fromkeys(columns, artifact.ANY_TENSOR)}
            artifact.fields(checks, others)(str(path), tensors)
            seen = InputRange.unpack({n.removeprefix(_COLUMNS): t for n, t in columns.items()})
        except errors.MissingFileError:
            return
        except errors.CorruptArtifactError as error:
            raise errors.CorruptArtifactError(
                f"expected a checkpoint or nothing at {path}, got something else, or a "
                f"checkpoint of an earlier version "
                f"({error}); choose another path, or delete that"
            ) from error
        differing = [
            f"{key}: {header['identity'].get(key)} there, {value} here"
            for key, value in identity.items()
            if header["identity"].get(key) != value
        ]
        if differing:
            raise errors.MismatchError(
                f"expected a checkpoint of this fit at {path}, got one of another ("
                + "; ".join(differing)
                + "); delete it or choose another path"
            )
        empty, device = self.state, self.state.squared_norm.device
        state = documents.unpack_state(header["state"], tensors, _STATE, empty.sketch)
        shape = (state.num_parameters, state.columns)
        dtypes = {tensor.dtype for tensor in state.tensors.values()}
        if shape != (empty.num_parameters, empty.columns) or dtypes != {empty.dtype}:
            artifact.refuse(f"a sketch of {empty.num_parameters} weights at {path}", "another")
        self.state = state.to(device)
        self.samples, self.skipped = header["samples"], header["skipped"]
        self.digests, self.seen = tensors[_BATCHES].tolist(), Seen(tensors.get(_SAMPLES))
        self.batches = len(self.digests)
        ranges = header.get("input_range")  # checkpoints of earlier versions have none
        self.ranges = None if ranges is None else seen_in(ranges, device)
        self.columns = seen if columns else None

    def covers(self, number: int, call: Inputs) -> bool:
        """Return whether a batch was read before the pass was resumed.

        Args:
            number: Of the batch.
            call: Its inputs; refused if they were others then.
        """
        if number >= self.batches:
            return False
        self._check_data(self.digests[number] == batch_digest(call))
        return True

    def count(self, call: Inputs, late: int) -> None:
        """Count a batch that was added to the sketch; write the file if it is time to.

        Args:
            call: The batch.
            late: How many of the last pieces are left to be checked later.
        """
        self.batches += 1
        self.samples += call.batch_size
        if self.ranges is not None:
            widen(self.ranges, call)
        if self.columns is not None:
            self.columns.add(call, tables_only=True)
        self.check(late)
        if self.path is not None:
            self.digests.append(batch_digest(call))
            if self.batches % self.every == 0:
                self._write(self.path)

    def finish(self, batches: int) -> None:
        """Make the last checks, and write the file.

        Args:
            batches: How many batches the data had.
        """
        self.check()
        if self.path is not None:
            self._check_data(batches == self.batches)
            self._write(self.path)

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

    def check(self, late: int = 0) -> None:
        """Refuse samples with a NaN or an infinity.

        Args:
            late: How many of the last pieces are left to be checked later.

        Raises:
            NonFiniteError: With the first of them.
        """
        while len(self.unchecked) > late:
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

    def _check_data(self, same: bool) -> None:
        """Make sure the data is that of the file.

        Raises:
            MismatchError: If it is not.
        """
        if not same:
            raise errors.MismatchError(
                f"expected the data of the checkpoint at {self.path}, got other batches; go on "
                "with the same data in the same order, or delete the checkpoint"
            )

    def _write(self, path: Path) -> None:
        """Write the file, atomically."""
        self.check()
        header, tensors = documents.pack_state(self.state, _STATE)
        full = {
            "state": header,
            "identity": self.identity,
            "samples": self.samples,
            "skipped": self.skipped,
            "input_range": self.input_range,
        }
        if self.columns is not None:
            tensors |= {_COLUMNS + name: own for name, own in self.columns.pack().items()}
        tensors[_BATCHES] = torch.tensor(self.digests, dtype=torch.int64)
        samples = self.seen.all()
        if samples is not None:
            tensors[_SAMPLES] = samples
        artifact.write(path, _KIND, full, tensors)
