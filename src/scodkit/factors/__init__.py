"""Fisher factors: what matters at the output, pulled back to the weights."""

from scodkit.factors.alone import FunctionalEngine, LoopEngine
from scodkit.factors.checks import distinct, pick
from scodkit.factors.choose import (
    CHECK_EVERY,
    choose_engine,
    choose_jacobian,
    is_engine,
    name_of,
    named_engine,
)
from scodkit.factors.engine import (
    Engine,
    Factors,
    FactorsOf,
    HeldFactors,
    Linearization,
    row_bytes,
    squared_norms,
)
from scodkit.factors.hooks import HookEngine
from scodkit.factors.jacobian import Jacobian
from scodkit.factors.memory import LiveBytes, Memory
from scodkit.factors.pieces import (
    MANY,
    FactorSource,
    MemoryBudget,
    Piece,
    Whole,
    default_budget,
)
from scodkit.factors.products import (
    Curvature,
    Passes,
    Portions,
    ProductPiece,
    ProductSource,
    count_passes,
)

__all__ = [
    "CHECK_EVERY",
    "MANY",
    "Curvature",
    "Engine",
    "FactorSource",
    "Factors",
    "FactorsOf",
    "FunctionalEngine",
    "HeldFactors",
    "HookEngine",
    "Jacobian",
    "Linearization",
    "LiveBytes",
    "LoopEngine",
    "Memory",
    "MemoryBudget",
    "Passes",
    "Piece",
    "Portions",
    "ProductPiece",
    "ProductSource",
    "Whole",
    "choose_engine",
    "choose_jacobian",
    "count_passes",
    "default_budget",
    "distinct",
    "is_engine",
    "name_of",
    "named_engine",
    "pick",
    "row_bytes",
    "squared_norms",
]
