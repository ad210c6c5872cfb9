"""Processes that do jobs, and end when the one that started them does, however it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

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
        self._context = multiprocessing.get_context("spawn")  # torch does not survive a fork
        self._theirs, self._ours = self._context.Pipe(duplex=False)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()  # ends them: after an error or Ctrl-C nothing waits for their jobs
        self._leave_pool()
        self._theirs.close()

    def finished(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Result | None]]:
        """Do jobs, and yield each with its result as it is done.

        When a process is killed all others end, too. The jobs they were at are done again, one
        at a time, which shows the one that gets its process killed.

        Args:
            jobs: To be started in this order.

        Yields:
            A job and its result; None where the process that did it was killed both times.

        Raises:
            Exception: Whatever a job raises.
        """
        if self._processes == 1:
            for job in jobs:
                yield job, self._do(job)
            return
        waiting = deque(jobs)
        while waiting:
            for suspect in (yield from self._until_killed(waiting, self._processes)):
                for job in (yield from self._until_killed(deque([suspect]), 1)):
                    yield job, None

    def _until_killed(
        self, waiting: deque[Job], at_once: int
    ) -> Generator[tuple[Job, Result], None, list[Job]]:
        """Yield jobs as they are done.

        Args:
            waiting: The jobs; those that are started are taken from it.
            at_once: How many are done at a time.

        Returns:
            The jobs in progress when a process was killed, none if that did not happen.
        """
        running: dict[Future[Result], Job] = {}
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    future = self._started(waiting[0])
                    running[future] = waiting.popleft()
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda each: each.exception() is not None):
                    result = future.result()
                    yield running.pop(future), result
        except BrokenProcessPool:
            self._leave_pool()
        return list(running.values())

    def _started(self, job: Job) -> Future[Result]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes, self._context, initializer=_begin, initargs=(self._theirs,)
            )
        with _deaf_to_interrupts():
            return self._pool.submit(self._do, job)

    def _leave_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let what is started here never hear of Ctrl-C: its parent does, and ends it.

    A new process starts with the signals blocked that are blocked here; one that comes
    meanwhile waits for this process, where to ignore it would lose it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(alive: Connection) -> None:
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is for several processes, and outlives a kill


def _end_with_parent(alive: Connection) -> None:
    alive.poll(None)  # until the other end is closed, by the parent or by its end
    os._exit(1)  # whatever is being done
