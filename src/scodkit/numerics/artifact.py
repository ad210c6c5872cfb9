"""Files: safetensors with a JSON header, written atomically, never a pickle.

Any safetensors reader can open them; the header sits in the metadata under ``scodkit``. A
digest over header and tensors tells a changed file from an intact one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scodkit.errors import (
    CorruptArtifactError,
    FormatVersionError,
    MissingFileError,
    OptionError,
    ScodError,
)
from scodkit.numerics.files import (
    file_errors,
    kind_of,
    own_folder,
    regular_file,
    replacing,
    target_of,
)
from scodkit.numerics.hashing import digest_of
from scodkit.numerics.schema import (
    OBJECT,
    Check,
    whole,
)

FORMAT_VERSION = 1

_HEADER = "scodkit"


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
