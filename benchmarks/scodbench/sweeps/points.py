"""Rows of sweeps: what is varied, on which samples it is judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

import torch

from scodbench.domains.splitting import some
from scodbench.measure import POOLED, Setup, description, scores_of
from scodbench.rows import Row
from scodbench.samples import Samples
from scodkit.baselines import Detector
from scodkit.metrics import separation

RESAMPLES = 200  # of the bootstrap
# most samples of a set, so that a sweep of many points stays short
_JUDGED_ON = 1000


def sweep_row(
    setup: Setup, sweep: str, ood: str, choice: Mapping[str, object], **found: object
) -> Row:
    """Return a row of a sweep.

    Args:
        setup: Network and data.
        sweep: Its name.
        ood: Set of unknown inputs the row is about.
        choice: What is varied, by name; the row's id tells it.
        found: What came out.
    """
    names = [sweep, setup.domain.name, ood, *map(str, choice.values()), str(setup.seed)]
    about = {"id": "/".join(names), "sweep": sweep, **description(setup), "ood": ood}
    return {**about, **choice, **found}


def judged(
    setup: Setup,
    detector: Detector,
    sweep: str,
    choice: Mapping[str, object],
    **more: object,
) -> Iterator[Row]:
    """Yield a row for each set of unknown inputs, and one for all of them together.

    Args:
        setup: Network and data.
        detector: A fitted one.
        sweep: Name of the sweep.
        choice: What is varied.
        more: What else the rows are to say.
    """
    known = scores_of(detector, few(setup.splits.test), setup.device)
    novel = setup.splits.novel.items()
    scores = {ood: scores_of(detector, few(own), setup.device) for ood, own in novel}
    for ood, unknown in (*scores.items(), (POOLED, torch.cat(list(scores.values())))):
        figures = asdict(separation(known, unknown, resamples=RESAMPLES))
        yield sweep_row(setup, sweep, ood, choice, **figures, **more)


def few(samples: Samples) -> Samples:
    """Return at most a thousand samples, the same of a set every time."""
    return samples.take(some(len(samples), _JUDGED_ON))
