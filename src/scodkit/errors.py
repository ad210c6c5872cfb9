"""Everything scodkit raises or warns with.

Each message has three parts: what was expected, what came, and what to type instead. The page
on failures has a section for each class; `more_about` returns its address.
"""

from __future__ import annotations

import functools
import importlib
import reprlib
from typing import Any

# letters of the repr of something that is shown as it is
_SHORT = 200

# import names that differ from the name of the package on PyPI
_PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn"}


class ScodError(Exception):
    """Base of every error scodkit raises on purpose.

    From Python 3.11 on a traceback ends with the address of the section on it, as a note, which
    is no part of ``str(error)``.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if hasattr(self, "add_note"):
            self.add_note(f"more: {more_about(type(self))}")


class BatchError(ScodError, ValueError):
    """A batch, or what the model made of it, does not have the form that was expected."""


class ModelCallError(BatchError):
    """The model fails on a batch; its own error is the cause."""


class EmptyLoaderError(BatchError):
    """The loader yields no batch."""


class ParameterSelectionError(ScodError, ValueError):
    """A choice of parameters matches nothing, or something that cannot be differentiated."""


class OptionError(ScodError, ValueError):
    """An option of a likelihood, a sketch or the monitor is out of its range."""


class UnsupportedLikelihoodError(OptionError):
    """A method is not defined for this likelihood."""


class NotFittedError(ScodError, RuntimeError):
    """The monitor was asked for something that needs an earlier step."""


class NondeterministicError(ScodError, RuntimeError):
    """The model or the data gave different results when read twice."""


class NonFiniteError(ScodError, ValueError):
    """A training sample gave a NaN or an infinity."""


class InsufficientMemoryError(ScodError, MemoryError):
    """The sketch would not fit into memory; raised before anything is allocated."""


class UncertifiedError(ScodError, RuntimeError):
    """A certificate was asked of a sketch that cannot give one."""


class MergeError(ScodError, ValueError):
    """Two sketches do not describe the same thing and cannot be added."""


class ArtifactError(ScodError, ValueError):
    """A saved file cannot be used; the subclasses say why."""


class MissingFileError(ScodError, FileNotFoundError):
    """There is no such file, or no such folder for one."""

    path: str | None = None  # of the file that is not there


class FileError(ScodError, OSError):
    """A file cannot be read or written: no room, no rights, no such name, no ordinary file."""


class CorruptArtifactError(ArtifactError):
    """The file is cut off, altered, or not ours."""


class FormatVersionError(ArtifactError):
    """The file was written in a format this version does not read."""


class MismatchError(ArtifactError):
    """The file belongs to other weights or to another configuration."""


class StaleMonitorError(MismatchError, RuntimeError):
    """The model has changed since the monitor was fitted on it."""


class ProcessError(ScodError, RuntimeError):
    """Another process of a fit failed, so that the sum over all processes is unavailable."""


class MissingPeerError(ScodError, ImportError):
    """A library that this feature needs is not installed."""


class CalibrationError(ScodError, ValueError):
    """The held-out scores cannot support what was asked of them."""


class EngineFallbackWarning(UserWarning):
    """The fast engine cannot be trusted with this model; a slower one took over."""


class CaptureError(ScodError):
    """The scored forward pass cannot be recorded."""


class CaptureWarning(UserWarning):
    """Recording the scored forward pass does not pay."""


class NoProbesWarning(UserWarning):
    """A file has no probes, which tell another architecture with the same weights."""


class CalibrationWarning(UserWarning):
    """The held-out data was fitted, or cannot support what is asked of it."""


class SuspiciousInputWarning(UserWarning):
    """Inputs look unlike the data of the fit in a way that their scores may not show."""


class LikelihoodWarning(UserWarning):
    """The model's outputs do not look like what the likelihood takes."""


class RepeatedDataWarning(UserWarning):
    """A few samples to be added to a fit are like some it has seen."""


def more_about(kind: type[BaseException]) -> str | None:
    """Return the address of the section on a class of errors or warnings.

    Args:
        kind: Of this module, or derived from one that is; for others there is no section.

    Examples:
        >>> str(more_about(EmptyLoaderError)).partition("#")[2]
        'emptyloadererror'
    """
    ours = [base.__name__ for base in kind.__mro__ if base.__module__ == __name__]
    return f"{_page()}#{ours[0].lower()}" if ours else None


@functools.cache
def _page() -> str:
    """Return the address of the page on failures: on the site, if the package names one."""
    from importlib import metadata

    try:
        entries = metadata.metadata("scodkit").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:  # run from a copy that was never installed
        entries = []
    sites = dict(entry.split(", ", 1) for entry in entries)
    if "Documentation" not in sites:
        return "docs/guides/failures.md"
    return f"{sites['Documentation'].rstrip('/')}/guides/failures.html"


def optional(module: str, extra: str, then: str = "") -> Any:
    """Import a module that only an extra of scodkit installs, when a feature needs it.

    Args:
        module: Its full name, such as ``"scipy.special"``.
        extra: The extra of scodkit that installs it.
        then: What to type after that, where the extra is not enough.

    Returns:
        The module.

    Raises:
        MissingPeerError: If it is not installed, with what to type.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingPeerError(
            f"expected {_PACKAGES.get(library, library)}, which this needs, found none "
            f'that can be imported ({error}); type: pip install "scodkit[{extra}]", '
            f'or in a clone: pip install ".[{extra}]"{then and f"; then: {then}"}'
        ) from error


def described(value: object) -> str:
    """Return a value in a few words: its repr where that is short, of arrays the shape.

    Args:
        value: What came in place of something else.

    Examples:
        >>> described([0.5] * 100), described(None)
        ('[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...]', 'None')
    """
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, type):
        return f"{type(value).__name__} of shape {tuple(shape)}"
    short = reprlib.repr(value) if isinstance(value, (list, tuple, dict, set)) else repr(value)
    return short if len(short) <= _SHORT and "\n" not in short else f"a {type(value).__name__}"


def first_line(error: BaseException) -> str:
    """Return an error of another library as its type and the first line of its message."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"
