"""A method in the table of methods."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MethodLine:
    """How well a method tells unknown inputs from known ones, and what it costs.

    What is None is left blank; a column that is blank throughout is left out.

    Args:
        name: As readers know it.
        auroc: Probability that an unknown input scores higher than a known one, in [0, 1].
        aupr: Average precision of unknown inputs, in [0, 1].
        false_alarms: Share of known inputs above its threshold, in [0, 1].
        caught: Share of unknown inputs above its threshold, in [0, 1].
        forward_passes: Time of a scored prediction over that of a bare one, >= 0.
        fit_seconds: What its fit took.
    """

    name: str
    auroc: float | None = None
    aupr: float | None = None
    false_alarms: float | None = None
    caught: float | None = None
    forward_passes: float | None = None
    fit_seconds: float | None = None
