"""Picks the fastest engine that can be trusted with a model, by trying it on one batch."""

from __future__ import annotations

import warnings

from scodkit.errors import EngineFallbackWarning
from scodkit.factors.alone import FunctionalEngine, LoopEngine
from scodkit.factors.engine import Engine
from scodkit.factors.hooks import HookEngine
from scodkit.factors.jacobian import (
    BackwardJacobian,
    ForwardJacobian,
    ForwardJacobianInTurn,
    Jacobian,
)
from scodkit.factors.trial import Trial
from scodkit.model.network import Inputs, Network
from scodkit.model.parameters import ParameterSet

# fastest first; the loop needs no trial, it is what the others are tried against
_FAST_ENGINES: tuple[type[Engine], ...] = (HookEngine, FunctionalEngine)
ENGINES: tuple[type[Engine], ...] = (*_FAST_ENGINES, LoopEngine)

# of batches whose layout was checked before, one in so many is checked again
CHECK_EVERY = 100

_JACOBIANS: tuple[type[Jacobian], ...] = (
    ForwardJacobian,
    ForwardJacobianInTurn,
    BackwardJacobian,
)


def choose_engine(
    network: Network,
    parameters: ParameterSet,
    example: Inputs,
    check_every: int = CHECK_EVERY,
    passed_over: tuple[str, ...] = (),
) -> Engine:
    """Return the fastest engine that agrees with plain autograd on a few samples.

    Args:
        network: The model, already held in eval mode.
        parameters: The chosen weights.
        example: A batch; a few of its samples are tried.
        check_every: Later batches are checked one in so many, 0 for none.
        passed_over: Why faster engines than those left are out of the question.

    Returns:
        An engine. Warns with `EngineFallbackWarning` when a fast one was turned down, and
        refuses models whose samples influence each other.
    """
    left = _FAST_ENGINES[len(passed_over) :]
    # two right ways to compute differ by 1e-3 in TF32, by 1e-2 in bfloat16
    with network.in_full_precision():
        trial = Trial(network, parameters, example)
        engine: Engine = trial.loop
        for kind in left:
            candidate = kind(network, parameters)
            reason = trial.objection(candidate)
            if reason is None:
                engine = candidate
                break
            passed_over = (*passed_over, f"{kind.__name__} ({reason})")
    if passed_over:
        warnings.warn(
            f"{type(network.model).__name__} is left to {type(engine).__name__}, which gives "
            f"the same scores, more slowly; passed over: {', '.join(passed_over)}",
            EngineFallbackWarning,
            stacklevel=2,
        )
    return checking(engine, check_every)


def name_of(engine: Engine) -> str:
    """Return the name of an engine, and of the kind of device it was chosen on."""
    return f"{type(engine).__name__} on {engine.device.type}"


def is_engine(name: object) -> bool:
    """Return whether something is a name that `name_of` gives."""
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
        None where the model is on another kind of device: others may be right there.
    """
    engines = (kind(network, parameters) for kind in ENGINES)
    same = [engine for engine in engines if name_of(engine) == name]
    return checking(same[0], check_every) if same else None


def checking(engine: Engine, check_every: int) -> Engine:
    """Return an engine that checks its batches, and leaves what it cannot take to others."""
    engine.check_every = check_every
    if isinstance(engine, HookEngine):
        engine.otherwise = _slower_engine
    return engine


def _slower_engine(
    network: Network, parameters: ParameterSet, call: Inputs, reason: str
) -> Engine:
    return choose_engine(network, parameters, call, 0, (f"HookEngine ({reason})",))


def choose_jacobian(
    network: Network, parameters: ParameterSet, example: Inputs
) -> tuple[type[Jacobian] | None, str]:
    """Return the fastest way to multiply with the Jacobian that agrees with plain autograd.

    Args:
        network: The model, already held in eval mode.
        parameters: The chosen weights.
        example: A batch; its first samples are tried.

    Returns:
        The way, None if none can be trusted; and in words why others were passed over.
    """
    passed_over: list[str] = []
    with network.in_full_precision():
        trial = Trial(network, parameters, example)
        for kind in _JACOBIANS:
            reason = trial.objection_to_products(kind)
            if reason is None:
                return kind, ", ".join(passed_over)
            passed_over.append(f"{kind.__name__} ({reason})")
    return None, ", ".join(passed_over)
