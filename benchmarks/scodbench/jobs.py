"""A job of a run: train a network, or measure a method on one; and what comes of it."""

from __future__ import annotations

import functools
import gc
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from scodbench.data.errors import DataError
from scodbench.domain import Splits
from scodbench.domains import DOMAINS, OPTIONAL_DOMAINS
from scodbench.identity import machine, short_name
from scodbench.locks import Turns
from scodbench.measure import POOLED, Setup, measure
from scodbench.rows import Row
from scodbench.sweeps import ENSEMBLE_SWEEPS, SWEEPS
from scodbench.trained import trained
from scodkit.errors import MissingPeerError, ScodError

ALL_DOMAINS = {**DOMAINS, **OPTIONAL_DOMAINS}

_MEMBERS = 4  # of an ensemble, besides the network itself
_FIRST_MEMBER = 1000  # their first seed, far from those of networks that are looked at


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


@dataclass(frozen=True)
class Job:
    """Some work of a process of its own: train a network, or measure a method on one.

    Args:
        domain: One of `ALL_DOMAINS`.
        seed: Of the network.
        name: The method or sweep; None to train only.
        sweep: Whether it is one of `SWEEPS`, and not a method.
        where: Places.
        settings: What tells its rows from those of other settings.
        processes: How many work at a time.
    """

    domain: str
    seed: int
    name: str | None
    sweep: bool
    where: Where
    settings: str = ""
    processes: int = 1

    def __str__(self) -> str:
        return f"{self.domain}, seed {self.seed}, {self.name or 'training'}"

    @property
    def kind(self) -> str:
        """Under what key rows have the name."""
        return "sweep" if self.sweep else "method"

    @property
    def seeds(self) -> list[int]:
        """Of the networks it asks for; no two ensembles have one in common."""
        several = self.name in (ENSEMBLE_SWEEPS if self.sweep else ("deep_ensemble",))
        first = _FIRST_MEMBER + _MEMBERS * self.seed
        others = range(first, first + _MEMBERS) if several and self.trains else ()
        return [self.seed, *others]

    @property
    def trains(self) -> bool:
        """Whether networks of the domain are trained; else there is one, with the data."""
        return ALL_DOMAINS[self.domain].recipe is not None


def do(job: Job) -> list[Row]:
    """Do a job, in whatever process it is called.

    Args:
        job: What to do.

    Returns:
        Rows; one that says why where it failed, none for training that did not.

    Raises:
        MissingPeerError: If a library that the method stands on is not there.
    """
    on_gpu = torch.device(job.where.device).type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # engines that fall back, deprecations of peers
            return [_stamped(job, row) for row in _results(job)]
    except MissingPeerError:
        raise  # of this machine, not of the method
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        # what depends on this machine, or was not foreseen, may go well another time
        settled = isinstance(error, ScodError) and not isinstance(
            error, (DataError, MemoryError, OSError)
        )
        rows = [failure(job, f"{type(error).__name__}: {first}", settled=settled)]
    if on_gpu:  # after the error, and what it held, is gone
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def _results(job: Job) -> list[Row]:
    if job.name is None:
        _networks(job)
        return []
    turns = Turns(job.where.rows.with_name(f".{job.where.rows.name}.turns.lock"))
    with turns.working():
        domain, splits = ALL_DOMAINS[job.domain], splits_of(job.domain, job.where.folder)
        about = (torch.device(job.where.device), job.processes, turns.alone)
        setup = Setup(domain, splits, job.seed, _networks(job), *about)
        return list(SWEEPS[job.name](setup)) if job.sweep else measure(setup, job.name)


def _networks(job: Job) -> list[nn.Module]:
    domain, splits = ALL_DOMAINS[job.domain], splits_of(job.domain, job.where.folder)
    device = torch.device(job.where.device)
    return [
        trained(
            domain,
            splits,
            seed,
            folder=job.where.folder,
            cache=job.where.cache,
            device=device,
            progress=False,
        )
        for seed in job.seeds
    ]


@functools.lru_cache(maxsize=1)
def splits_of(domain: str, folder: Path | None) -> Splits:
    """Return a domain's data, read once in each process while it is at that domain."""
    return ALL_DOMAINS[domain].splits(folder)


def _stamped(job: Job, row: Row) -> Row:
    """Return a row with an id that no row of other settings or another device has."""
    name = f"{row['id']}/{short_name(row['device'])}/{job.settings}"
    return {**row, "id": name, "settings": job.settings}


def failure(job: Job, why: str, *, settled: bool) -> Row:
    """Return the row of a job that has no figures.

    Args:
        job: The job.
        why: What went wrong.
        settled: Whether that is how it is; else it ``failed``, and is to be tried again.
    """
    start = f"{job.name}/{job.domain}/{POOLED}" if job.sweep else f"{job.domain}/{POOLED}"
    end = str(job.seed) if job.sweep else f"{job.name}/{job.seed}"
    row = {
        "id": f"{start}/{end}",
        job.kind: job.name,
        "domain": job.domain,
        "seed": job.seed,
        "processes": job.processes,
        **machine(torch.device(job.where.device)),
        "ood": POOLED,
        "auroc": None,
        "why": why,
    }
    return _stamped(job, row if settled else {**row, "failed": True})
