"""Processes that fit together: each reads its own part of the data, then sums are added up."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from scodkit.errors import MismatchError, ProcessError
from scodkit.numerics.artifact import check_place
from scodkit.numerics.files import file_errors
from scodkit.sketch import SketchState

if distributed.is_available():
    # The functions of this module take the group that stands when it is first imported as
    # their default. A fit would import it with a group at hand, and keep that group's threads
    # alive into the end of the interpreter, where they abort the process.
    import torch.distributed.nn  # noqa: F401

# numbers added up at a time: large enough for a network, small beside a sketch, of which no
# second copy is held
_BUCKET = 2**24


@dataclass(frozen=True)
class Processes:
    """The processes of a fit.

    Args:
        rank: Of this process.
        count: The world size.
    """

    rank: int = 0
    count: int = 1

    @staticmethod
    def here(together: bool = True) -> Processes:
        """Return those of torch's process group, or this one alone where there is none.

        Args:
            together: False to stay alone in any case.
        """
        if together and distributed.is_available() and distributed.is_initialized():
            return Processes(distributed.get_rank(), distributed.get_world_size())
        return Processes()

    def own_file(self, path: Path) -> Path:
        """Return the path of this rank's own file.

        Args:
            path: Of the file of a single process.
        """
        if self.count == 1:
            return path
        return path.with_name(f"{path.name}.{self.rank}-of-{self.count}")

    def kept_files(self, path: Path) -> tuple[list[Path], list[Path]]:
        """Return the files of this world size that exist, and those of other world sizes.

        Args:
            path: Of the file of a single process.
        """
        files = [file for file in (path, *files_of_all(path)) if file.is_file()]
        end = f"-of-{self.count}"
        ours = [f for f in files if (f == path if self.count == 1 else f.name.endswith(end))]
        return ours, [file for file in files if file not in ours]

    def check_files(self, path: Path) -> None:
        """Make sure that this rank can write its file, and that no other world size has.

        Args:
            path: Of the file of a single process.

        Raises:
            MismatchError: If there are files of another world size only.
        """
        check_place(self.own_file(path))
        ours, others = self.kept_files(path)
        if others and not ours:
            raise MismatchError(
                f"expected nothing of another number of processes than {self.count} at {path}, "
                f"found {others[0].name} ({len(others)} in all); start as many as before to go "
                "on, or delete them to begin again"
            )

    def gathered(self, document: Any) -> list[Any]:
        """Return every process's document, in order.

        Args:
            document: Plain data. It is pickled between processes of one group, which trust
                each other; files never are.
        """
        if self.count == 1:
            return [document]
        documents: list[Any] = [None] * self.count
        distributed.all_gather_object(documents, document)
        return documents

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let an error in one process end the block in all of them: none is left waiting.

        Yields:
            Nothing.

        Raises:
            ProcessError: If another process failed.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.count == 1:
                raise
            failure = error
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        failures = self.gathered(said)
        if failure is not None:
            raise failure
        for rank, what in enumerate(failures):
            if what is not None:
                raise ProcessError(
                    f"expected all {self.count} processes to come through, but process {rank} "
                    f"failed ({what}); mend that and start all of them again"
                )

    def summed(self, numbers: Tensor) -> Tensor:
        """Return numbers, added up over all processes.

        Args:
            numbers: Of the same shape in each; may be overwritten.
        """
        if self.count > 1:
            numbers = numbers.contiguous()
            _add_up(numbers)
        return numbers

    def add_up(self, state: SketchState) -> SketchState:
        """Return the state of one pass over the data of all processes, in each of them.

        Args:
            state: What this process has seen; its memory is used.
        """
        if self.count == 1:
            return state
        if not state.sketch.takes_products:  # what it holds is more than sums
            return self._merged_in_turn(state)
        for tensor in (*state.tensors.values(), state.squared_norm, state.outside):
            for bucket in torch.split(tensor.view(-1), _BUCKET):
                _add_up(bucket)
        others = self.gathered((state.num_data, state.num_rows, state.num_updates))
        state.num_data, state.num_rows, state.num_updates = map(sum, zip(*others, strict=True))
        state.num_updates += self.count - 1  # adding up rounds, too
        numbers = self.gathered(state.numbers)
        names = {name for each in numbers for name in each}
        state.numbers = {name: sum(each.get(name, 0) for each in numbers) for name in names}
        return state

    def _merged_in_turn(self, state: SketchState) -> SketchState:
        """Return all states merged in the order of the processes, which is the same in each."""
        device = state.squared_norm.device
        whole: SketchState | None = None
        for rank in range(self.count):
            sent = [state.to("cpu") if rank == self.rank else None]
            distributed.broadcast_object_list(sent, rank)
            assert sent[0] is not None
            part = sent[0].to(device)
            whole = part if whole is None else state.sketch.merge(whole, part)
        assert whole is not None
        return whole


def files_of_all(path: Path) -> list[Path]:
    """Return the files of all ranks, of any world size.

    Args:
        path: Of the file of a single process.
    """
    name = re.compile(re.escape(path.name) + r"\.\d+-of-\d+")
    with file_errors(path, "read"):
        files = path.parent.iterdir() if path.parent.is_dir() else ()
        return sorted(file for file in files if name.fullmatch(file.name))


def _device() -> torch.device:
    """Return where the process group takes small tensors."""
    if distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _add_up(numbers: Tensor) -> None:
    """Add up numbers over all processes, in place."""
    if numbers.is_cuda or _device().type == "cpu":
        distributed.all_reduce(numbers)
        return
    staged = numbers.to(_device())
    distributed.all_reduce(staged)
    numbers.copy_(staged)
