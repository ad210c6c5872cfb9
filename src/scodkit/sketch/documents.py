"""Likelihoods, sketches and their states as plain data and tensors, for files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scodkit import likelihoods, sketch
from scodkit.errors import CorruptArtifactError, OptionError
from scodkit.numerics.schema import (
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

# what a header may name: objects made of plain options only
_KNOWN: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        likelihoods.Gaussian,
        likelihoods.HeteroscedasticGaussian,
        likelihoods.Bernoulli,
        likelihoods.Categorical,
        sketch.Nystrom,
        sketch.TwoSided,
        sketch.FrequentDirections,
        sketch.Exact,
        sketch.Fold,
        sketch.SRFT,
        sketch.SparseSign,
    )
} | {"GaussianMap": sketch.Gaussian}
_NAMES = {kind: name for name, kind in _KNOWN.items()}

# what such an object looks like in a header, and its options by their annotation
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

# what the state of a sketch looks like in a header
STATE = fields(
    {
        "num_parameters": whole(1),
        "columns": whole(1),
        "num_data": whole(),
        "num_rows": whole(),
        "num_updates": whole(),
        "numbers": table(number()),
    }
)
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
        CorruptArtifactError: If its options are none it can have.
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
    header = {
        "num_parameters": state.num_parameters,
        "columns": state.columns,
        "num_data": state.num_data,
        "num_rows": state.num_rows,
        "num_updates": state.num_updates,
        "numbers": state.numbers,
    }
    tensors = {**state.tensors, "squared_norm": state.squared_norm}
    return header, {prefix + name: tensor for name, tensor in tensors.items()}


def unpack_state(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    prefix: str,
    sketch: Sketch,
    held: range | None = None,
) -> SketchState:
    """Return the state that `pack_state` took apart, of a sketch that is known.

    Args:
        header: As `STATE` has it.
        tensors: Those of the state, and others.
        prefix: Of the names of its own.
        sketch: The sketch.
        held: Which of the weights the tensors are about; all by default.

    Raises:
        CorruptArtifactError: If that is none the sketch can have.
    """
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    state = SketchState(
        sketch=sketch,
        num_parameters=header["num_parameters"],
        columns=header["columns"],
        squared_norm=own.pop("squared_norm"),
        tensors=own,
        num_data=header["num_data"],
        num_rows=header["num_rows"],
        num_updates=header["num_updates"],
        numbers=dict(header["numbers"]),
        held=held,
    )
    if not sketch.can_have(state):
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        refuse(
            f"a state of {sketch} with {state.columns} columns for {state.num_parameters} "
            "weights",
            f"{shapes} and {state.numbers}",
        )
    return state


def state_checks(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Check]:
    """Return checks of the tensors of a state, as far as all sketches have the same.

    Args:
        tensors: Of a file.
        prefix: Of the names of those of the state.
    """
    own = {name: FINITE for name in tensors if name.startswith(prefix)}
    return {**own, prefix + "squared_norm": _SQUARED_NORM}


def _plain(value: object) -> object:
    """Return plain data; of a function only that it is one, as it cannot be compared."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, tuple):
        return list(value)
    if callable(value):
        return "a function"
    return describe(value)


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
