"""Tries an engine on a few samples, against plain autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from scodkit.errors import BatchError
from scodkit.factors.alone import LoopEngine
from scodkit.factors.checks import ADVICE, distinct, pick, tolerance
from scodkit.factors.engine import Engine, Factors, Linearization
from scodkit.factors.jacobian import Jacobian
from scodkit.model.network import Inputs, Network
from scodkit.model.parameters import ParameterSet
from scodkit.numerics.matmul import sum_dtype

# samples in a trial, and the same for models whose rows are large; and directions of each
_SAMPLES, _FEWER_SAMPLES = 3, 2
_LARGE = 5_000_000
_DIRECTIONS = 2

# the share of all parameters' gradients below which those of one are not expected to be as
# precise
_SMALL_SHARE = 1e-2


class Trial:
    """A few samples, in two orders, with their gradients by plain autograd.

    Args:
        network: The model, held in eval mode and in full precision.
        parameters: The chosen weights.
        example: A batch; a few of its samples are tried, no two alike.

    Raises:
        BatchError: If a sample's output depends on its neighbours in the batch.
    """

    def __init__(self, network: Network, parameters: ParameterSet, example: Inputs) -> None:
        large = parameters.num_parameters > _LARGE
        samples = _FEWER_SAMPLES if large else _SAMPLES
        self.loop = LoopEngine(network, parameters)
        self._parameters = parameters
        self._few = pick(example, distinct(example, samples))
        exact = _one_by_one(self.loop, self._few)
        self._rows = _random_rows(exact.output)
        self._expected = _whole(exact.pull_back(self._rows))

    def objection(self, engine: Engine) -> str | None:
        """Return why an engine cannot be trusted with the model, or None."""
        try:
            straight = _whole(engine.linearize(self._few).pull_back(self._rows))
            # models that sort their samples are in order only by chance
            few, rows = self._few.map(lambda t: t.flip(0)), self._rows.flip(0)
            reverse = _whole(engine.linearize(few).pull_back(rows)).flip(0)
        except Exception as error:  # whatever a third-party module raises under a transform
            return f"it raised {type(error).__name__}: {first_line(error)}"
        distance = max(self._distance(straight), self._distance(reverse))
        if distance <= tolerance(self._rows):
            return None
        return f"its gradients differ from plain autograd's by {distance:.1e} relative"

    def objection_to_products(self, kind: type[Jacobian]) -> str | None:
        """Return why a way to multiply with the Jacobian cannot be trusted, or None."""
        usable = self._expected.isfinite().all(2).all(1)
        if not bool(usable.any()):
            return "none of the first samples is finite"
        expected, rows = self._expected[usable], self._rows[usable]
        few = self._few.map(lambda t: t[usable.to(t.device)])
        tangents = _random((_DIRECTIONS, expected.shape[2]), expected)
        try:
            jacobian = kind(self.loop.network, self._parameters, few)
            pushed = jacobian.push(tangents)
            pulled = torch.zeros_like(expected[0])
            for columns, some in jacobian.pull(rows.transpose(0, 1)):
                pulled[:, columns] = some.reshape(len(some), -1)
        except Exception as error:  # whatever a third-party module raises under a transform
            return f"it raised {type(error).__name__}: {first_line(error)}"
        # both sides of r . (J v) = (J^T r) . v, and sums over samples of the gradients
        sides = torch.einsum("tbd,bqd->tbq", pushed, rows.to(pushed.dtype))
        distance = max(
            _relative(sides, torch.einsum("bqn,tn->tbq", expected, tangents)),
            _relative(pulled, expected.sum(0)),
        )
        if distance <= tolerance(self._rows):
            return None
        return f"its products differ from plain autograd's by {distance:.1e} relative"

    def _distance(self, actual: Tensor) -> float:
        """Return the largest distance of any parameter's gradients, relative to their size."""
        # a bad sample is bad in both, though not always the same kind of bad
        if not torch.equal(actual.isfinite(), self._expected.isfinite()):
            return float("inf")
        error = (actual - self._expected).nan_to_num(0.0, 0.0, 0.0)
        expected = self._expected.nan_to_num(0.0, 0.0, 0.0)
        least = _SMALL_SHARE * _norm(expected)
        worst = 0.0
        for block in self._parameters.blocks:
            off, size = (_norm(t[:, :, block.columns]) for t in (error, expected))
            if off > 0.0:
                worst = max(worst, off / max(size, least) if size or least else float("inf"))
        return worst


def _relative(actual: Tensor, expected: Tensor) -> float:
    off, size = _norm(actual - expected), _norm(expected)
    return off / size if size else (float("inf") if off else 0.0)


def _norm(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dtype=sum_dtype(rows)))


def _one_by_one(loop: LoopEngine, few: Inputs) -> Linearization:
    """Return the samples linearised each alone; that must be what they are in company.

    Raises:
        BatchError: If a sample's output depends on its neighbours in the batch.
    """
    try:
        return loop.linearize(few)
    except BatchError:
        raise
    except Exception as error:
        raise BatchError(
            f"expected a model that takes one sample at a time, but it raised "
            f"{type(error).__name__}: {first_line(error)}; {ADVICE}"
        ) from error


def _random_rows(output: Tensor) -> Tensor:
    return _random((output.shape[0], _DIRECTIONS, output[0].numel()), output)


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def _whole(factors: Factors) -> Tensor:
    """Return the rows ``(b, q, N)``: few, or the memory for them is not there."""
    blocks = sorted(factors.blocks(), key=lambda block: block[0].start)
    return torch.cat([rows for _, rows in blocks], dim=2).detach()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]
