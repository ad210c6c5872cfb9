"""Processes that do jobs, and end when the one that started them does, however it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from tqdm.auto import tqdm
from typing_extensions import Self

Job = TypeVar("Job")
Result = TypeVar("Result")


class Workers(Generic[Job, Result]):
    """Processes that do jobs, started as they are needed; to be used in a ``with`` statement.

    Args:
        do: Does a job; a function that other processes can import.
        processes: How many, at most. One is this process itself.

    Examples:
        >>> with Workers(str, 1) as workers:
        ...     print(list(workers.finished([1, 2])))
        [(1, '1'), (2, '2')]
    """

    def __init__(self, do: Callable[[Job], Result], processes: int) -> None:
        self._do = do
        self._processes = processes
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, Job]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # after an error or Ctrl-C nothing waits for what is being done
        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            worker.end()

    def finished(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Result | None]]:
        """Do jobs, and yield each with its result as it is done.

        Args:
            jobs: To be started in this order.

        Yields:
            A job and its result; None where the process that did it was killed.

        Raises:
            Exception: Whatever a job raises.
        """
        if self._processes == 1:
            for job in jobs:
                yield job, self._do(job)
            return
        waiting = deque(jobs)
        while waiting or self._busy:
            while waiting and len(self._busy) < self._processes:
                self._start(waiting.popleft())
            for pipe in connection.wait(list(self._busy)):
                assert isinstance(pipe, Connection)
                yield self._end(pipe)

    def _start(self, job: Job) -> None:
        while self._idle and not self._idle[-1].process.is_alive():
            self._idle.pop().end()
        worker = self._idle.pop() if self._idle else _Worker(self._do)
        self._busy[worker.pipe] = worker, job
        worker.pipe.send(job)

    def _end(self, pipe: Connection) -> tuple[Job, Result | None]:
        """Return a job that is done or lost, and its result.

        Raises:
            Exception: What the job raised.
        """
        worker, job = self._busy.pop(pipe)
        try:
            result = pipe.recv()
        except (EOFError, OSError):
            worker.end()
            return job, None
        self._idle.append(worker)
        if isinstance(result, Exception):
            raise result
        return job, result


class _Worker:
    """A process of its own, and the pipe to it."""

    def __init__(self, do: Callable[[Any], object]) -> None:
        context = multiprocessing.get_context("spawn")  # torch does not survive a fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, do), daemon=True)
        with _deaf_to_interrupts():
            self.process.start()
        theirs.close()  # now it breaks when the process ends

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let what is started here never hear of Ctrl-C: its parent does, and ends it."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears of it
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a new process starts with the same
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: Connection, do: Callable[[Any], object]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is for several processes, and outlives a kill
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        while True:
            pipe.send(_outcome(do, pipe.recv()))


def _outcome(do: Callable[[Any], object], job: object) -> object:
    try:
        return do(job)
    except Exception as error:
        return error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # whatever is being done
