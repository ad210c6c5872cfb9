"""What a method costs, in numbers that do not depend on the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What a fitted method costs, for samples like those of a batch.

    Args:
        forwards: Forward passes per scored sample.
        backwards: Backward passes per scored sample, to the weights or to some layer.
        products: Multiplications per scored sample besides those passes.
        kept: Numbers kept for scoring, the network's own weights not counted.
        passes: Times the training data is read by the fit.
        fit_forwards: Forward passes per training sample, over the whole fit.
        fit_backwards: Backward passes per training sample, over the whole fit.
        networks: Networks that have to be trained.
    """

    forwards: float
    backwards: float = 0
    products: int = 0
    kept: int = 0
    passes: int = 0
    fit_forwards: float = 0
    fit_backwards: float = 0
    networks: int = 1

    def __str__(self) -> str:
        score = f"scoring: {self.forwards:g} forward, {self.backwards:g} backward passes"
        fit = f"fit: {self.passes} passes over the data, {self.fit_forwards:g} forward and "
        fit += f"{self.fit_backwards:g} backward a sample"
        more = f"{self.products:.2g} products a sample, {self.kept:.2g} numbers kept"
        return f"{score}, {more}; {fit}; {self.networks} trained network(s)"
