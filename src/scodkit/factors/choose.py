"""Selects the fastest engine that is right for a model, by trying it on a few samples."""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import Tensor

from scodkit.errors import BatchError, EngineFallbackWarning, first_line
from scodkit.factors.alone import FunctionalEngine, LoopEngine, shapes_of_samples
from scodkit.factors.engine import Engine, Factors, Linearization
from scodkit.factors.hooks import HookEngine
from scodkit.factors.live_bytes import LiveBytes, Memory
from scodkit.factors.pieces import (
    ADVICE,
    Alone,
    add_rows,
    check_alone,
    distinct,
    num_alone,
    pick,
    relative_distance,
    tolerance,
    zeros,
)
from scodkit.factors.products import Jacobian
from scodkit.factors.rules import UnsupportedCallError
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import ParameterSet
from scodkit.numerics.matmul import sum_dtype

# fastest first; the loop needs no trial, it is the reference for the others
_FAST_ENGINES: tuple[type[Engine], ...] = (HookEngine, FunctionalEngine)
ENGINES: tuple[type[Engine], ...] = (*_FAST_ENGINES, LoopEngine)

# one in so many batches with a layout that was checked before is checked again
CHECK_EVERY = 100

# directions per sample in a trial
_DIRECTIONS = 2

# share of the norm of all gradients below which one parameter's gradients are compared
# relative to that share, not to their own norm: they are not expected to be as precise
_SMALL_SHARE = 1e-2


def choose_engine(
    network: Network,
    parameters: ParameterSet,
    example: Inputs,
    check_every: int = CHECK_EVERY,
    passed_over: tuple[str, ...] = (),
) -> Engine:
    """Return the fastest engine that agrees with plain autograd on a few samples.

    Args:
        network: The model, already in eval mode.
        parameters: The chosen weights.
        example: A batch; a few of its samples are tried.
        check_every: Check one in so many later batches, 0 for none.
        passed_over: Why the fastest engines are ruled out, one reason for each.

    Returns:
        An engine. Warns with `EngineFallbackWarning` when a faster one was rejected, and
        refuses models whose samples interact.
    """
    # two correct computations differ by 1e-3 in TF32, by 1e-2 in bfloat16
    with network.in_full_precision():
        trial = _Trial(network, parameters, example)
        for kind in _FAST_ENGINES[len(passed_over) :]:
            engine = kind(network, parameters)
            reason = trial.objection(engine)
            if reason is None:
                break
            passed_over = (*passed_over, f"{kind.__name__} ({reason})")
        else:
            engine = trial.loop
            trial.check_interaction()
    if passed_over:
        warnings.warn(
            f"{type(network.model).__name__} is left to {type(engine).__name__}, which gives "
            f"the same scores, more slowly; passed over: {', '.join(passed_over)}",
            EngineFallbackWarning,
            stacklevel=2,
        )
    if isinstance(engine, HookEngine):
        engine.known_alone = trial.alone
    if isinstance(engine, FunctionalEngine):
        engine.by_shape[shapes_of_samples(example)] = None
    return _checking(engine, check_every)


def name_of(engine: Engine) -> str:
    """Return the name of an engine, with the type of device it was chosen on."""
    return f"{type(engine).__name__} on {engine.device.type}"


def is_engine(name: object) -> bool:
    """Return whether an object is a name that `name_of` can return."""
    kinds = {kind.__name__ for kind in ENGINES}
    return type(name) is str and name.partition(" on ")[0] in kinds and name.count(" on ") == 1


def named_engine(
    name: str, network: Network, parameters: ParameterSet, check_every: int = CHECK_EVERY
) -> Engine | None:
    """Return the engine that was chosen at a fit.

    Args:
        name: From `name_of`.
        network: The model.
        parameters: The chosen weights.
        check_every: As in `choose_engine`.

    Returns:
        None if the model is on another type of device, where the trial says nothing.
    """
    engines = (kind(network, parameters) for kind in ENGINES)
    same = [engine for engine in engines if name_of(engine) == name]
    return _checking(same[0], check_every) if same else None


def _checking(engine: Engine, check_every: int) -> Engine:
    """Return an engine with its check interval and its fallback for refused batches set."""
    engine.check_every = check_every
    if isinstance(engine, HookEngine):
        engine.otherwise = _slower_engine
    if isinstance(engine, FunctionalEngine):
        engine.tried = _loop_if_wrong
    return engine


def _loop_if_wrong(
    network: Network, parameters: ParameterSet, call: Inputs
) -> LoopEngine | None:
    """Return plain autograd if function transforms are wrong for batches like this one."""
    with network.in_full_precision():
        trial = _Trial(network, parameters, call)
        reason = trial.objection(FunctionalEngine(network, parameters))
    if reason is None:
        return None
    warnings.warn(
        f"batches of these shapes are left to LoopEngine, which gives the same scores, more "
        f"slowly; passed over: FunctionalEngine ({reason})",
        EngineFallbackWarning,
        stacklevel=2,
    )
    return trial.loop


def _slower_engine(
    network: Network, parameters: ParameterSet, call: Inputs, reason: str
) -> Engine:
    return choose_engine(network, parameters, call, 0, (f"HookEngine ({reason})",))


def choose_jacobian(
    network: Network, parameters: ParameterSet, example: Inputs
) -> tuple[bool | None, str]:
    """Return the fastest method for Jacobian products that agrees with plain autograd.

    Args:
        network: The model, already in eval mode.
        parameters: The chosen weights.
        example: A batch; its first samples are tried.

    Returns:
        Whether products are vectorised over vectors (None if products are not right at all),
        and a description of the methods that were rejected.
    """
    passed_over: list[str] = []
    with network.in_full_precision():
        trial = _Trial(network, parameters, example)
        for together, words in ((True, "all vectors at once"), (False, "one after the other")):
            reason = trial.objection_to_products(together)
            if reason is None:
                return together, ", ".join(passed_over)
            passed_over.append(f"{words} ({reason})")
        trial.check_interaction()
    return None, ", ".join(passed_over)


class _Trial:
    """A few distinct samples with their gradients by plain autograd.

    Args:
        network: The model, in eval mode and in full precision.
        parameters: The chosen weights.
        example: The batch to take them from.
    """

    def __init__(self, network: Network, parameters: ParameterSet, example: Inputs) -> None:
        self.loop = LoopEngine(network, parameters)
        self._network, self._parameters = network, parameters
        self._few = pick(example, distinct(example, num_alone(parameters)))
        exact = _one_by_one(self.loop, self._few)
        self.alone = Alone(self._few, exact.output)
        shape = (len(exact.output), _DIRECTIONS, exact.output[0].numel())
        self._rows = _random(shape, exact.output)
        factors = exact.pull_back(self._rows).hold()
        self._expected, self._norms = _whole(factors), factors.squared_norms()

    def objection(self, engine: Engine) -> str | None:
        """Return why an engine is not right for the model, or None.

        Models whose samples interact are refused. The engine's memory is measured, too.
        """
        try:
            linear, factors = _measured(engine, self._few, self._rows)
        except Exception as error:  # whatever a third-party module raises under a transform
            return f"it raised {first_line(error)}"
        check_alone(self._network, linear.output, self.alone.output)
        found = _whole(factors)
        distance = self._distance(found, self._expected)
        if distance > tolerance(found) and found.itemsize < torch.float32.itemsize:
            # plain autograd may be off: torch adds up gradients of embeddings in bfloat16
            distance = self._distance(found, self._in_float32())
        objection = self._verdict("gradients", distance)
        if objection is None and factors.outside is not None:
            norms = factors.squared_norms()
            usable = norms.isfinite() & self._norms.isfinite()
            distance = relative_distance(norms[usable], self._norms[usable])
            objection = self._verdict("squared norms", distance)
        return objection

    def check_interaction(self) -> None:
        """Refuse models whose samples interact."""
        with torch.no_grad():
            check_alone(self._network, self._network(self._few), self.alone.output)

    def objection_to_products(self, together: bool) -> str | None:
        """Return why a method for Jacobian products is not right for the model, or None."""
        usable = self._expected.isfinite().all(2).all(1)
        if not bool(usable.any()):
            return "none of the first samples is finite"
        expected, rows = self._expected[usable], self._rows[usable]
        few = self._few.map(lambda t: t[usable.to(t.device)])
        tangents = _random((_DIRECTIONS, expected.shape[2]), expected)
        try:
            jacobian = Jacobian(self._network, self._parameters, few, together)
            pushed = jacobian.push(tangents)
            pulled = torch.zeros_like(expected[0])
            for columns, sums in jacobian.pull(rows.transpose(0, 1)):
                pulled[:, columns] = sums.reshape(len(sums), -1)
        except Exception as error:  # whatever a third-party module raises under a transform
            return f"it raised {first_line(error)}"
        check_alone(self._network, jacobian.output, self.alone.output[usable])
        # both sides of r . (J v) = (J^T r) . v, and sums over samples of the gradients
        sides = torch.einsum("tbd,bqd->tbq", pushed, rows.to(pushed.dtype))
        distance = max(
            relative_distance(sides, torch.einsum("bqn,tn->tbq", expected, tangents)),
            relative_distance(pulled, expected.sum(0)),
        )
        return self._verdict("products", distance)

    def _verdict(self, words: str, distance: float) -> str | None:
        if distance <= tolerance(self._rows):
            return None
        return f"its {words} differ from plain autograd's by {distance:.1e} relative"

    def _in_float32(self) -> Tensor:
        """Return the gradients by plain autograd of a copy of the model in float32."""
        try:
            wide = self._network.in_float32()
            with wide.evaluating():
                few = self._few.map(lambda t: t.float() if t.is_floating_point() else t)
                exact = LoopEngine(wide, self._parameters).alone(few)
                return _whole(exact.pull_back(self._rows.float()).hold())
        except Exception:  # of a model that cannot be copied, or has a dtype of its own
            return self._expected

    def _distance(self, actual: Tensor, expected: Tensor) -> float:
        """Return the largest distance of any parameter's gradients, relative to their size."""
        # a non-finite sample is non-finite in both, but one may have NaN and the other inf
        if not torch.equal(actual.isfinite(), expected.isfinite()):
            return float("inf")
        error = (actual - expected).nan_to_num(0.0, 0.0, 0.0)
        expected = expected.nan_to_num(0.0, 0.0, 0.0)
        least = _SMALL_SHARE * _norm(expected)
        worst = 0.0
        for block in self._parameters.blocks:
            off, size = (_norm(t[:, :, block.columns]) for t in (error, expected))
            if off > 0.0:
                worst = max(worst, off / max(size, least) if size or least else float("inf"))
        return worst


def at_precision(engine: Engine, precision: torch.dtype | None, example: Inputs) -> Engine:
    """Return an engine for a pass in another precision, with the memory that takes.

    Args:
        engine: As it was chosen.
        precision: Of the pass; None for that of the model.
        example: A batch; a few of its samples are run.
    """
    engine = engine.of(engine.network.at_precision(precision))
    if precision is None:
        return engine
    few = pick(example, distinct(example, num_alone(engine.parameters)))
    with engine.network.evaluating(), contextlib.suppress(UnsupportedCallError):
        with torch.no_grad():
            output = engine.network(few)
        rows = _random((len(output), _DIRECTIONS, output[0].numel()), output)
        _measured(engine, few, rows, added=True)
    return engine


def _measured(
    engine: Engine, few: Inputs, rows: Tensor, *, added: bool = False
) -> tuple[Linearization, Factors]:
    """Return samples linearised, and rows ``(b, q, d)`` of them pulled back.

    Sets the engine's memory by what that takes.

    Args:
        engine: The engine.
        few: The samples.
        rows: At the output.
        added: Whether to add the rows to a matrix, too: where these are in half precision, they
            are copied for that.

    Raises:
        UnsupportedCallError: If the engine cannot follow the model.
    """
    live = LiveBytes()
    matrix = zeros(engine, engine.parameters.num_parameters, 1) if added else None
    try:
        with live:
            linear = engine.linearize(few)
            forward = live.now
            factors = linear.pull_back(rows).hold()
            if matrix is not None:
                add_rows(factors, matrix)
    except UnsupportedCallError:
        raise
    except Exception:  # some models do not run under a dispatch mode
        linear = engine.linearize(few)
        return linear, linear.pull_back(rows).hold()
    samples, directions = rows.shape[:2]
    engine.memory = Memory.bound(samples, directions, forward, live.most)
    return linear, factors


def _norm(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dtype=sum_dtype(rows)))


def _one_by_one(loop: LoopEngine, few: Inputs) -> Linearization:
    """Return the network linearised one sample at a time.

    Raises:
        BatchError: If the model does not take single samples.
    """
    try:
        return loop.alone(few)
    except Exception as error:
        raise BatchError(
            f"expected a model that takes one sample at a time, but it raised "
            f"{first_line(error)}; {ADVICE}"
        ) from error


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def _whole(factors: Factors) -> Tensor:
    """Return the rows of all parameters, concatenated along columns: ``(b, q, N)``."""
    blocks = sorted(factors.blocks(), key=lambda block: block[0].start)
    return torch.cat([rows for _, rows in blocks], dim=2).detach()
