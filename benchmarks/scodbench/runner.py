"""Runs domains, methods and seeds to rows: what is there is kept, what is missing is added."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from tqdm.auto import tqdm

from scodbench import rows as result_rows
from scodbench.identity import device_name, settings_id
from scodbench.jobs import ALL_DOMAINS, Job, Where, do, failure, splits_of
from scodbench.rows import Row
from scodbench.sweeps import ENSEMBLE_SWEEPS, applies
from scodbench.workers import Workers
from scodkit.baselines.kfac_laplace import peer
from scodkit.errors import OptionError

# the longest first, so that processes end together
_LONG = ("sketched_lanczos", "local_ensemble", "kfac_laplace", *ENSEMBLE_SWEEPS)


def run(
    domains: Sequence[str],
    names: Sequence[str],
    seeds: int,
    where: Where,
    *,
    sweep: bool = False,
    processes: int = 1,
    progress: bool = True,
) -> list[Row]:
    """Add the rows that are missing, and return all of the file's.

    A killed run loses the work in progress and nothing else: rows are appended as they come,
    and trained networks are kept. What fails gives a row without figures that says ``why``; if
    not on purpose it is ``failed``, and tried again the next time.

    Args:
        domains: Names of `ALL_DOMAINS`; one is finished before the next.
        names: Of `scodbench.methods.METHODS`, or of `scodbench.sweeps.SWEEPS`.
        seeds: How many networks of each domain; networks that come with the data are one.
        where: Places.
        sweep: Whether the names are those of sweeps.
        processes: How many work at a time, each with one thread.
        progress: Show a progress bar.

    Returns:
        All rows of the file.

    Raises:
        OptionError: If none of the names is for one of the domains.
        RowsInUseError: If another run adds rows to the file.
        MissingDataError: Before any work, if data of a domain is not there.
        MissingPeerError: Before any work, if a library that a method stands on is not there.
    """
    if not any(_applies(domain, name, sweep) for domain in domains for name in names):
        kind = "sweep" if sweep else "method"
        raise OptionError(
            f"expected a {kind} that is for {', '.join(domains)}, got {', '.join(names)}; type "
            "another --domain"
        )
    with result_rows.claimed(where.rows):
        jobs = _missing(domains, names, seeds, where, sweep)
        _check(jobs)
        processes = min(processes, max(1, len(jobs)))
        jobs = [replace(job, processes=processes) for job in jobs]
        total = len(jobs) + len(_training(jobs))
        with (
            Workers(do, processes) as workers,
            tqdm(total=total, unit="job", disable=not progress) as bar,
        ):
            for _, own in itertools.groupby(jobs, lambda job: job.domain):
                for job, found in _finished(list(own), workers):
                    bar.set_postfix_str(str(job))
                    bar.update()
                    if job.name is not None:
                        result_rows.append(where.rows, found)
    return result_rows.read(where.rows)


def left_out(rows: Iterable[Row]) -> list[str]:
    """Return a line for each method (or sweep) of a domain without figures: which, and why.

    Args:
        rows: Of methods or sweeps.
    """
    seeds: dict[tuple[str, ...], list[str]] = {}
    for row in result_rows.latest(rows):
        if row.get("auroc") is None and "why" in row:
            name = " ".join(row[key] for key in ("sweep", "method") if key in row)
            what = "failed" if row.get("failed") else "left out"
            seeds.setdefault((row["domain"], name, what, row["why"]), []).append(
                str(row["seed"])
            )
    return [
        f"{domain}, {name} {what} (seed {', '.join(found)}): {why}"
        for (domain, name, what, why), found in seeds.items()
    ]


def _missing(
    domains: Sequence[str], names: Sequence[str], seeds: int, where: Where, sweep: bool
) -> list[Job]:
    """Return the jobs that have no rows yet, domain by domain."""
    kind, device = "sweep" if sweep else "method", device_name(torch.device(where.device))
    done = {
        tuple(row.get(key) for key in ("domain", kind, "seed", "device", "settings"))
        for row in result_rows.read(where.rows)
        if not row.get("failed")
    }
    longest_first = sorted(names, key=lambda name: name not in _LONG)
    jobs = []
    for name, domain in ((name, ALL_DOMAINS[name]) for name in dict.fromkeys(domains)):
        for method in (m for m in longest_first if _applies(name, m, sweep)):
            settings = settings_id(domain, method, sweep=sweep)
            jobs += [
                Job(name, seed, method, sweep, where, settings)
                for seed in range(seeds if domain.recipe else 1)
                if (name, method, seed, device, settings) not in done
            ]
    return jobs


def _applies(domain: str, name: str, sweep: bool) -> bool:
    if sweep:
        return applies(name, ALL_DOMAINS[domain])
    return ALL_DOMAINS[domain].ensemble or name != "deep_ensemble"


def _check(jobs: Sequence[Job]) -> None:
    """Make sure that what jobs need is there, before an hour of work."""
    names = {job.name or "" for job in jobs}
    if any(name.startswith("kfac_laplace") or name in ENSEMBLE_SWEEPS for name in names):
        peer("laplace.curvature")
    for domain in dict.fromkeys(job.domain for job in jobs):
        splits_of(domain, jobs[0].where.folder)
        weights = ALL_DOMAINS[domain].weights
        if weights is not None:
            weights(jobs[0].where.folder)


def _training(jobs: Sequence[Job]) -> list[Job]:
    """Return jobs that train what others ask for, each network once."""
    wanted = {(job.domain, seed): job for job in jobs if job.trains for seed in job.seeds}
    return [Job(*key, None, False, job.where) for key, job in sorted(wanted.items())]


def _finished(
    jobs: Sequence[Job], workers: Workers[Job, list[Row]]
) -> Iterator[tuple[Job, list[Row]]]:
    """Yield the jobs of a domain as they are done, networks first, each with its rows."""
    broken: dict[int, Row] = {}
    for job, found in workers.finished(_training(jobs)):
        rows = _lost(job) if found is None else found
        broken |= {row["seed"]: row for row in rows}
        yield job, rows
    ready = [job for job in jobs if not any(seed in broken for seed in job.seeds)]
    for job in jobs:
        if job not in ready:
            seed = next(seed for seed in job.seeds if seed in broken)
            yield job, _without_network(job, seed, broken[seed])
    for job, found in workers.finished(ready):
        yield job, _lost(job) if found is None else found


def _lost(job: Job) -> list[Row]:
    return [failure(job, "the process was killed, maybe for want of memory", settled=False)]


def _without_network(job: Job, seed: int, broken: Row) -> list[Row]:
    why = f"training from seed {seed}: {broken['why']}"
    return [failure(job, why, settled=not broken.get("failed"))]
