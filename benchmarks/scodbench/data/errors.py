"""What goes wrong with data: it is missing, cannot be fetched, or is not what it should be."""

from __future__ import annotations

from scodkit.errors import ScodError


class DataError(ScodError):
    """Base of every error about a data set."""


class MissingDataError(DataError, FileNotFoundError):
    """Files of a data set are not where they were looked for."""


class NotFetchableError(DataError, RuntimeError):
    """A data set has no public place it could be fetched from."""


class DownloadError(DataError, OSError):
    """A file could not be fetched or written."""


class ChecksumError(DataError, ValueError):
    """A file was fetched whole, but is not the file that was expected."""


class FormatError(DataError, ValueError):
    """A file is cut off, or not in the format its name says."""
