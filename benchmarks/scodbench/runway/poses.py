"""Where the aircraft is: cross-track distance, heading and place along the runway."""

from __future__ import annotations

import torch
from torch import Tensor

from scodkit.errors import BatchError, OptionError

# what frames are drawn from, and what the renderer accepts: cross-track m, heading deg,
# down-track m
SAMPLED = ((-10.0, 10.0), (-30.0, 30.0), (50.0, 2450.0))
ACCEPTED = ((-14.0, 14.0), (-60.0, 60.0), (-100.0, 3148.0))


def sample_poses(count: int, seed: int) -> Tensor:
    """Draw poses of a taxiing aircraft, evenly and independently.

    Cross-track distance is within 10 m of the centre line (the runway is 15 m wide on either
    side), heading within 30 degrees of the runway's, and the place from 50 m to 2450 m along a
    runway of 3048 m.

    Args:
        count: How many, at least 1.
        seed: At least 0.

    Returns:
        ``(count, 3)`` float32: cross-track m, positive to the left; heading deg, positive with
        the nose to the left; down-track m.

    Raises:
        OptionError: If there are to be none, or the seed is negative.

    Examples:
        >>> sample_poses(2, seed=0).shape
        torch.Size([2, 3])
    """
    if count < 1 or seed < 0:
        raise OptionError(
            f"expected count >= 1 and seed >= 0, got {count} and {seed}; type "
            "sample_poses(100, seed=0)"
        )
    low, high = torch.tensor(SAMPLED).unbind(dim=1)
    uniform = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed))
    return low + (high - low) * uniform


def check_poses(poses: Tensor) -> None:
    """Make sure that poses can be rendered.

    Args:
        poses: ``(B, 3)``.

    Raises:
        BatchError: If they have another shape, or are not on the runway.
    """
    if poses.dim() != 2 or poses.shape[1] != 3 or not poses.is_floating_point():
        raise BatchError(
            "expected poses (B, 3) of floats, got "
            f"{tuple(poses.shape)} of {poses.dtype}; type sample_poses(100, seed=0)"
        )
    low, high = torch.tensor(ACCEPTED, dtype=torch.float64).unbind(dim=1)
    held = poses.detach().double().cpu()
    # NaN is not within anything
    bad = ~((held >= low) & (held <= high)).all(dim=1)
    if bad.any():
        raise BatchError(
            "expected cross-track within 14 m, heading within 60 degrees and down-track from "
            f"-100 m to 3148 m, got {held[bad][0].tolist()} and {int(bad.sum()) - 1} more "
            "that are not; are heading and cross-track swapped, or is heading in radians?"
        )
