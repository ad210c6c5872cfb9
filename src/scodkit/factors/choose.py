"""Picks the fastest engine that can be trusted with a model, by trying it on one batch."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from scodkit.errors import BatchError, EngineFallbackWarning
from scodkit.factors.engine import Engine, Factors, Linearization
from scodkit.factors.functional import FunctionalEngine
from scodkit.factors.hooks import HookEngine
from scodkit.factors.loop import LoopEngine
from scodkit.network import Inputs, Network
from scodkit.parameters import ParameterSet

# fastest first; the loop needs no trial, it is what the others are tried against
_FAST_ENGINES: tuple[type[Engine], ...] = (HookEngine, FunctionalEngine)

# samples and rows each in a trial, and the same for models whose rows are large
_TRIAL = (3, 2)
_LARGE_TRIAL = (2, 1)
_LARGE = 5_000_000

# relative Frobenius distance allowed between two ways to round the same gradients
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_TOLERANCE_HALF = 1e-1


def choose_engine(network: Network, parameters: ParameterSet, example: Inputs) -> Engine:
    """Return the fastest engine that agrees with plain autograd on a few samples.

    Args:
        network: The model, already held in eval mode.
        parameters: The chosen weights.
        example: A batch; its first samples are tried.

    Returns:
        An engine. Warns with `EngineFallbackWarning` when a fast one was turned down, and
        refuses models whose samples influence each other.
    """
    # two right ways to compute differ by 1e-3 in TF32, by 1e-2 in bfloat16
    with network.in_full_precision():
        return _choose(network, parameters, example)


def _choose(network: Network, parameters: ParameterSet, example: Inputs) -> Engine:
    samples, count = _LARGE_TRIAL if parameters.num_parameters > _LARGE else _TRIAL
    few = example.samples(slice(0, samples))
    loop = LoopEngine(network, parameters)
    exact = _one_by_one(loop, few)
    rows = _trial_rows(exact.output, count)
    expected = exact.pull_back(rows)
    engine: Engine = loop
    passed_over = []
    for kind in _FAST_ENGINES:
        candidate = kind(network, parameters)
        reason = _objection(candidate, few, rows, expected)
        if reason is None:
            engine = candidate
            break
        passed_over.append(f"{kind.__name__} ({reason})")
    if passed_over:
        warnings.warn(
            f"{type(network.model).__name__} is left to {type(engine).__name__}, which gives "
            f"the same scores, more slowly; passed over: {', '.join(passed_over)}",
            EngineFallbackWarning,
            stacklevel=3,
        )
    return engine


def _objection(engine: Engine, few: Inputs, rows: Tensor, expected: Factors) -> str | None:
    """Return why an engine cannot be trusted with a model, or None."""
    try:
        distance = _distance(engine.linearize(few).pull_back(rows), expected)
    except Exception as error:  # whatever a third-party module raises under a transform
        return f"it raised {type(error).__name__}: {_first_line(error)}"
    if distance <= _tolerance(rows):
        return None
    return f"its gradients differ from plain autograd's by {distance:.1e} relative"


def _one_by_one(loop: LoopEngine, few: Inputs) -> Linearization:
    """Return the samples linearised each alone; that must be what they are in company.

    Raises:
        BatchError: If a sample's output depends on its neighbours in the batch.
    """
    advice = (
        "the score of a sample must not depend on its batch: set batch_first=True in recurrent "
        "layers, give BatchNorm its running statistics, pick inputs with the batch first "
        "(inputs=lambda batch: ...)"
    )
    try:
        alone = loop.linearize(few)
    except Exception as error:
        raise BatchError(
            f"expected a model that takes one sample at a time, but it raised "
            f"{type(error).__name__}: {_first_line(error)}; {advice}"
        ) from error
    with torch.no_grad():
        together = loop.network(few).double().nan_to_num(0.0, 0.0, 0.0)
    gap = (together - alone.output.double().nan_to_num(0.0, 0.0, 0.0)).norm()
    if float(gap) > _tolerance(alone.output) * max(float(together.norm()), 1e-6):
        raise BatchError(
            f"expected the same output for a sample alone and in a batch, got outputs "
            f"{float(gap):.1e} apart; {advice}"
        )
    return alone


def _tolerance(like: Tensor) -> float:
    return _TOLERANCE.get(like.dtype, _TOLERANCE_HALF)


def _trial_rows(output: Tensor, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (output.shape[0], count, output[0].numel())
    return torch.randn(shape, generator=generator).to(output.device, output.dtype)


def _distance(actual: Factors, expected: Factors) -> float:
    a, b = _whole(actual), _whole(expected)
    # a bad sample is bad in both, though not always the same kind of bad
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (a, b))
    error, size = float((a - b).norm()), float(b.norm())
    return error / size if size else float(error > 0.0)


def _whole(factors: Factors) -> Tensor:
    """Return the rows ``(b, q, N)``: few, or the memory for them is not there."""
    blocks = sorted(factors.blocks(), key=lambda block: block[0].start)
    return torch.cat([rows for _, rows in blocks], dim=2)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
