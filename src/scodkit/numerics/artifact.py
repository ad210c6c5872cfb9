"""Files: safetensors with a JSON header, written atomically, never a pickle.

Any safetensors reader can open them; the header is in the metadata under ``scodkit``. A digest
over header and tensors detects a modified file, but does not authenticate its author. So all
contents are validated by type and range against a schema before they are used; each entry of a
schema is a `Check`.
"""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scodkit import errors
from scodkit.errors import CorruptArtifactError
from scodkit.numerics import files
from scodkit.numerics.hashing import digest_of

FORMAT_VERSION = 1

_HEADER = "scodkit"

# takes the name of a value, for messages, and the value; raises CorruptArtifactError
Check = Callable[[str, Any], None]

# --- reading and writing ---


def write(
    path: str | Path, kind: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file atomically: at any time the path has the complete old or new file.

    Args:
        path: The file.
        kind: Type of the contents, checked by `read`.
        header: Anything that JSON can represent.
        tensors: By name, on any device.
    """
    path = Path(path)
    check_place(path)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    full = {"format": FORMAT_VERSION, "kind": kind, **header}
    full["digest"] = _digest(full, on_cpu)
    with files.replacing(path) as temporary:
        save_file(on_cpu, temporary, metadata={_HEADER: json.dumps(full)})


def check_place(path: Path) -> None:
    """Make sure that a file can be written, before work is done for it.

    Args:
        path: The file to write.

    Raises:
        MissingFileError: If its folder does not exist.
        OptionError: If the path exists and is not a file.
        FileError: If the folder is not writable, or the name is not valid.
    """
    with files.file_errors(path, "written"):
        if not path.parent.is_dir():
            raise errors.MissingFileError(
                f"expected an existing folder for {path.name}, got {path.parent}; "
                f"type: mkdir -p {path.parent}"
            )
        if path.exists() and not path.is_file():
            what = files.kind_of(path.stat().st_mode)
            raise errors.OptionError(
                f"expected the name of a file to write, got {what}, {path}"
            )
        with files.own_folder(files.target_of(path)):
            pass  # a folder that is not writable raises here


def read(
    path: str | Path, kind: str, schema: Check | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file written by `write`, and check that it is complete and one of ours.

    Args:
        path: The file.
        kind: Expected type of the contents.
        schema: Check of the header.

    Returns:
        The header and the tensors, on the CPU.

    Raises:
        MissingFileError: If there is no such file.
        CorruptArtifactError: If it is truncated, altered, or not one of ours.
        FormatVersionError: If it was written in another format.
    """
    path = files.regular_file(path, f"saved {kind}")
    with files.file_errors(path, "read"):
        try:
            header, tensors = _contents(path)
            claimed = header.pop("digest", None)
            intact = claimed == _digest(header, tensors)
        except Exception as error:  # safetensors and torch raise anything on unexpected bytes
            if isinstance(error, (errors.ScodError, OSError, MemoryError)):
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
    if schema is not None:
        schema(str(path), header)
    return header, tensors


def header_of(path: Path) -> dict[str, Any]:
    """Return the header of a file, unchecked; empty if it is not one of ours."""
    try:
        with safe_open(str(files.regular_file(path)), framework="pt") as file:
            return _parse(path, (file.metadata() or {}).get(_HEADER))
    except (SafetensorError, OSError, CorruptArtifactError):
        return {}


def _contents(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    # safetensors opens a file by its name, for the header and again for the tensors: if it
    # were replaced in between, header and tensors would come from different files
    with path.open("rb") as opened, safe_open(_name_of(opened, path), framework="pt") as file:
        header = _parse(path, (file.metadata() or {}).get(_HEADER))
        whole(1)(f"the format of {path}", header.get("format"))
        if header["format"] != FORMAT_VERSION:
            raise errors.FormatVersionError(
                f"expected format {FORMAT_VERSION}, got {header['format']} in {path} (written "
                f"by scodkit {header.get('scodkit_version', 'unknown')}); fit and save it "
                "again with this version, or install that one"
            )
        # copies: a view of the file changes with it, and its memory alignment decides which
        # kernels add to it, hence the last bits of a fit that is resumed from it
        return header, {n: file.get_tensor(n).clone() for n in file.keys()}  # noqa: SIM118


def _name_of(opened: BinaryIO, path: Path) -> str:
    """Return a name of an open file that stays valid when its path is replaced (Linux)."""
    descriptor = Path(f"/proc/self/fd/{opened.fileno()}")
    return str(descriptor if descriptor.exists() else path)


def _parse(path: Path, text: str | None) -> dict[str, Any]:
    try:
        header = json.loads(text or "")
    except (ValueError, RecursionError):  # also for too many digits, or lists nested too deep
        header = None
    if not isinstance(header, dict):
        raise CorruptArtifactError(
            f"expected a scodkit header in {path}, found none; was it written by monitor.save?"
        )
    return header


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    return digest_of(tensors, salt=json.dumps(header, sort_keys=True))


# --- checks of plain values ---


def refuse(expected: str, got: str) -> NoReturn:
    """Refuse a file.

    Args:
        expected: Description of the expected contents.
        got: Description of the actual contents.

    Raises:
        CorruptArtifactError: Always.
    """
    raise CorruptArtifactError(
        f"expected {expected}, got {got}; the file was altered, or written by something else: "
        "save it again"
    )


def that(words: str, holds: Callable[[Any], bool]) -> Check:
    """Return a check of a condition.

    Args:
        words: Description of the condition.
        holds: Whether a value meets it; must not raise for any value.

    Examples:
        >>> that("text", lambda value: type(value) is str)("the name", "Ada")
    """

    def check(name: str, value: Any) -> None:
        if not holds(value):
            refuse(f"{words} as {name}", _short(value))

    return check


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return reprlib.repr(value)


def whole(least: int = 0, most: int = 2**63 - 1) -> Check:
    """Return a check for integers in a range; ``true`` and ``1.0`` are not integers."""
    words = f"a whole number >= {least}" + ("" if most > 2**32 else f" and <= {most}")
    return that(words, lambda value: type(value) is int and least <= value <= most)


def number(
    words: str = "a finite number >= 0",
    holds: Callable[[float], bool] = lambda value: value >= 0,
) -> Check:
    """Return a check for finite numbers.

    Args:
        words: Description of the allowed numbers.
        holds: Whether a finite number is allowed.
    """
    return that(words, lambda value: _is_number(value) and holds(value))


def _is_number(value: Any) -> bool:
    # a comparison: `math.isfinite` raises on integers beyond the range of floats
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


TEXT = that("text", lambda value: type(value) is str)
FLAG = that("true or false", lambda value: type(value) is bool)
OBJECT = that("an object", lambda value: type(value) is dict)
LIST = that("a list", lambda value: type(value) is list)
INTEGER = that("a whole number", lambda value: type(value) is int)
SHARE = number("a number between 0 and 1", lambda value: 0 < value < 1)


def all_of(*checks: Check) -> Check:
    """Return a check that runs several checks in order."""

    def check_all(name: str, value: Any) -> None:
        for check in checks:
            check(name, value)

    return check_all


def maybe(check: Check) -> Check:
    """Return a check that also allows null."""
    return lambda name, value: None if value is None else check(name, value)


def each(check: Check) -> Check:
    """Return a check of every entry of a list."""

    def check_all(name: str, value: Any) -> None:
        LIST(name, value)
        for place, entry in enumerate(value):
            check(f"{name}[{place}]", entry)

    return check_all


def table(check: Check) -> Check:
    """Return a check of every value of an object, whatever its key."""

    def check_all(name: str, value: Any) -> None:
        OBJECT(name, value)
        for key, entry in value.items():
            check(f"{name}.{key[:40]}", entry)

    return check_all


def fields(
    needed: Mapping[str, Check], allowed: Mapping[str, Check] = {}, *, others: bool = False
) -> Check:
    """Return a check of the values of an object, by their keys.

    Args:
        needed: Required keys.
        allowed: Optional keys.
        others: Whether further keys are allowed; they are ignored.
    """
    known = {**needed, **allowed}

    def check(name: str, value: Any) -> None:
        OBJECT(name, value)
        for key in needed:
            if key not in value:
                refuse(f"{key} in {name}", "none")
        for key, entry in value.items():
            if key in known:
                known[key](f"{key} of {name}", entry)
            elif not others:
                refuse(f"no more than {', '.join(known)} in {name}", _short(key))

    return check


def _is_range(ends: Any) -> bool:
    numbers = type(ends) is list and len(ends) == 2 and all(map(_is_number, ends))
    return numbers and ends[0] <= ends[1]


# smallest and largest value of each input, by its name
RANGES = table(that("a smallest value and a largest, both finite,", _is_range))

# --- checks of tensors ---

WIDE = (torch.float64, torch.float32)
_FLOATING = (*WIDE, torch.bfloat16, torch.float16)


def finite(numbers: Tensor) -> bool:
    """Return whether there is neither a NaN nor an infinity."""
    # aminmax propagates NaN; 20 times as fast as an element-wise isfinite
    return not numbers.numel() or all(math.isfinite(end) for end in numbers.aminmax())


def falling(numbers: Tensor) -> bool:
    """Return whether numbers are finite, >= 0 and in descending order."""
    return finite(numbers) and bool((numbers >= 0).all() and (numbers.diff() <= 0).all())


def tensor(
    shape: Sequence[int | None],
    dtypes: Collection[torch.dtype] = _FLOATING,
    holds: Callable[[Tensor], bool] = finite,
    words: str = "finite numbers",
) -> Check:
    """Return a check of a tensor.

    Args:
        shape: None for an axis of any length.
        dtypes: Allowed dtypes; floating-point ones by default.
        holds: Whether its values are allowed; finite ones by default.
        words: Description of the allowed values.
    """
    sizes = ", ".join("any" if size is None else str(size) for size in shape)

    def is_allowed(value: Tensor) -> bool:
        return (
            value.dtype in dtypes
            and len(value.shape) == len(shape)
            and all(s in (None, n) for s, n in zip(shape, value.shape, strict=True))
            and holds(value)
        )

    listed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return that(f"a tensor ({sizes}) of {words} in {listed}", is_allowed)


SCORES = tensor(
    (None,),
    (torch.float64,),
    lambda scores: scores.numel() > 0 and finite(scores),
    "finite scores",
)
DIGESTS = tensor((None,), (torch.int64,))  # of samples, eight bytes each
ANY_TENSOR = that("a tensor", lambda value: True)  # a file has nothing else
NUMBERS = that(
    "a tensor without NaN or infinity",
    lambda value: not value.is_complex() and finite(value),
)
FINITE = that(
    "a tensor of finite numbers in float32 or float64",
    lambda value: value.dtype in WIDE and finite(value),
)
