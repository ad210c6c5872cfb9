"""Held-out scores turned into p-values, thresholds and flags with a stated false-alarm rate."""

from __future__ import annotations

import bisect
import functools
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scodkit.errors import (
    CalibrationError,
    CalibrationWarning,
    OptionError,
    SuspiciousInputWarning,
    described,
    optional,
)
from scodkit.model.kinds import as_given, as_tensors

# most recent samples looked at, and the fewest that can tell
_LAST, _FEWEST = 64, 8
# scores are low up to the one that has this share of the held-out ones below it
_LOW = 0.01
# accepted probability that so many are low by chance
_CHANCE = 1e-6
# more held-out samples than there can be
_MOST = 1 << 62


@dataclass(frozen=True)
class Calibration:
    """Scores of held-out, in-distribution samples (split conformal).

    With groups, every group is calibrated by itself (class-conditional, or Mondrian): rates
    then hold within each group, not only on average over them. A group with too few held-out
    samples is judged against the held-out scores of all groups: no rate is promised for it,
    but what is atypical for all groups is still flagged. A `CalibrationWarning` names each
    such group, once.

    Args:
        scores: ``(n,)``, finite, larger = more atypical, in any order; a tensor, an array or a
            list. Kept in float64 on the CPU, sorted; with groups sorted within each of them.
        groups: ``(n,)`` integers, the group of each sample. Kept in int64, ascending, aligned
            with the scores: ``Calibration(c.scores, c.groups)`` is the same calibration again.
        boxes: Of the largest score of a box in each of the same images, for detectors.

    Examples:
        >>> calibration = Calibration(torch.arange(99.0))
        >>> calibration.p_value(torch.tensor([1000.0]))
        tensor([0.0100], dtype=torch.float64)
        >>> calibration.flag(torch.tensor([50.0, 97.0]), false_alarm=0.05)
        tensor([False,  True])
    """

    scores: Tensor
    groups: Tensor | None = None
    boxes: Calibration | None = None
    # groups that a warning was given for
    _warned_groups: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape = _numbers(self.scores).shape
        scores = _numbers(self.scores).flatten().cpu().double()
        if scores.numel() == 0:
            raise CalibrationError(
                "expected at least one held-out sample to calibrate with, got none; "
                "pass a loader that is not empty to monitor.calibrate"
            )
        if not bool(scores.isfinite().all()):
            bad = int((~scores.isfinite()).sum())
            raise CalibrationError(
                f"expected finite held-out scores, got {bad} of {scores.numel()} that are "
                "not; remove those samples from the calibration set"
            )
        order = scores.argsort(stable=True)
        if self.groups is not None:
            groups = _integers(self.groups, shape).flatten()
            order = order[groups[order].argsort(stable=True)]
            object.__setattr__(self, "groups", groups[order])
        object.__setattr__(self, "scores", scores[order])

    def __repr__(self) -> str:
        low, high = float(self.pooled[0]), float(self.pooled[-1])
        groups = "" if self.groups is None else f", {len(set(self.groups.tolist()))} groups"
        return f"Calibration({self.num_data} scores from {low:.3g} to {high:.3g}{groups})"

    def tensors(self) -> dict[str, Tensor]:
        """Return the held-out scores, and their groups if there are any, by name in a file."""
        named = {
            "calibration": self.scores,
            "calibration_groups": self.groups,
            "calibration_boxes": None if self.boxes is None else self.boxes.scores,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def slid(
        self, scores: Tensor, groups: Tensor | None = None, *, seed: int | None = None
    ) -> Calibration:
        """Return a calibration of the same size with new scores in place of as many old ones.

        For held-out data that ages. Old ones are dropped at random, so that the age of those
        that stay fades exponentially. While the data moves, old and new scores are not
        exchangeable and no rate is promised: it is off by at most the share of old scores times
        how far their distribution is from today's, in total variation (Barber, Candes, Ramdas
        and Tibshirani 2023). New samples must be known to be good: where alarms choose
        them, the calibration follows whatever drifts slowly.

        Args:
            scores: ``(m,)`` of new held-out samples; of more than there are old ones all stay.
            groups: ``(m,)``, if the calibration has groups.
            seed: Of the draw of those that are dropped; None for a fresh one.

        Raises:
            CalibrationError: If some scores are not finite, or groups do not fit.

        Examples:
            >>> held = Calibration(torch.zeros(100)).slid(torch.ones(30), seed=0)
            >>> held.num_data, int(held.scores.sum())
            (100, 30)
        """
        new = Calibration(scores, groups)
        if (self.groups is None) != (new.groups is None):
            raise CalibrationError(
                "expected groups of the new scores where the old ones have them, and only "
                f"there, got {new} for {self}; type slid(scores, groups) for groups"
            )
        generator = torch.Generator()
        generator.manual_seed(seed) if seed is not None else generator.seed()
        order = torch.randperm(self.num_data, generator=generator)
        stay = order[: max(0, self.num_data - new.num_data)]
        joined = None
        if self.groups is not None and new.groups is not None:
            joined = torch.cat([self.groups[stay], new.groups])
        return Calibration(torch.cat([self.scores[stay], new.scores]), joined)

    @property
    def num_data(self) -> int:
        """``n``, the number of held-out samples, of all groups together."""
        return self.scores.numel()

    def p_value(self, scores: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return conformal p-values ``(B,)``: ``(1 + #{held out >= score}) / (n + 1)``.

        Args:
            scores: ``(B,)``, a tensor or an array; larger = more atypical. Infinity gets the
                smallest p-value there is, ``1 / (num_data + 1)``, whatever its group.
            groups: ``(B,)`` integers, if the calibration has groups: only held-out samples
                of the same group count then. For a group without any, all of them do.

        Returns:
            Float64, an array for an array, on the scores' device. For new samples of the same
            kind as the held-out ones, a value is at most ``a`` with probability at most ``a``.

        Raises:
            CalibrationError: If a score is NaN, or groups are missing or not expected.
        """
        judged, groups = self._checked(scores, groups)
        p_values = torch.empty_like(judged)
        for samples, held_out in self._references(judged, groups, lambda count: count > 0):
            above = len(held_out) - torch.searchsorted(held_out, judged[samples])
            p_values[samples] = (1 + above).double() / (len(held_out) + 1)
        return _as_given(p_values, scores)

    def threshold(
        self, false_alarm: float, *, confidence: float | None = None, group: int | None = None
    ) -> float:
        """Return the score above which a sample is flagged at this false-alarm rate.

        The rate of one threshold depends on the luck of the held-out draw. Without
        ``confidence`` it is at most ``false_alarm`` on average over draws; with it, in that
        share of the draws at least. The threshold is a held-out score; with ``a`` of ``n``
        above it, its rate is at most Beta(a + 1, n - a) distributed (Vovk 2012).

        Args:
            false_alarm: Accepted share of false alarms, at least ``1 / (n + 1)``.
            confidence: How surely the rate must hold for this very held-out set, in (0, 1).
            group: Which group's threshold, if the calibration has groups.

        Returns:
            A score: flag what is strictly above it. Without ``confidence``, flagging so is
            the same as flagging p-values of at most ``false_alarm``.

        Raises:
            OptionError: If a rate is not in (0, 1).
            CalibrationError: If it is too small for ``n`` samples.
        """
        held_out = self._of_known_group(group)
        return float(held_out[-1 - _allowed(false_alarm, confidence, held_out.numel(), group)])

    def false_alarm_bound(
        self, false_alarm: float, confidence: float = 0.99, *, group: int | None = None
    ) -> float:
        """Return an upper bound on the true rate of ``threshold(false_alarm)``.

        Args:
            false_alarm: The rate asked for, as in `threshold`.
            confidence: In how large a share of held-out draws the bound must hold, in (0, 1).
            group: Which group's threshold, if the calibration has groups.

        Returns:
            A rate in (0, 1): the ``confidence`` quantile of Beta(a + 1, n - a), with ``a`` the
            number of held-out scores the threshold may have above it.

        Raises:
            CalibrationError: As `threshold`.

        Examples:
            >>> few, many = Calibration(torch.rand(100)), Calibration(torch.rand(10_000))
            >>> round(few.false_alarm_bound(0.05), 3), round(many.false_alarm_bound(0.05), 3)
            (0.112, 0.055)
        """
        check_share("confidence", confidence, 0.99)
        num_data = self._of_known_group(group).numel()
        above = _allowed(false_alarm, None, num_data, group)
        special = optional("scipy.special", "alarms")
        return float(special.betaincinv(above + 1, num_data - above, confidence))

    def flag(
        self,
        scores: Tensor,
        false_alarm: float = 0.05,
        *,
        groups: Tensor | None = None,
        confidence: float | None = None,
    ) -> Tensor:
        """Return ``(B,)`` booleans: True where a score is too high for the held-out kind.

        Args:
            scores: ``(B,)``, a tensor or an array; larger = more atypical.
            false_alarm: Accepted share of false alarms, within each group if there are any.
            groups: ``(B,)`` integers, if the calibration has groups. Samples of a group with
                too few held-out ones for the rate, or none, are judged against all of them.
            confidence: As in `threshold`; None for ``p_value(scores) <= false_alarm``, but for
                groups with too few.

        Returns:
            Booleans, an array for an array, on the scores' device. Infinity is always flagged.

        Raises:
            CalibrationError: As `threshold`, if all groups together have too few samples, and
                as `p_value`.
        """
        check_share("false_alarm", false_alarm, 0.05)
        judged, groups = self._checked(scores, groups)
        flags = torch.zeros_like(judged, dtype=torch.bool)

        def enough(count: int) -> bool:
            return _most_above(false_alarm, confidence, count) >= 0

        for samples, held_out in self._references(judged, groups, enough):
            above = _allowed(false_alarm, confidence, len(held_out), None)
            flags[samples] = judged[samples] > held_out[-1 - above]
        return _as_given(flags, scores)

    @functools.cached_property
    def crowd(self) -> CrowdWatch:
        """Looks out for new scores that are all too low."""
        return CrowdWatch(self)

    @functools.cached_property
    def pooled(self) -> Tensor:
        """The held-out scores of all groups, ascending."""
        return self.scores if self.groups is None else self.scores.sort().values

    def _references(
        self, scores: Tensor, groups: Tensor | None, enough: Callable[[int], bool]
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield which samples to judge, and the sorted held-out scores to judge them by.

        Those of their group; all of them for an infinite score, and for a group with too few.
        A warning says so, once for each group.

        Args:
            scores: ``(B,)``, on the CPU.
            groups: ``(B,)``, if there are groups.
            enough: Whether so many held-out samples of a group will do.
        """
        if groups is None:
            yield ..., self.pooled
            return
        finite = scores < math.inf
        if not finite.all():
            yield ~finite, self.pooled
        lacking = []
        for group in torch.unique(groups[finite]).tolist():
            held_out = self._of_group(group)
            if not enough(len(held_out)):
                lacking.append(group)
                held_out = self.pooled
            yield finite & (groups == group), held_out
        new = [group for group in lacking if group not in self._warned_groups]
        if not new:
            return
        self._warned_groups.update(new)
        listed = ", ".join(f"{self._of_group(one).numel()} of group {one}" for one in new[:10])
        more = f" and too few of {len(new) - 10} others" if len(new) > 10 else ""
        warnings.warn(
            f"expected enough held-out samples of every group, got {listed}{more}: their "
            "samples are judged against all held-out ones, without a rate of their own; "
            "calibrate with more samples of such groups",
            CalibrationWarning,
            stacklevel=3,
        )

    def _checked(self, scores: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return scores to judge, and their groups, on the CPU.

        Raises:
            CalibrationError: If a score is NaN, or groups are missing or not expected.
        """
        judged = _numbers(scores).cpu().double()
        bad = int(judged.isnan().sum())
        if bad:
            raise CalibrationError(
                f"expected scores that are numbers or infinity, got {bad} NaN of "
                f"{judged.numel()}; to have those flagged, type "
                'scores.masked_fill(scores.isnan(), float("inf"))'
            )
        if groups is None and self.groups is not None:
            raise CalibrationError(
                f"expected the group of each sample, as this calibration has "
                f"{len(set(self.groups.tolist()))} groups, got none; type groups=..., integers "
                f"of shape {tuple(judged.shape)}"
            )
        if groups is not None and self.groups is None:
            raise CalibrationError(
                f"expected no groups, as this calibration has none, got "
                f"{described(groups)}; leave them out, or calibrate by group: "
                "Calibration(scores, groups)"
            )
        return judged, None if groups is None else _integers(groups, judged.shape)

    def _of_group(self, group: int | None) -> Tensor:
        """Return the sorted held-out scores of a group, or all where there are no groups."""
        if self.groups is None or group is None:
            return self.scores
        first = int(torch.searchsorted(self.groups, group, right=False))
        return self.scores[first : int(torch.searchsorted(self.groups, group, right=True))]

    def _of_known_group(self, group: int | None) -> Tensor:
        """Return the sorted held-out scores of a group that must have some.

        Raises:
            CalibrationError: If the group is missing or unknown, or there are no groups.
        """
        if self.groups is None and group is not None:
            raise CalibrationError(
                f"expected no group, as this calibration has none, got {group}; leave it out, "
                "or calibrate by group: Calibration(scores, groups)"
            )
        held_out = self._of_group(group)
        if self.groups is not None and (group is None or not held_out.numel()):
            known = sorted(set(self.groups.tolist()))
            listed = ", ".join(map(str, known[:10])) + (", ..." if len(known) > 10 else "")
            raise CalibrationError(
                f"expected a group with held-out samples ({listed}), got {group}; type "
                f"group={known[0]}, or calibrate with samples of that group"
            )
        return held_out


def _numbers(scores: object) -> Tensor:
    """Return scores in whatever people hold as a tensor.

    Raises:
        CalibrationError: If they are no numbers.
    """
    numbers = as_tensors(scores, torch.float64)
    if isinstance(numbers, (float, int)):
        numbers = torch.tensor(numbers, dtype=torch.float64)
    if not isinstance(numbers, Tensor):
        raise CalibrationError(
            f"expected scores, larger = more atypical, got {described(scores)}; type "
            "Calibration(method.score(heldout_x)) for held-out ones, and "
            "calibration.flag(method.score(x)) for others"
        )
    return numbers.detach()


def _as_given(judged: Tensor, scores: Tensor) -> Tensor:
    """Return a result in the kind that the scores came in, on their device."""
    device = scores.device if isinstance(scores, Tensor) else "cpu"
    return as_given(judged.to(device), scores)


def _integers(groups: object, shape: torch.Size) -> Tensor:
    groups = as_tensors(groups, torch.float64)
    if not isinstance(groups, Tensor):
        got = described(groups)
    elif groups.is_floating_point() or groups.is_complex() or groups.shape != shape:
        got = f"{groups.dtype} {tuple(groups.shape)}"
    else:
        return groups.detach().to("cpu", torch.int64)
    raise CalibrationError(
        f"expected one integer group per sample, of shape {tuple(shape)}, got {got}; type "
        "groups.long() for whole numbers, or by=predicted_class"
    )


def check_share(name: str, value: float, instead: float) -> None:
    """Raise unless an option is a share.

    Args:
        name: Of the option.
        value: Must be in (0, 1).
        instead: A value to suggest.

    Raises:
        OptionError: If it is not.
    """
    if not 0 < value < 1:
        raise OptionError(f"expected 0 < {name} < 1, got {value}; type {name}={instead}")


def _most_above(rate: float, confidence: float | None, num_data: int) -> int:
    """Return how many held-out scores may lie above a threshold; -1 for too few samples.

    Without a confidence, those with p-values k/(n+1) up to the rate. With one, the most for
    which Beta(above + 1, n - above) puts at least this probability below the rate.
    """
    check_share("false_alarm", rate, 0.05)
    if confidence is None:
        # compared as the p-values are, so that rates such as 3/101 are met exactly
        steps = round(rate * (num_data + 1))
        return steps - 1 if steps / (num_data + 1) <= rate else steps - 2
    check_share("confidence", confidence, 0.99)
    betainc = optional("scipy.special", "alarms").betainc

    def too_many(above: int) -> bool:
        return bool(betainc(above + 1, num_data - above, rate) < confidence)

    return bisect.bisect_left(range(num_data), True, key=too_many) - 1


def _allowed(rate: float, confidence: float | None, num_data: int, group: int | None) -> int:
    """Return how many held-out scores may lie above a threshold.

    Raises:
        CalibrationError: If there are too few held-out samples for the rate.
    """
    above = _most_above(rate, confidence, num_data)
    if above >= 0:
        return above
    among = "" if group is None else f" of group {group}"
    needed = 1 + bisect.bisect_left(
        range(1, _MOST), True, key=lambda n: _most_above(rate, confidence, n) >= 0
    )
    if confidence is None:
        raise CalibrationError(
            f"expected a false-alarm rate of at least 1/(n+1) = {1 / (num_data + 1):.3g} "
            f"for n = {num_data} held-out samples{among}, got {rate:.3g}; calibrate with "
            f"at least {needed} samples{among}"
        )
    raise CalibrationError(
        f"expected at least {needed} held-out samples{among} for a false-alarm rate of "
        f"{rate:.3g} with confidence {confidence:.3g}, got {num_data}; calibrate with at "
        f"least {needed} samples{among}, or ask for a higher rate"
    )


def predicted_class(output: Tensor) -> Tensor:
    """Return the class each sample is taken for, ``(B,)``: the largest of its logits.

    Args:
        output: Logits ``(B, classes)``; a single one counts as that of the second of two.

    Examples:
        >>> predicted_class(torch.tensor([[0.1, 2.0], [3.0, -1.0]]))
        tensor([1, 0])
    """
    if output.shape[1] == 1:
        return (output[:, 0] > 0).long()
    return output.argmax(1)


def groups_of(by: Callable[[Any], Tensor], output: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Return the groups a function puts samples in, ``(B,)`` in int64 on the CPU.

    Args:
        by: Maps outputs to groups: one integer per sample.
        output: ``(B, *shape)``, or several by name.
    """
    first = output if isinstance(output, Tensor) else next(iter(output.values()))
    return _integers(by(output), first.shape[:1])


class CrowdWatch:
    """Warns, once, if scores crowd below nearly all held-out ones, where p-values are 1.

    At least half of the last samples, 8 to 64 of them, must be as low as the lowest 1 % of the
    held-out ones, and the chance of that at most 1e-6. Let ``m`` of ``n`` held-out scores be
    that low, ties included: the number of low scores among ``w`` new ones of the same kind is
    at most beta-binomial with ``w``, ``m + 1`` and ``n - m``. That distribution is over both
    draws, so that testing one stream repeatedly adds little to the chance.

    Args:
        calibration: The held-out scores.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        held_out = calibration.pooled
        place = math.ceil(_LOW * (len(held_out) + 1)) - 1
        self._limit = float(held_out[place])
        self._num_low = int((held_out <= self._limit).sum())
        self._last: deque[bool] = deque(maxlen=_LAST)
        self._warned = self._num_low == len(held_out)  # scores that are all alike tell nothing

    def look(self, scores: Tensor) -> None:
        """Look at the scores of a batch.

        Args:
            scores: ``(B,)``, on the CPU.
        """
        if self._warned:
            return
        self._last.extend((scores[-_LAST:] <= self._limit).tolist())
        count, low = len(self._last), sum(self._last)
        if count < _FEWEST or 2 * low < count or self._chance(low, count) > _CHANCE:
            return
        self._warned = True
        warnings.warn(
            f"expected scores like the held-out ones, got {low} of the last {count} as low as "
            f"their lowest {_LOW:.0%} (at most {self._limit:.3g}), with p-values near 1: a "
            "classifier that is sure of everything scores so, whatever it is given; look how "
            "the inputs are scaled (forgot to divide by 255?), and at a few of the outputs",
            SuspiciousInputWarning,
            stacklevel=3,
        )

    def _chance(self, low: int, count: int) -> float:
        """Return the probability of at least so many low scores among new held-out ones."""
        a, b = self._num_low + 1, len(self.calibration.pooled) - self._num_low
        beta = _log_beta(a, b)
        return math.fsum(
            math.comb(count, k) * math.exp(_log_beta(a + k, b + count - k) - beta)
            for k in range(low, count + 1)
        )


def _log_beta(a: int, b: int) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
