"""The contract between those who compute Fisher factors and those who use them.

An engine linearises the network at a batch; the linearisation pulls rows at the output back
to rows in weight space. Rows come block by block, so that no engine has to hold, and no user
may ask for, one flat tensor over all parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from scodkit.network import Inputs, Network
from scodkit.parameters import Block, ParameterSet

# while one row is formed its block, the block's source and one temporary are alive
_COPIES_PER_ROW = 3


class Factors(ABC):
    """Rows in weight space for ``b`` samples and ``q`` directions each.

    Row ``(i, j)`` is column ``j`` of the Fisher factor ``L`` of sample ``i``: a vector of ``N``
    numbers, cut into blocks along the parameters.

    Attributes:
        num_rows: ``b q``.
    """

    num_rows: int

    @abstractmethod
    def blocks(self) -> Iterable[tuple[Block, Tensor]]:
        """Return each block with its rows ``(b, q, n)``; may be asked for more than once."""

    def squared_norms(self) -> Tensor:
        """Return ``|L|_F^2`` over these rows, ``(b,)`` in float64; NaN or inf if one is."""
        return torch.stack([squared_norms(rows) for _, rows in self.blocks()]).sum(0)


def squared_norms(rows: Tensor) -> Tensor:
    """Return the sum of squares of each sample's rows ``(b, q, n)``: ``(b,)`` in float64."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    norms: Tensor = torch.linalg.vector_norm(rows, dim=(1, 2), dtype=wide)
    return norms.double().square()


class FactorsOf(Factors):
    """The factors of some samples of a batch.

    Args:
        factors: Of all of them.
        kept: ``(b,)``, True for the samples to keep.
    """

    def __init__(self, factors: Factors, kept: Tensor) -> None:
        self._factors = factors
        self._kept = kept
        self.num_rows = factors.num_rows // max(1, len(kept)) * int(kept.sum())

    def blocks(self) -> Iterable[tuple[Block, Tensor]]:
        """Return each block with the rows of the kept samples."""
        for block, rows in self._factors.blocks():
            yield block, rows[self._kept.to(rows.device)]


class Linearization(ABC):
    """A network at one batch: its output, and the transpose of its Jacobian.

    Attributes:
        output: What the model returned, ``(B, *shape)``, detached.
    """

    output: Tensor

    @abstractmethod
    def pull_back(self, rows: Tensor) -> Factors:
        """Return ``J_i^T r`` for every row ``r`` of every sample ``i``.

        Args:
            rows: Rows at the flattened output, ``(B, q, d)``.

        Returns:
            The same rows in weight space.
        """


class Engine(ABC):
    """A way to pull rows back through a network, for a fixed choice of parameters.

    Args:
        network: The model.
        parameters: The chosen weights.
    """

    def __init__(self, network: Network, parameters: ParameterSet) -> None:
        self.network = network
        self.parameters = parameters
        self.row_bytes = row_bytes(network, parameters)
        self.device = network.device  # kernels differ by device: trust does not carry over

    @abstractmethod
    def linearize(self, call: Inputs) -> Linearization:
        """Run the network forward on a batch and keep what pulling back needs."""


def row_bytes(network: Network, parameters: ParameterSet) -> int:
    """Return the working memory one row in weight space takes while it is formed."""
    size = parameters.itemsize(network.model)
    return _COPIES_PER_ROW * parameters.num_parameters * size
