"""Checks of a report: a verdict each, its rule with its numbers, and what to do.

Some checks depend on chance. Those of a page together share two levels: a monitor that keeps
its promises has by chance a failed check on at most 1 % of pages, and one to look at on at most
5 %. (Where there are too few inputs to tell, there is one to look at on every page.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from scodkit.calibration import predicted_class
from scodkit.metrics import Array
from scodkit.report import rates
from scodkit.report.findings import Findings, class_name, tells_one_class
from scodkit.report.rates import Rate, asked, percent

PASSED, LOOK, FAILED, NOT_CHECKED = "passed", "look", "failed", "not checked"
FAILED_LEVEL, LOOK_LEVEL = 0.01, 0.05
_LITTLE = 0.5  # captured curvature to look at
_TIMES = 2  # the true rate may be so many times the one asked for
_UNNOTICED = 3  # so many times the rate asked for must stand out among the known inputs
_UNLIKE = 0.5  # so large a difference between known and held-out scores must stand out
_BY_CLASS = "False alarms, class by class"
_MORE_OF_BOTH = "Calibrate with more held-out inputs, and give more known ones."
_COPIES = 0.5  # share of known scores that are those of held-out inputs
_FEWEST = 8  # scores that can tell whether they are


@dataclass(frozen=True)
class Check:
    """A check.

    Args:
        name: What is checked.
        verdict: "passed", "look", "failed" or "not checked".
        finding: The rule, and what was found.
        advice: What to do; empty where there is nothing to do.
        chance: How often chance alone makes it look so bad, at most; None where it is settled
            without chance.
        worst: The verdict that it gets at worst by chance.
    """

    name: str
    verdict: str
    finding: str
    advice: str = ""
    chance: float | None = None
    worst: str = FAILED


def checks_of(found: Findings) -> list[Check]:
    """Return all checks, judged together.

    Args:
        found: What a report has counted.
    """
    tests = _tests(found)
    look = LOOK_LEVEL / max(1, tests)
    checks = [
        _false_alarms(found, look),
        _kept_apart(found),
        _uniform(found, look),
        *_by_class(found, look),
        _enough_held_out(found),
        _captured(found),
        *_separation(found),
    ]
    assert tests == sum(check.chance is not None for check in checks)
    return [_judged(check, tests) for check in checks]


def _tests(found: Findings) -> int:
    """Return how many checks depend on chance."""
    of_known = 0 if _missing(found) else 2 + _has_classes(found)
    unknown = [one for one in found.report.sets if not one.known]
    return of_known + (len(unknown) if found.known else 0)


def _judged(check: Check, tests: int) -> Check:
    """Return a check with its verdict, at levels that all tests of the page share."""
    chance = 1.0 if check.chance is None else check.chance * tests
    if chance < FAILED_LEVEL and check.worst == FAILED:
        check = replace(check, verdict=FAILED)
    elif chance < LOOK_LEVEL:
        check = replace(check, verdict=LOOK)
    return replace(check, advice="") if check.verdict == PASSED else check


def _missing(found: Findings) -> str:
    """Return why nothing can be said about false alarms; empty where something can."""
    if found.report.monitor.calibration is None:
        return "The monitor is not calibrated."
    if not found.known:
        return "No known inputs were given."
    if _are_held_out(found):
        return "The known inputs are the held-out ones."
    if not found.groups:
        return "The known inputs have no p-values, or no outputs that tell their groups."
    return ""


def _are_held_out(found: Findings) -> bool:
    """Return whether the known inputs are those of the calibration."""
    enough = sum(len(one) for one in found.known) >= _FEWEST
    return enough and found.held_out_again >= _COPIES


def _unchecked(name: str, why: str) -> Check:
    advice = "Give known inputs that were neither fitted nor held out: --known DATA."
    if "calibrated" in why:
        advice = "Calibrate with held-out data: scod calibrate, or monitor.calibrate(loader)."
    return Check(name, NOT_CHECKED, why, advice)


def _false_alarms(found: Findings, look: float) -> Check:
    name, why = "False alarms on known inputs", _missing(found)
    if why:
        return _unchecked(name, why)
    rate = found.report.false_alarm
    raised = sum(group.alarms for group in found.groups)
    sizes = [group.sizes for group in found.groups]
    chances = rates.alarms_by_chance(rate, sizes)
    most = rates.most_by_chance(chances, look)
    total, held_out = len(chances) - 1, sum(size for size, _ in sizes)
    verdict, advice = _told(rate, sizes, look)
    limit = f"up to {most} of {total} are within chance"
    if verdict != PASSED:
        limit = f"{limit}, too many to tell" if chances[0] < 1 else "no alarm is possible"
    finding = (
        f"At most {asked(rate)} asked for; found {Rate(raised, total).words}. With {held_out} "
        f"held-out inputs, {limit}."
    )
    if raised > most:
        advice = (
            "The known inputs are more atypical than the held-out ones: calibrate with inputs "
            "of the kind the network meets in use, and with none that it was trained on."
        )
    return Check(name, verdict, finding, advice, rates.at_least(chances, raised))


def _told(rate: float, sizes: Sequence[tuple[int, int]], level: float) -> tuple[str, str]:
    """Return what so many inputs can tell of a rate of false alarms, before they are looked at.

    Args:
        rate: Asked for.
        sizes: Held-out and known inputs of each group.
        level: Of a number of alarms that is too large to be chance.

    Returns:
        "passed" if `_UNNOTICED` times the rate would stand out, "not checked" if nothing
        would, otherwise "look"; and advice.
    """
    if not any(rates.places(rate, held_out) for held_out, _ in sizes):
        return NOT_CHECKED, _MORE_OF_BOTH
    total = sum(known for _, known in sizes)
    needed = rates.fewest_to_judge(rate, sizes, level, _UNNOTICED)
    if needed is not None and total >= needed:
        return PASSED, ""
    most = rates.most_by_chance(rates.alarms_by_chance(rate, sizes), level)
    return NOT_CHECKED if most == total else LOOK, _give(needed)


def _give(needed: int | None, of: str = "") -> str:
    """Return advice to give so many known inputs, or what else if no number is enough."""
    if needed is None:
        return _MORE_OF_BOTH
    return f"Give about {_rounded(needed)} known inputs{of}."


def _kept_apart(found: Findings) -> Check:
    name, monitor = "Training, held-out and known inputs are different", found.report.monitor
    told, again = monitor.notes.get("held_out_fitted"), found.again()
    apart = "Calibrate with inputs the network was not trained on; the alarms mean nothing yet."
    if told is not None:
        return Check(name, FAILED, f"{told} held-out inputs were fitted, too.", apart)
    if _are_held_out(found):
        copies = percent(found.held_out_again, 0)
        finding = (
            f"{copies} of the known scores are those of held-out inputs: then the rate of "
            "false alarms follows from the calibration, and is no test of it."
        )
        advice = "Give known inputs that were neither fitted nor held out."
        return Check(name, LOOK, finding, advice)
    if again is not None:
        verdict = FAILED if again.certain else LOOK
        advice = "Give known inputs that the network was not trained on."
        return Check(name, verdict, f"{again} known inputs were fitted, too.", advice)
    looked = any(one.inputs is not None for one in found.known)
    if monitor.fitted.samples is None or not looked:
        why = "The fitted inputs or the known ones are not available for a comparison."
        advice = "Make sure that no input is in two of the data sets."
        return Check(name, NOT_CHECKED, why, advice)
    said = ", and no held-out input was among them at calibration"
    said = "" if monitor.calibration is None else said
    return Check(name, PASSED, f"No known input was found among the fitted ones{said}.")


def _uniform(found: Findings, look: float) -> Check:
    name, why = "Known inputs score like the held-out ones", _missing(found)
    if why:
        return _unchecked(name, why)
    tests = [rates.unlike(group.held_out, group.new) for group in found.groups]
    level = look / len(tests)
    limits = [rates.unlike_by_chance(*group.sizes, level) for group in found.groups]
    worst = int(np.argmin([chance for _, chance in tests]))
    gap, chance = tests[worst]
    verdict, advice, most = PASSED, "", f"up to {limits[worst]:.3f} is within chance"
    if max(limits) > _UNLIKE:
        verdict, most = LOOK if min(limits) < 1 else NOT_CHECKED, f"{most}, too much to tell"
        fewest = min(len(group.held_out) for group in found.groups)
        needed = rates.fewest_to_tell(fewest, level, _UNLIKE)
        advice = _give(needed, " in each group" if len(tests) > 1 else "")
    if abs(gap) > limits[worst]:
        advice = (
            "Known inputs score higher than the held-out ones, so that there are too many "
            "alarms at some rates: calibrate with inputs of the kind the network meets in use."
            if gap > 0
            else "Known inputs score lower than the held-out ones. Were they trained on? "
            "Otherwise calibrate with more of their kind: alarms are rarer than asked for."
        )
    finding = (
        "If they do, p-values are uniform. The two distributions differ by at most "
        f"{abs(gap):.3f} (Kolmogorov-Smirnov); {most}."
    )
    at_worst = FAILED if gap > 0 else LOOK
    return Check(name, verdict, finding, advice, min(1.0, len(tests) * chance), at_worst)


def _has_classes(found: Findings) -> bool:
    """Return whether false alarms can be told by class."""
    grouped = any(group.name for group in found.groups)
    with_outputs = all(one.outputs is not None for one in found.known)
    return grouped or (with_outputs and tells_one_class(found.report.monitor))


def _by_class(found: Findings, look: float) -> Iterator[Check]:
    """Yield the check of false alarms by class, or by group of the calibration."""
    if _missing(found) or not _has_classes(found):
        return
    yield _by_group(found, look) if found.groups[0].name else _by_predicted(found, look)


def _by_group(found: Findings, look: float) -> Check:
    """Return the check of groups, each of which has a threshold of its own."""
    rate, groups = found.report.false_alarm, found.groups
    chances, told = [], []
    for group in groups:
        by_chance = rates.alarms_by_chance(rate, [group.sizes])
        chances.append(rates.at_least(by_chance, group.alarms))
        told.append(_told(rate, [group.sizes], look / len(groups)))
    group = groups[int(np.argmin(chances))]
    finding = (
        f"At most {asked(rate)} asked for in each group; most striking is group "
        f"{group.name}: {Rate(group.alarms, len(group.new)).words}."
    )
    few = [i for i, (verdict, _) in enumerate(told) if verdict != PASSED]
    verdict, advice = PASSED, ""
    if few:
        verdict = NOT_CHECKED if all(own == NOT_CHECKED for own, _ in told) else LOOK
        finding += f" Too few inputs to tell: {len(few)} of {len(groups)} groups."
        advice = f"Group {groups[few[0]].name}: {told[few[0]][1]}"
    if len(groups) * min(chances) < look:
        advice = f"Calibrate with more inputs like those of group {group.name}."
    return Check(_BY_CLASS, verdict, finding, advice, min(1.0, len(groups) * min(chances)))


def _by_predicted(found: Findings, look: float) -> Check:
    """Return the check of predicted classes, which have one threshold in common."""
    outputs = [one.outputs for one in found.known if one.outputs is not None]
    classes = predicted_class(torch.cat(outputs)).numpy()
    flags = torch.cat([found.flags[one.name] for one in found.known]).numpy()
    kinds, places = np.unique(classes, return_inverse=True)
    sizes: Array = np.bincount(places).astype(np.float64)
    alarms: Array = np.bincount(places, flags).astype(np.float64)
    raised = int(alarms.sum())
    chances = np.minimum(1, len(kinds) * rates.most_of_one(alarms, sizes, raised))
    worst = int(chances.argmin())
    share = Rate(int(alarms[worst]), int(sizes[worst]))
    finding = (
        "All classes have one threshold; none should have far more than its share of the false "
        "alarms. Most striking: predicted "
        f"{class_name(found.report.monitor, int(kinds[worst]))}, {share.words}."
    )
    verdict = PASSED
    advice = "For a rate of its own in each class: monitor.calibrate(..., by=predicted_class)."
    in_one = rates.most_of_one(np.minimum(sizes, raised), sizes, raised)
    if len(kinds) * in_one.min() >= look:
        verdict, advice = NOT_CHECKED, "Give more known inputs."
        finding = (
            f"{raised} false alarms among {len(classes)} known inputs are too few to compare "
            "classes: even if all were of one class, that would be within chance."
        )
    return Check(_BY_CLASS, verdict, finding, advice, float(chances[worst]), LOOK)


def _enough_held_out(found: Findings) -> Check:
    name, calibration = "Enough held-out inputs for the rate", found.report.monitor.calibration
    if calibration is None:
        return _unchecked(name, _missing(found))
    rate, size = found.report.false_alarm, calibration.num_data
    what = "held-out inputs"
    if calibration.groups is not None:
        groups, sizes = np.unique(calibration.groups.numpy(), return_counts=True)
        size = int(sizes.min())
        what += f" of group {groups[sizes.argmin()]}, the smallest,"
    low, high = true_rate(rate, size)
    finding = (
        f"{size} {what} put the true rate of false alarms between {100 * low:.1f} and "
        f"{percent(high)} (95 %); up to {_TIMES} times the {asked(rate)} asked for is fine."
    )
    if high <= _TIMES * rate:
        return Check(name, PASSED, finding)
    needed = size
    while true_rate(rate, needed)[1] > _TIMES * rate and needed < 10**9:
        needed = math.ceil(1.05 * needed) + 1
    return Check(
        name, LOOK, finding, f"Calibrate with about {_rounded(needed)} held-out inputs."
    )


def true_rate(rate: float, held_out: int) -> tuple[float, float]:
    """Return where the true rate of a threshold lies in 95 % of held-out draws.

    Args:
        rate: Asked for.
        held_out: Number of held-out inputs.
    """
    k = rates.places(rate, held_out)
    if k == 0:
        return 0.0, 1.0  # nothing is promised
    a, b = np.array([k]), np.array([held_out + 1 - k])
    ends = [float(rates.beta_quantile(level, a, b)[0]) for level in (0.025, 0.975)]
    return ends[0], ends[1]


def _rounded(count: int) -> int:
    """Return a number with two digits that say something, rounded up."""
    unit: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // unit) * unit


def _captured(found: Findings) -> Check:
    summary = found.summary
    share = summary.captured
    finding = (
        f"{len(summary.values)} directions hold {percent(share)} of the curvature of the "
        f"training data; {percent(_LITTLE, 0)} is enough for most networks."
    )
    name, rank = "Captured curvature", max(1, len(summary.values))
    if float(summary.values.sum()) == 0:
        finding = "No output depends on the chosen weights: every score is 0."
        return Check(name, FAILED, finding, "Choose other weights: parameters=...")
    if share < _LITTLE:
        advice = f"Fit with more directions: --rank {2 * rank} or more."
        return Check(name, LOOK, finding, advice)
    return Check(name, PASSED, finding)


def _separation(found: Findings) -> Iterator[Check]:
    """Yield for each unknown set whether it scores higher than known inputs."""
    known = torch.cat([one.scores for one in found.known] or [torch.empty(0)]).numpy()
    for one in found.report.sets:
        if one.known:
            continue
        name = f"{one.name} score higher than known inputs"
        if not found.known:
            yield _unchecked(name, "No known inputs were given.")
            continue
        roc, scores = found.curves[one.name].roc, one.scores.numpy()
        finding = (
            f"AUROC {roc.area:.3f} ({roc.area_low:.3f} to {roc.area_high:.3f}): the share of "
            "pairs in which the unknown input scores higher; 0.5 is guessing."
        )
        verdict = PASSED
        advice = (
            "The score takes these inputs for known ones. Look at their predictions, and try "
            "scodkit.Fused, which uses other evidence as well."
        )
        if roc.area_high < 0.5:
            verdict, finding = LOOK, f"{finding} Below 0.5 the score is inverted."
        elif roc.area_low <= 0.5:
            verdict = LOOK
            advice = (
                "Is each of them really unlike the training data? If so, give more of them."
            )
        yield Check(name, verdict, finding, advice, rates.lower_by_chance(known, scores))
