"""Streaming low-rank summaries of the Fisher information, in one pass and fixed memory."""

from scodkit.sketch.base import Sketch, SketchState
from scodkit.sketch.exact import Exact
from scodkit.sketch.frequent_directions import FrequentDirections
from scodkit.sketch.maps import SRFT, Fold, Gaussian, Map, SparseSign
from scodkit.sketch.nystrom import Nystrom
from scodkit.sketch.two_sided import TwoSided

__all__ = [
    "SRFT",
    "Exact",
    "Fold",
    "FrequentDirections",
    "Gaussian",
    "Map",
    "Nystrom",
    "Sketch",
    "SketchState",
    "SparseSign",
    "TwoSided",
]
