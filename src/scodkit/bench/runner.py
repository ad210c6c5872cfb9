"""Runs domains, methods and seeds to rows: what is there is kept, what is missing is added."""

from __future__ import annotations

import functools
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm

from scodkit.bench import rows as result_rows
from scodkit.bench.domain import Splits
from scodkit.bench.domains import DOMAINS
from scodkit.bench.measure import Setup, measure
from scodkit.bench.rows import Row
from scodkit.bench.sweeps import SWEEPS, applies
from scodkit.bench.trained import trained

MEMBERS = 5  # of an ensemble, the network itself being the first


@dataclass(frozen=True)
class Job:
    """Some work of a process of its own: train a network, or measure a method on one.

    Args:
        domain: Name of the domain.
        seed: Of the network.
        method: What to measure; None to train only.
        sweep: Whether that is one of `SWEEPS`, and not a method.
        folder: Of the data.
        cache: Of trained networks.
        device: Where.
    """

    domain: str
    seed: int
    method: str | None = None
    sweep: bool = False
    folder: Path | None = None
    cache: Path | None = None
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.domain}, seed {self.seed}, {self.method or 'training'}"


@dataclass(frozen=True)
class Where:
    """Places a run reads from and writes to.

    Args:
        rows: The file of rows.
        folder: Of the data; None for where data is looked for.
        cache: Of trained networks; None for the user's cache folder.
        device: Where it is computed.
    """

    rows: Path
    folder: Path | None = None
    cache: Path | None = None
    device: str = "cpu"


def run(
    domains: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    where: Where,
    *,
    sweep: bool = False,
    processes: int = 1,
    progress: bool = True,
) -> list[Row]:
    """Add the rows that are missing, and return all of the file's.

    A killed run loses the work in progress and nothing else: rows are appended as they come,
    and trained networks are kept.

    Args:
        domains: Names of `DOMAINS`.
        methods: Names of `scodkit.bench.methods.METHODS`, or of `scodkit.bench.sweeps.SWEEPS`.
        seeds: How many networks of each domain; networks that come with the data are one.
        where: Places.
        sweep: Whether the names are those of sweeps.
        processes: How many work at a time, each with one thread.
        progress: Show a progress bar.

    Returns:
        All rows of the file.
    """
    done = _finished_jobs(where.rows, "sweep" if sweep else "method")
    places = {"folder": where.folder, "cache": where.cache, "device": where.device}
    jobs = [
        Job(domain, seed, method, sweep, **places)  # type: ignore[arg-type]
        for domain in domains
        for seed in range(seeds if DOMAINS[domain].recipe else 1)
        for method in methods
        if (domain, seed, method) not in done and _applies(domain, method, sweep)
    ]
    # each network is trained once, before several processes ask for it
    networks = {(j.domain, s) for j in jobs for s in _seeds_of(j) if DOMAINS[j.domain].recipe}
    training = [Job(d, s, **places) for d, s in sorted(networks)]  # type: ignore[arg-type]
    with _workers(processes) as submit:
        for jobs_now, doing in ((training, "training"), (jobs, "measuring")):
            bar = tqdm(total=len(jobs_now), desc=doing, unit="job", disable=not progress)
            for job, found in _finished(jobs_now, submit):
                bar.set_postfix_str(str(job))
                bar.update()
                if found:
                    result_rows.append(where.rows, [*found[:-1], {**found[-1], "last": True}])
            bar.close()
    return result_rows.read(where.rows)


def _finished_jobs(path: Path, kind: str) -> set[tuple[str, int, str]]:
    """Return the jobs whose rows are all there; rows of an unfinished one are taken out.

    Rows of a job are written together, so that only those at the end can lack others.
    """
    rows = result_rows.read(path)
    keys = [(row["domain"], row["seed"], row.get(kind, "")) for row in rows]
    if rows and not rows[-1].get("last"):
        start = len(rows)
        while start and keys[start - 1] == keys[-1]:
            start -= 1
        result_rows.rewrite(path, rows[:start])
        keys = keys[:start]
    return set(keys)


def _applies(domain: str, method: str, sweep: bool) -> bool:
    if sweep:
        return applies(method, DOMAINS[domain])
    return DOMAINS[domain].ensemble or method != "deep_ensemble"


def _seeds_of(job: Job) -> range:
    """Return the seeds of the networks a job asks for."""
    return range(job.seed, job.seed + (MEMBERS if job.method == "deep_ensemble" else 1))


Submit = Callable[[Job], "Future[list[Row]]"]


class _workers:  # noqa: N801 (used as a function)
    """Processes that do jobs, or this one."""

    def __init__(self, processes: int) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, context)

    def __enter__(self) -> Submit:
        pool = self._pool
        return _now if pool is None else lambda job: pool.submit(do, job)

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._pool is not None:  # after an error or Ctrl-C nothing more is started
            self._pool.shutdown(wait=True, cancel_futures=kind is not None)


def _now(job: Job) -> Future[list[Row]]:
    future: Future[list[Row]] = Future()
    future.set_result(do(job))
    return future


def _finished(jobs: Sequence[Job], submit: Submit) -> Iterator[tuple[Job, list[Row]]]:
    if submit is _now:
        for job in jobs:
            yield job, submit(job).result()
        return
    waiting = {submit(job): job for job in jobs}
    for future in as_completed(waiting):
        yield waiting[future], future.result()


def do(job: Job) -> list[Row]:
    """Do a job, in whatever process it is called.

    Args:
        job: What to do.

    Returns:
        Rows; none for training.
    """
    if job.device == "cpu":
        torch.set_num_threads(1)
    domain, splits = DOMAINS[job.domain], _splits(job.domain, job.folder)
    networks = [
        trained(
            domain,
            splits,
            seed,
            folder=job.folder,
            cache=job.cache,
            device=job.device,
            progress=False,
        )
        for seed in _seeds_of(job)
    ]
    if job.method is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # engines that fall back, deprecations of peers
        setup = Setup(domain, splits, job.seed, networks, torch.device(job.device))
        if job.sweep:
            return list(SWEEPS[job.method](setup))
        return measure(setup, job.method)


@functools.cache
def _splits(domain: str, folder: Path | None) -> Splits:
    """Return a domain's data, read once in each process."""
    return DOMAINS[domain].splits(folder)
