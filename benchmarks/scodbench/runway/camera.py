"""A camera on the right wing: where each pixel looks, and what it sees of the ground.

Runway coordinates: x along the runway from its threshold, y to the left of the centre line, z
up, in metres. The camera does not roll, so that the horizon is a row of the image, and how far
ahead a pixel meets the ground depends on its row alone.

The defaults were fitted by least squares to the bright right edge line in 147 frames of the
X-Plane 11 simulator (2931 points, 0.6 pixels of 128 rms), reduced to 72 rows and 128 columns.
What those frames say about the labels:

- Both labels grow to the left. In row 32, the column of the right edge line is
  151 + 7.5 (cross-track in m) + 1.34 (heading in degrees), R^2 = 0.998: the aircraft moves to
  the left, or turns to the left, and the line moves to the right.
- The runway's vanishing point is at column 55 for a heading of 0, at 32 for -15 degrees and at
  109 for +33.
- The camera looks 5.3 degrees to the right of the nose and 12.8 degrees down, from 2.1 m above
  the ground; the horizon is at 24 % of the image's height.
- The centre line is 1.6 m to the left of the camera when the label says 0, and the edge lines
  are 14.55 m from it.

The frames are 16:9 and the network wants 300 columns by 260 rows: both fields of view are kept
and the picture is squeezed, as resizing does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from scodkit.errors import OptionError

# least fall of a ray: the ground ends at 600 heights, finer than any pixel could show
_FLATTEST = 1.7e-3


@dataclass(frozen=True)
class Camera:
    """Where the camera sits on the aircraft and how it looks at the world.

    Args:
        height_m: Above the ground.
        right_m: To the right of the point whose cross-track distance is the label.
        pitch_deg: Down from the horizon, of the optical axis.
        yaw_deg: To the right of the nose, of the optical axis.
        horizontal_fov_deg: Between the left and the right border of the image.
        vertical_fov_deg: Between its upper and lower border.
        rows: Of the image.
        columns: Of the image.

    Raises:
        OptionError: If a length or an angle is out of its range.

    Examples:
        >>> camera = Camera()
        >>> round(camera.horizon_row)
        61
    """

    height_m: float = 2.1
    right_m: float = 1.6
    pitch_deg: float = 12.8
    yaw_deg: float = 5.3
    horizontal_fov_deg: float = 74.8
    vertical_fov_deg: float = 46.5
    rows: int = 260
    columns: int = 300

    def __post_init__(self) -> None:
        limits = {
            "height_m": (0.1, 100),
            "right_m": (-50, 50),
            "pitch_deg": (0, 60),
            "yaw_deg": (-60, 60),
            "horizontal_fov_deg": (5, 140),
            "vertical_fov_deg": (5, 140),
            "rows": (8, 4096),
            "columns": (8, 4096),
        }
        for field in fields(self):
            low, high = limits[field.name]
            value = getattr(self, field.name)
            if not low <= value <= high:
                raise OptionError(
                    f"expected {low} <= {field.name} <= {high}, got {value}; type Camera()"
                )

    @property
    def focal_columns(self) -> float:
        """Columns per unit of slope to the right of the optical axis."""
        return self.columns / 2 / math.tan(math.radians(self.horizontal_fov_deg) / 2)

    @property
    def focal_rows(self) -> float:
        """Rows per unit of slope below the optical axis."""
        return self.rows / 2 / math.tan(math.radians(self.vertical_fov_deg) / 2)

    @property
    def horizon_row(self) -> float:
        """Row of the horizon, 0 = upper border of the image; pixel i covers i to i + 1."""
        return self.rows / 2 - self.focal_rows * math.tan(math.radians(self.pitch_deg))

    @property
    def sky_rows(self) -> int:
        """How many rows have their centre above the horizon."""
        return min(max(math.ceil(self.horizon_row - 0.5), 0), self.rows)


@dataclass(frozen=True)
class Rays:
    """What a camera sees from its aircraft, whatever the pose: one entry per row and column.

    Below the horizon (R rows), as points of the ground in metres from the camera, along its
    line of sight:

    Attributes:
        ahead: ``(R, C)`` forward.
        aside: ``(R, C)`` to the right.
        step_ahead: ``(R, C)`` how much less forward the next row is.
        step_aside: ``(R, C)`` how much less to the right the next row is.
        step_column: ``(R, C)`` how much more to the right the next column is.
        distance: ``(R, C)`` through the air.
        forward: ``(R, C)`` along the nose, from the aircraft's reference point.
        left: ``(R, C)`` to the left, from the aircraft's reference point.
        sky_azimuth: ``(S, C)`` above the horizon, radians to the left of the nose.
        sky_elevation: ``(S, C)`` above the horizon, radians.
        row_angle: Radians from one row to the next, in the middle of the image.
    """

    ahead: Tensor
    aside: Tensor
    step_ahead: Tensor
    step_aside: Tensor
    step_column: Tensor
    distance: Tensor
    forward: Tensor
    left: Tensor
    sky_azimuth: Tensor
    sky_elevation: Tensor
    row_angle: float


@dataclass(frozen=True)
class Ground:
    """Where the pixels below the horizon meet the ground, in runway coordinates.

    Attributes:
        x: ``(B, R, C)`` metres along the runway.
        y: ``(B, R, C)`` metres to the left of the centre line.
        width_x: ``(B, R, C)`` how many metres of x a pixel covers.
        width_y: ``(B, R, C)`` how many metres of y a pixel covers.
    """

    x: Tensor
    y: Tensor
    width_x: Tensor
    width_y: Tensor


def rays(camera: Camera, device: torch.device) -> Rays:
    """Return what the camera sees from its aircraft.

    Args:
        camera: The camera.
        device: Where the tensors shall be; float32.
    """
    column = torch.arange(camera.columns, dtype=torch.float64) + 0.5
    row = torch.arange(camera.rows, dtype=torch.float64)[:, None] + 0.5
    right = (column - camera.columns / 2) / camera.focal_columns
    down = (row - camera.rows / 2) / camera.focal_rows
    pitch, yaw = math.radians(camera.pitch_deg), math.radians(camera.yaw_deg)

    above = down[: camera.sky_rows]
    level = math.cos(pitch) - above * math.sin(pitch)
    rise = -(math.sin(pitch) + above * math.cos(pitch))
    below = down[camera.sky_rows :]
    half = 0.5 / camera.focal_rows
    ahead, reach = _meet(camera, below)
    (upper_ahead, upper), (lower_ahead, lower) = (
        _meet(camera, below + s) for s in (-half, half)
    )
    aside = right * reach
    ahead = ahead.expand_as(aside)
    tensors = {
        "ahead": ahead,
        "aside": aside,
        "step_ahead": (upper_ahead - lower_ahead).expand_as(aside),
        "step_aside": right * (upper - lower),
        "step_column": (reach / camera.focal_columns).expand_as(aside),
        "distance": (ahead.square() + aside.square() + camera.height_m**2).sqrt(),
        "forward": ahead * math.cos(yaw) - aside * math.sin(yaw),
        "left": -ahead * math.sin(yaw) - aside * math.cos(yaw) - camera.right_m,
        "sky_azimuth": -torch.atan2(right, level) - yaw,
        "sky_elevation": torch.atan2(rise, torch.hypot(right, level)),
    }
    held = {name: t.float().contiguous().to(device) for name, t in tensors.items()}
    return Rays(**held, row_angle=1 / camera.focal_rows)


def look_down(seen: Rays, camera: Camera, poses: Tensor) -> Ground:
    """Return where the pixels below the horizon meet the ground.

    Args:
        seen: The camera's rays.
        camera: The camera.
        poses: ``(B, 3)`` cross-track m, heading deg, down-track m; float64, on the CPU.
    """
    heading = torch.deg2rad(poses[:, 1])
    axis = heading - math.radians(camera.yaw_deg)
    device = seen.ahead.device
    cos, sin = per_frame(axis.cos(), device), per_frame(axis.sin(), device)
    x = per_frame(poses[:, 2] + camera.right_m * heading.sin(), device)
    y = per_frame(poses[:, 0] - camera.right_m * heading.cos(), device)
    step_x = seen.step_ahead * cos + seen.step_aside * sin
    step_y = seen.step_ahead * sin - seen.step_aside * cos
    return Ground(
        x=seen.ahead * cos + seen.aside * sin + x,
        y=seen.ahead * sin - seen.aside * cos + y,
        width_x=torch.hypot(step_x, seen.step_column * sin),
        width_y=torch.hypot(step_y, seen.step_column * cos),
    )


def per_frame(values: Tensor, device: torch.device) -> Tensor:
    """Return ``(B, ...)`` numbers as float32 on a device, ready to meet ``(..., R, C)``."""
    return values.float().to(device)[..., None, None]


def _meet(camera: Camera, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far ahead rays of a slope below the axis meet the ground, and their length.

    The length is in units of the ray's component along the optical axis.
    """
    pitch = math.radians(camera.pitch_deg)
    fall = (math.sin(pitch) + down * math.cos(pitch)).clamp(min=_FLATTEST)
    reach = camera.height_m / fall
    return reach * (math.cos(pitch) - down * math.sin(pitch)), reach
