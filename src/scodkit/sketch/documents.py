"""Likelihoods, sketches and their states as plain data and tensors, for files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scodkit import likelihoods, sketch
from scodkit.errors import CorruptArtifactError, OptionError
from scodkit.numerics import artifact
from scodkit.sketch import Sketch, SketchState

# names in a file of the objects that are made of plain options only
_KNOWN: dict[str, type] = {
    "Gaussian": likelihoods.Gaussian,
    "HeteroscedasticGaussian": likelihoods.HeteroscedasticGaussian,
    "Bernoulli": likelihoods.Bernoulli,
    "Categorical": likelihoods.Categorical,
    "Heads": likelihoods.Heads,
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

# annotation of likelihoods by name of the head
_BY_NAME = "Mapping[str, Likelihood]"

# such an object in a header, and checks of its options by their annotation
DESCRIPTION = artifact.fields({"type": artifact.TEXT}, others=True)
_OPTIONS: dict[str, artifact.Check] = {
    "int": artifact.INTEGER,
    "int | None": artifact.maybe(artifact.INTEGER),
    "bool": artifact.FLAG,
    "str": artifact.TEXT,
    "Map": DESCRIPTION,
    "str | None": artifact.maybe(artifact.TEXT),
    "tuple[str, ...]": artifact.each(artifact.TEXT),
    _BY_NAME: artifact.table(DESCRIPTION),
    "float | tuple[float, ...]": lambda name, value: (
        artifact.each(artifact.number()) if isinstance(value, list) else artifact.number()
    )(name, value),
}

# attributes of a sketch's state that a header holds
_STATE_FIELDS: dict[str, artifact.Check] = {
    "num_parameters": artifact.whole(1),
    "columns": artifact.whole(1),
    "num_data": artifact.whole(),
    "num_rows": artifact.whole(),
    "num_updates": artifact.whole(),
    "numbers": artifact.table(artifact.number()),
}
STATE = artifact.fields(_STATE_FIELDS)
_SQUARED_NORM = artifact.tensor((), (torch.float64,), lambda one: 0 <= float(one) < torch.inf)


def describe(thing: object) -> dict[str, Any]:
    """Return a likelihood, sketch or map as plain data: its name and its options."""
    plain = {
        name: _plain(getattr(thing, name))
        for name, option in _options(thing).items()
        if not (_later(option) and getattr(thing, name) == option.default)
    }
    return {"type": _NAMES.get(type(thing), type(thing).__name__), **plain}


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
        artifact.refuse(f"a {family.__name__}", description["type"])
    options = _options(kind)
    needed, later = (
        {
            name: _OPTIONS[str(option.type)]
            for name, option in options.items()
            if _later(option) == wanted
        }
        for wanted in (False, True)
    )
    artifact.fields({"type": artifact.TEXT, **needed}, later)(
        f"the options of {description['type']}", description
    )
    given = {
        name: {n: build(each, likelihoods.Likelihood) for n, each in description[name].items()}
        if option.type == _BY_NAME
        else _rebuilt(description[name])
        for name, option in options.items()
        if name in description
    }
    try:
        return kind(**given)
    except OptionError as error:
        raise CorruptArtifactError(
            f"expected options of {description['type']} as they were saved, got others "
            f"({error}); the file was altered: save it again"
        ) from error


def pack_state(state: SketchState, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a sketch's state as header data and tensors with prefixed names."""
    header = {name: getattr(state, name) for name in _STATE_FIELDS}
    tensors = {**state.tensors, "squared_norm": state.squared_norm}
    if bool(state.outside):  # of projected weights only
        tensors["outside"] = state.outside
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
    squared_norm, outside = of_state.pop("squared_norm"), of_state.pop("outside", None)
    state = SketchState(
        sketch=sketch, tensors=of_state, squared_norm=squared_norm, weights=weights, **plain
    )
    if outside is not None:
        state.outside = outside
    if not sketch.can_have(state):
        artifact.refuse(
            f"a state of {sketch} with {state.columns} columns for {state.num_parameters} "
            "weights",
            f"{state.shapes} and {state.numbers}",
        )
    return state


def state_checks(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, artifact.Check]:
    """Return the checks of the tensors of a state that are the same for all sketches.

    Args:
        tensors: Of a file.
        prefix: Of the names of those of the state.
    """
    checks = {name: artifact.FINITE for name in tensors if name.startswith(prefix)}
    outside = [name for name in checks if name == prefix + "outside"]
    return {**checks, **dict.fromkeys([prefix + "squared_norm", *outside], _SQUARED_NORM)}


def _options(thing: object) -> dict[str, dataclasses.Field[Any]]:
    """Return the options of an object or its class, by name."""
    fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    return {option.name: option for option in fields if option.init}


def _later(option: dataclasses.Field[Any]) -> bool:
    """Return whether an option is one that files of earlier versions do not have."""
    return bool(option.metadata.get("later"))


def _plain(value: object) -> object:
    """Return a value as plain data; functions cannot be compared, and are all the same."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return {name: describe(each) for name, each in value.items()}
    if callable(value):
        return "a function"
    return describe(value)


def _rebuilt(value: object) -> object:
    """Return the option that `_plain` made plain data of; an object can only be a map."""
    if isinstance(value, dict):
        return build(value, sketch.Map)
    return tuple(value) if isinstance(value, list) else value
