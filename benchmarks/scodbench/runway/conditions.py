"""Times of day and weathers to render, and what each frame draws from them.

The paper trains on a clear morning at nine and tests on the afternoon, the evening and clouds.
A condition is a set of ranges: each frame draws its own hour, clouds, haze, exposure and white
balance from its seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scodbench.runway.noise import hashed
from scodkit.errors import OptionError

# the sun is up from 4.9 to 19.1 at the runway's latitude in late April
_FIRST_HOUR, _LAST_HOUR = 5.5, 18.75
_CAMERA_DRAWS = {"exposure": (0.92, 1.08), "warmth": (-0.02, 0.02)}


def _check_range(
    name: str, given: tuple[float, float], limits: tuple[float, float], instead: str
) -> None:
    if len(given) != 2 or not limits[0] <= given[0] <= given[1] <= limits[1]:
        raise OptionError(
            f"expected {name}=(low, high) with {limits[0]:g} <= low <= high <= {limits[1]:g}, "
            f"got {given}; type {name}={instead}"
        )


@dataclass(frozen=True)
class Condition:
    """Ranges that frames draw from, evenly and independently.

    Args:
        hours: Local solar time, from and to, within 5.5 to 18.75; 12 is noon.
        cloud_cover: Share of the sky, from and to, within 0 to 1.
        visibility_km: How far one sees, from and to, at least 1.

    Raises:
        OptionError: If a range is out of bounds or the wrong way round.

    Examples:
        >>> fog = Condition(hours=(6, 7), cloud_cover=(0.9, 1), visibility_km=(1, 2))
    """

    hours: tuple[float, float]
    cloud_cover: tuple[float, float] = (0.0, 0.01)
    visibility_km: tuple[float, float] = (15.0, 40.0)

    def __post_init__(self) -> None:
        _check_range("hours", self.hours, (_FIRST_HOUR, _LAST_HOUR), "(8.5, 9.5)")
        _check_range("cloud_cover", self.cloud_cover, (0.0, 1.0), "(0.0, 0.01)")
        _check_range("visibility_km", self.visibility_km, (1.0, 1000.0), "(15, 40)")


MORNING = Condition(hours=(8.5, 9.5))
AFTERNOON = Condition(hours=(15.0, 16.5))
EVENING = Condition(hours=(17.5, 18.4), visibility_km=(10.0, 30.0))
CLOUDY = Condition(hours=(8.5, 9.5), cloud_cover=(0.8, 1.0), visibility_km=(8.0, 25.0))


def all_day(first_hour: float = 8.5, last_hour: float = 16.5) -> Condition:
    """Return a clear day from morning to afternoon, for errors rather than conditions.

    Args:
        first_hour: Local solar time of the earliest frames.
        last_hour: Of the latest ones.

    Returns:
        A condition that has the mornings that `MORNING` has, and later hours.
    """
    return Condition(hours=(first_hour, last_hour))


@dataclass(frozen=True)
class Drawn:
    """What each frame drew, float64 on the CPU.

    Attributes:
        hour: ``(B,)`` local solar time.
        cloud_cover: ``(B,)`` share of the sky, 0 to 1.
        visibility_m: ``(B,)`` metres.
        exposure: ``(B,)`` factor on the light.
        warmth: ``(B,)`` white balance, added to red and taken from blue.
        pattern: ``(B,)`` int32 seeds of the frame's clouds and sensor noise.
    """

    hour: Tensor
    cloud_cover: Tensor
    visibility_m: Tensor
    exposure: Tensor
    warmth: Tensor
    pattern: Tensor


def draw(condition: Condition, seeds: Tensor) -> Drawn:
    """Return the variations of frames, each drawn from its own seed.

    Args:
        condition: The ranges.
        seeds: ``(B,)`` int64, at least 0, on the CPU.
    """
    low, high = (seeds & 0x7FFFFFFF).to(torch.int32), (seeds >> 31).to(torch.int32)
    ranges = (
        condition.hours,
        condition.cloud_cover,
        condition.visibility_km,
        _CAMERA_DRAWS["exposure"],
        _CAMERA_DRAWS["warmth"],
        (0.0, 2.0**31),
    )
    values = [a + (b - a) * hashed(low, high, i).double() for i, (a, b) in enumerate(ranges)]
    hour, cover, visibility, exposure, warmth, pattern = values
    return Drawn(hour, cover, visibility * 1000, exposure, warmth, pattern.to(torch.int32))
