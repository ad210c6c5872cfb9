"""How results change with one choice, and what no single method shows. Rows like any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from scodbench.domain import Domain
from scodbench.identity import untrained
from scodbench.measure import Setup
from scodbench.rows import Row
from scodbench.sweeps.aggregations import aggregation_sweep
from scodbench.sweeps.choices import (
    fidelity,
    layer_sweep,
    prior_sweep,
    rank_sweep,
    sketch_sweep,
)
from scodbench.sweeps.errors import error_sweep
from scodbench.sweeps.examples import example_sweep
from scodbench.sweeps.fused import fused_sweep
from scodbench.sweeps.projected import (
    PROJECTED,
    PROJECTED_KFAC,
    PROJECTED_RANDOM,
    projected_kfac_sweep,
    projected_random_sweep,
    projected_sweep,
)
from scodbench.sweeps.size import size_sweep

# more weights than this, and the exact Fisher or a dozen fits take too long
_SMALL = 100_000

Sweep = Callable[[Setup], Iterator[Row]]

SWEEPS: dict[str, Sweep] = {
    "rank": rank_sweep,
    "prior": prior_sweep,
    "layers": layer_sweep,
    "sketch": sketch_sweep,
    "fidelity": fidelity,
    "errors": error_sweep,
    "size": size_sweep,
    "examples": example_sweep,
    "fused": fused_sweep,
    "aggregations": aggregation_sweep,
    PROJECTED: projected_sweep,
    PROJECTED_KFAC: projected_kfac_sweep,
    PROJECTED_RANDOM: projected_random_sweep,
}

# the others are for small networks
_OF_ANY_SIZE = (
    "prior",
    "layers",
    "fused",
    "aggregations",
    PROJECTED,
    PROJECTED_KFAC,
    PROJECTED_RANDOM,
)

# those that ask for an ensemble's networks
ENSEMBLE_SWEEPS = ("errors",)


def applies(sweep: str, domain: Domain) -> bool:
    """Return whether a sweep is for a domain.

    Args:
        sweep: One of `SWEEPS`.
        domain: The domain.
    """
    if sweep == "size":  # it brings networks of its own, made for this domain's inputs
        return domain.name == "mnist"
    if sweep == "errors":  # those with a mixed set
        return domain.name in ("taxinet", "taxinet_tiny")
    network, *_ = untrained(domain)
    if sweep == "examples":
        # pictures are convolved or flattened
        return any(isinstance(m, (nn.Conv2d, nn.Flatten)) for m in network.modules())
    return sweep in _OF_ANY_SIZE or sum(p.numel() for p in network.parameters()) <= _SMALL
