"""Files: safetensors with a JSON header, written atomically, never a pickle.

Any safetensors reader can open them; the header sits in the metadata under ``scodkit``. A
digest over header and tensors tells a changed file from an intact one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scodkit import likelihoods, sketch
from scodkit.errors import (
    CorruptArtifactError,
    FormatVersionError,
    MissingFileError,
    OptionError,
    ScodError,
)
from scodkit.parameters import digest_of
from scodkit.replacing import (
    file_errors,
    kind_of,
    own_folder,
    regular_file,
    replacing,
    target_of,
)
from scodkit.schema import (
    FINITE,
    FLAG,
    INTEGER,
    OBJECT,
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

FORMAT_VERSION = 1

_HEADER = "scodkit"

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


def write(
    path: str | Path, kind: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file so that at every moment the path holds the old one or the new one, whole.

    Args:
        path: Where to.
        kind: What it is, checked by `read`.
        header: Anything JSON can hold.
        tensors: By name, on any device.
    """
    path = Path(path)
    check_place(path)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    full = {"format": FORMAT_VERSION, "kind": kind, **header}
    full["digest"] = _digest(full, held)
    with replacing(path) as temporary:
        save_file(held, temporary, metadata={_HEADER: json.dumps(full)})


def check_place(path: Path) -> None:
    """Make sure a file can be put somewhere, before work is done for it.

    Args:
        path: Where it is to be.

    Raises:
        MissingFileError: If its folder does not exist.
        OptionError: If something is there that is not a file.
        FileError: If the place, or the name, does not allow it.
    """
    with file_errors(path, "written"):
        if not path.parent.is_dir():
            raise MissingFileError(
                f"expected an existing folder for {path.name}, got {path.parent}; "
                f"type: mkdir -p {path.parent}"
            )
        if path.exists() and not path.is_file():
            what = kind_of(path.stat().st_mode)
            raise OptionError(f"expected the name of a file to write, got {what}, {path}")
        with own_folder(target_of(path)):
            pass  # what the place does not allow shows now


def header_of(path: Path) -> dict[str, Any] | None:
    """Return what a file says of itself, unchecked; None if there is none of ours."""
    try:
        with safe_open(str(regular_file(path)), framework="pt") as file:
            return _parse(path, (file.metadata() or {}).get(_HEADER))
    except (SafetensorError, OSError, CorruptArtifactError):
        return None


def is_ours(path: Path, kind: str | None = None) -> bool:
    """Return whether there is a file of ours already, of one kind or of whatever kind."""
    header = header_of(path)
    return header is not None and kind in (None, header.get("kind"))


def read(
    path: str | Path, kind: str, schema: Check = OBJECT
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file written by `write`, and check that it is whole and ours.

    Args:
        path: Where from.
        kind: What it must be.
        schema: What its header must look like.

    Returns:
        The header and the tensors, on the CPU.

    Raises:
        MissingFileError: If there is no such file.
        CorruptArtifactError: If it is cut off, altered, or not one of ours.
        FormatVersionError: If it was written in another format.
    """
    path = regular_file(path, f"saved {kind}")
    with file_errors(path, "read"):
        try:
            header, tensors = _contents(path)
            claimed = header.pop("digest", None)
            intact = claimed == _digest(header, tensors)
        except Exception as error:  # whatever is raised on bytes that nobody expected
            if isinstance(error, (ScodError, OSError, MemoryError)):
                raise
            raise CorruptArtifactError(
                f"expected a whole file at {path}, but it cannot be read ({error}); it is cut "
                "off or not a scodkit file: save it again"
            ) from error
    if not intact:
        raise CorruptArtifactError(
            f"expected {path} as it was written, but its contents do not match their digest; "
            "if it was being replaced, load it again; else it is damaged: save it again"
        )
    if header.get("kind") != kind:
        raise CorruptArtifactError(
            f"expected a saved {kind} at {path}, got a saved {header.get('kind')}"
        )
    schema(str(path), header)
    return header, tensors


def _contents(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    # safetensors opens a file by its name, header and tensors apart: one that is replaced in
    # between would be read half and half, but for a name of the open file itself
    with path.open("rb") as held, safe_open(_name_of(held, path), framework="pt") as file:
        header = _parse(path, (file.metadata() or {}).get(_HEADER))
        _check_version(path, header)
        # copies: a view of the file changes with it, and where it begins in memory decides
        # which kernels add to it, hence the last bits of a fit that goes on from it
        return header, {n: file.get_tensor(n).clone() for n in file.keys()}  # noqa: SIM118


def _name_of(held: BinaryIO, path: Path) -> str:
    """Return a name of an open file that stays its own, where the system has one."""
    own = Path(f"/proc/self/fd/{held.fileno()}")
    return str(own if own.exists() else path)


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


def _parse(path: str | Path, text: str | None) -> dict[str, Any]:
    try:
        header = json.loads(text or "")
    except (ValueError, RecursionError):  # such as a number too long, lists too deep
        header = None
    if not isinstance(header, dict):
        raise CorruptArtifactError(
            f"expected a scodkit header in {path}, found none; was it written by monitor.save?"
        )
    return header


def _check_version(path: str | Path, header: Mapping[str, Any]) -> None:
    whole(1)(f"the format of {path}", header.get("format"))
    if header["format"] != FORMAT_VERSION:
        raise FormatVersionError(
            f"expected format {FORMAT_VERSION}, got {header.get('format')} in {path} (written "
            f"by scodkit {header.get('scodkit_version', 'unknown')}); fit and save it again "
            "with this version, or install that one"
        )


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    return digest_of(tensors, salt=json.dumps(header, sort_keys=True))


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
