"""Fisher factors: what matters at the output, pulled back to the weights."""

from scodkit.factors.budget import MemoryBudget
from scodkit.factors.choose import choose_engine
from scodkit.factors.engine import (
    Engine,
    Factors,
    FactorsOf,
    HeldFactors,
    Linearization,
    row_bytes,
    squared_norms,
)
from scodkit.factors.functional import FunctionalEngine
from scodkit.factors.hooks import HookEngine
from scodkit.factors.loop import LoopEngine
from scodkit.factors.pieces import FactorSource, Piece

__all__ = [
    "Engine",
    "FactorSource",
    "Factors",
    "FactorsOf",
    "FunctionalEngine",
    "HeldFactors",
    "HookEngine",
    "Linearization",
    "LoopEngine",
    "MemoryBudget",
    "Piece",
    "choose_engine",
    "row_bytes",
    "squared_norms",
]
