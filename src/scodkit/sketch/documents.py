"""Likelihoods, sketches and their states as plain data and tensors, for files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scodkit import likelihoods, sketch
from scodkit.errors import CorruptArtifactError, OptionError
from scodkit.numerics.artifact import (
    FINITE,
    FLAG,
    INTEGER,
    TEXT,
    Check,
    each,
    fields,
    maybe,
    number,
    refuse,
    table,
    tensor,
    whole,
)
from scodkit.sketch import Sketch, SketchState

# names in a file of the objects that are made of plain options only
_KNOWN: dict[str, type] = {
    "Gaussian": likelihoods.Gaussian,
    "HeteroscedasticGaussian": likelihoods.HeteroscedasticGaussian,
    "Bernoulli": likelihoods.Bernoulli,
    "Categorical": likelihoods.Categorical,
    "Nystrom": sketch.Nystrom,
    "TwoSided": sketch.TwoSided,
    "FrequentDirections": sketch.FrequentDirections,
    "Exact": sketch.Exact,
    "Fold": sketch.Fold,
    "SRFT": sketch.SRFT,
    "SparseSign": sketch.SparseSign,
    "GaussianMap": sketch.Gaussian,
}
_NAMES = {kind: name for name, kind in _KNOWN.items()}

# such an object in a header, and checks of its options by their annotation
DESCRIPTION = fields({"type": TEXT}, others=True)
_OPTIONS: dict[str, Check] = {
    "int": INTEGER,
    "int | None": maybe(INTEGER),
    "bool": FLAG,
    "Map": DESCRIPTION,
    "float | tuple[float, ...]": lambda name, value: (
        each(number()) if isinstance(value, list) else number()
    )(name, value),
}

# attributes of a sketch's state that a header holds
_STATE_FIELDS: dict[str, Check] = {
    "num_parameters": whole(1),
    "columns": whole(1),
    "num_data": whole(),
    "num_rows": whole(),
    "num_updates": whole(),
    "numbers": table(number()),
}
STATE = fields(_STATE_FIELDS)
_SQUARED_NORM = tensor((), (torch.float64,), lambda one: 0 <= float(one) < torch.inf)


def describe(thing: object) -> dict[str, Any]:
    """Return a likelihood, sketch or map as plain data: its name and its options."""
    options: dict[str, Any] = {}
    if dataclasses.is_dataclass(thing):
        options = {f.name: _plain(getattr(thing, f.name)) for f in dataclasses.fields(thing)}
    return {"type": _NAMES.get(type(thing), type(thing).__name__), **options}


def build(description: Mapping[str, Any], family: type) -> Any:
    """Return the object a description from a file stands for.

    Args:
        description: From `describe`.
        family: What it must be one of.

    Raises:
        OptionError: If it is not one that plain data can describe.
        CorruptArtifactError: If it cannot have such options.
    """
    DESCRIPTION("an object in the header", description)
    kind = _KNOWN.get(description["type"])
    if kind is None:
        raise OptionError(
            f"expected one of {', '.join(_KNOWN)}, got {description['type']}; it cannot be "
            "rebuilt from a file: pass the object itself, Monitor.load(..., likelihood=..., "
            "sketch=...)"
        )
    if family not in kind.__mro__:
        refuse(f"a {family.__name__}", description["type"])
    known = {option.name: _OPTIONS[str(option.type)] for option in dataclasses.fields(kind)}
    fields({"type": TEXT, **known})(f"the options of {description['type']}", description)
    options = {
        name: build(description[name], sketch.Map)
        if known[name] is DESCRIPTION
        else _hashable(description[name])
        for name in known
    }
    try:
        return kind(**options)
    except OptionError as error:
        raise CorruptArtifactError(
            f"expected options of {description['type']} as they were saved, got others "
            f"({error}); the file was altered: save it again"
        ) from error


def pack_state(state: SketchState, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a sketch's state as header data and tensors with prefixed names."""
    header = {name: getattr(state, name) for name in _STATE_FIELDS}
    tensors = {**state.tensors, "squared_norm": state.squared_norm}
    return header, {prefix + name: tensor for name, tensor in tensors.items()}


def unpack_state(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    prefix: str,
    sketch: Sketch,
    weights: range | None = None,
) -> SketchState:
    """Return the state that `pack_state` took apart, of a sketch that is known.

    Args:
        header: As `STATE` allows; further keys are ignored.
        tensors: Those of the state, and others.
        prefix: Of the names of those of the state.
        sketch: The sketch.
        weights: Which of the weights the tensors cover; all by default.

    Raises:
        CorruptArtifactError: If the sketch cannot have such a state.
    """
    of_state = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    plain = {name: header[name] for name in _STATE_FIELDS}
    plain["numbers"] = dict(plain["numbers"])  # which updates of the state change
    squared_norm = of_state.pop("squared_norm")
    state = SketchState(
        sketch=sketch, tensors=of_state, squared_norm=squared_norm, weights=weights, **plain
    )
    if not sketch.can_have(state):
        refuse(
            f"a state of {sketch} with {state.columns} columns for {state.num_parameters} "
            "weights",
            f"{state.shapes} and {state.numbers}",
        )
    return state


def state_checks(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Check]:
    """Return the checks of the tensors of a state that are the same for all sketches.

    Args:
        tensors: Of a file.
        prefix: Of the names of those of the state.
    """
    checks = {name: FINITE for name in tensors if name.startswith(prefix)}
    return {**checks, prefix + "squared_norm": _SQUARED_NORM}


def _plain(value: object) -> object:
    """Return a value as plain data; functions cannot be compared, and are all the same."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, tuple):
        return list(value)
    if callable(value):
        return "a function"
    return describe(value)


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
