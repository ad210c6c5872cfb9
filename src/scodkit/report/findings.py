"""What a report has found: alarms, mistakes, classes and curves."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scodkit.calibration import groups_of, predicted_class
from scodkit.errors import BatchError
from scodkit.fit.data import Again, digests_of, seen_again
from scodkit.likelihoods import Bernoulli, Categorical
from scodkit.metrics import Array, Curves, curves
from scodkit.monitor import Monitor
from scodkit.report.rates import Rate
from scodkit.report.report import Report, ScoredSet
from scodkit.summary import Summary

_MOST_KINDS = 20  # classes of a set that are told apart
_LOOKED_AT = 2000  # known inputs that are looked for among the fitted ones
_SAME = 1e-6  # relative difference of scores of one input in two batches


class Group(NamedTuple):
    """Inputs that are judged against the same held-out ones.

    Attributes:
        name: Empty where there are no groups.
        held_out: Their scores, ``(n,)``.
        new: Scores of known inputs, ``(m,)``.
        alarms: How many of those raise one.
    """

    name: str
    held_out: Array
    new: Array
    alarms: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of held-out and of known inputs."""
        return len(self.held_out), len(self.new)


@dataclass(frozen=True)
class Findings:
    """Everything that is counted from scores.

    Args:
        report: Of what.
        summary: Of the fit.
        threshold: Score above which inputs raise an alarm; None if there is no single one.
        p_values: By set; none without a calibration.
        flags: Which inputs raise an alarm, by set.
        losses: By known set with targets, ``(n,)``: 1 for a mistake of a classifier, 0 for
            none; of other outputs the mean squared error.
        kinds: What each input is, in few words that repeat, by set.
        curves: Of unknown sets beside all known inputs.
        groups: Known inputs beside the held-out ones.
    """

    report: Report
    summary: Summary
    threshold: float | None
    p_values: Mapping[str, Tensor]
    flags: Mapping[str, Tensor]
    losses: Mapping[str, Tensor]
    kinds: Mapping[str, Sequence[str]]
    curves: Mapping[str, Curves]
    groups: Sequence[Group]

    @staticmethod
    def of(report: Report) -> Findings:
        """Return what a report shows, counted."""
        monitor, sets = report.monitor, report.sets
        known = [one.scores for one in sets if one.known]
        p_values = {one.name: one.p_values for one in sets if one.p_values is not None}
        calibration, threshold = monitor.calibration, None
        if calibration is not None and calibration.groups is None:
            p_values = {one.name: calibration.p_value(one.scores) for one in sets} | p_values
            threshold = calibration.threshold(report.false_alarm)
        flags = {name: values <= report.false_alarm for name, values in p_values.items()}
        losses = {one.name: _losses(monitor, one) for one in sets if one.known}
        kinds = {one.name: _kinds(monitor, one) for one in sets}
        return Findings(
            report=report,
            summary=monitor.summary(),
            threshold=threshold,
            p_values=p_values,
            flags=flags,
            losses={name: found for name, found in losses.items() if found is not None},
            kinds={name: found for name, found in kinds.items() if found is not None},
            curves={
                one.name: curves(torch.cat(known), one.scores)
                for one in sets
                if known and not one.known
            },
            groups=_groups(monitor, [one for one in sets if one.known], flags),
        )

    @property
    def alarms(self) -> dict[str, Rate]:
        """Inputs that raise an alarm, by set."""
        return {name: Rate(int(own.sum()), len(own)) for name, own in self.flags.items()}

    @property
    def mistakes(self) -> dict[str, Rate]:
        """Mistakes of a classifier, by set; none of other outputs."""
        if not tells_one_class(self.report.monitor):
            return {}
        return {name: Rate(int(own.sum()), len(own)) for name, own in self.losses.items()}

    @property
    def known(self) -> list[ScoredSet]:
        """The known sets."""
        return [one for one in self.report.sets if one.known]

    def is_mistake(self, one: ScoredSet, index: int) -> bool | None:
        """Return whether a prediction is a mistake; None where that is not known."""
        found = self.losses.get(one.name)
        return None if found is None or one.name not in self.mistakes else bool(found[index])

    def again(self) -> Again | None:
        """Return how many of the known inputs were fitted, of those that were looked at."""
        monitor, digests = self.report.monitor, []
        for one in self.known:
            if one.inputs is None:
                continue
            step = -(-len(one) // _LOOKED_AT)
            for part in torch.split(torch.arange(0, len(one), step), 256):
                call = monitor._network.inputs_of(one.batch(part.tolist()))
                digests.append(digests_of(call).cpu())
        return seen_again(monitor.fitted.samples, torch.cat(digests)) if digests else None

    @functools.cached_property
    def held_out_again(self) -> float:
        """Share of known scores that held-out inputs have, too; 0 where most are tied."""
        calibration = self.report.monitor.calibration
        if calibration is None or not self.known:
            return 0.0
        every = torch.cat([one.scores for one in self.known]).numpy()
        scores = np.unique(every[np.isfinite(every)])
        held_out = np.concatenate([[-np.inf], calibration.pooled.numpy(), [np.inf]])
        if 2 * len(scores) < len(every) or 2 * len(np.unique(held_out)) < len(held_out):
            return 0.0
        place = np.searchsorted(held_out, scores)
        gaps = np.minimum(scores - held_out[place - 1], held_out[place] - scores)
        return float((gaps <= _SAME * np.abs(scores)).mean())


def tells_one_class(monitor: Monitor) -> bool:
    """Return whether the output of a sample is one class, or yes and no."""
    shape = monitor.fitted.shape
    if isinstance(monitor.likelihood, Bernoulli):
        return tuple(shape) == (1,)
    return isinstance(monitor.likelihood, Categorical) and len(shape) == 1


def class_name(monitor: Monitor, number: int) -> str:
    """Return the name of a class, as `Monitor.explain` has it.

    Args:
        monitor: With names of classes among its notes, or without.
        number: Of the class, from 0.
    """
    names, count = monitor.notes.get("classes"), monitor.fitted.shape[0]
    if names is not None and len(names) == max(count, 2) and 0 <= number < len(names):
        return str(names[number])
    return f"class {number}"


def _losses(monitor: Monitor, one: ScoredSet) -> Tensor | None:
    """Return mistakes, or squared errors; None where the right outputs are not known."""
    if one.outputs is None or one.targets is None:
        return None
    outputs = one.outputs.double()
    if tells_one_class(monitor):
        return (predicted_class(outputs) != _right_classes(one)).double()
    targets = torch.as_tensor(one.targets)
    if outputs.numel() != targets.numel():
        return None
    return (outputs.flatten(1) - targets.double().reshape(len(one), -1)).square().mean(1)


def _right_classes(one: ScoredSet) -> Tensor:
    """Return the targets of a classifier's set, ``(n,)``; it need not know all these classes.

    Raises:
        BatchError: If they are no classes.
    """
    try:
        targets = torch.as_tensor(one.targets)
    except (TypeError, ValueError):  # words
        targets = torch.empty(0)
    whole = len(targets) == targets.numel() == len(one) and not targets.is_complex()
    found = targets.flatten().double()
    if not whole or bool((found != found.round()).any()) or not bool(found.isfinite().all()):
        raise BatchError(
            f"expected whole numbers (n,) as targets of {one.name!r}, the right classes "
            f"counted from 0, got {_in_words(one.targets)}; type targets=one_hot.argmax(1), "
            "or labels=... for words"
        )
    return found.long()


def _in_words(targets: object) -> str:
    if isinstance(targets, Tensor):
        return f"{targets.dtype} of shape {tuple(targets.shape)}"
    return f"a {type(targets).__name__}"


def _kinds(monitor: Monitor, one: ScoredSet) -> Sequence[str] | None:
    """Return labels that repeat, or right classes, or predicted ones; None for none of them."""
    if one.labels is not None and len(set(one.labels)) <= min(_MOST_KINDS, len(one) / 2):
        return [str(label) for label in one.labels]
    if one.outputs is None or not tells_one_class(monitor):
        return None
    numbers, before = predicted_class(one.outputs), "predicted "
    if one.targets is not None:
        numbers, before = _right_classes(one), ""
    names = [before + class_name(monitor, int(number)) for number in numbers]
    return names if len(set(names)) <= _MOST_KINDS else None


def _groups(
    monitor: Monitor, known: Sequence[ScoredSet], flags: Mapping[str, Tensor]
) -> list[Group]:
    """Return known inputs beside the held-out ones of the same group."""
    calibration = monitor.calibration
    if calibration is None or not known or any(one.name not in flags for one in known):
        return []
    scores = torch.cat([one.scores for one in known]).numpy()
    raised = torch.cat([flags[one.name] for one in known]).numpy()
    if calibration.groups is None:
        return [Group("", calibration.pooled.numpy(), scores, int(raised.sum()))]
    outputs = [one.outputs for one in known if one.outputs is not None]
    if len(outputs) < len(known) or monitor._by is None:
        return []
    of_inputs = groups_of(monitor._by, torch.cat(outputs)).numpy()
    of_held_out = calibration.groups.numpy()
    found = []
    for group in np.unique(of_inputs).tolist():
        mine = (of_inputs == group) & np.isfinite(scores)  # infinite ones are of no group
        held_out = calibration.scores.numpy()[of_held_out == group]
        if mine.any() and len(held_out):
            found.append(Group(str(group), held_out, scores[mine], int(raised[mine].sum())))
    return found
