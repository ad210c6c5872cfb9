"""A procedural runway: what a camera on the wing of a taxiing aircraft sees, at any hour.

Stands in for the paper's TaxiNet frames, which are not public. Geometry, colours and the signs
of the labels are fitted to public X-Plane frames; see `Camera` for what these say.
"""

from scodbench.runway.camera import Camera
from scodbench.runway.conditions import (
    AFTERNOON,
    CLOUDY,
    EVENING,
    MORNING,
    Condition,
    all_day,
)
from scodbench.runway.poses import sample_poses
from scodbench.runway.rendering import render

__all__ = [
    "AFTERNOON",
    "CLOUDY",
    "EVENING",
    "MORNING",
    "Camera",
    "Condition",
    "all_day",
    "render",
    "sample_poses",
]
