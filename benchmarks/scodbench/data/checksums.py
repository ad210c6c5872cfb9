"""Whether a file is the one that was expected, by sha256."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Checksums:
    """What a file's sha256 may be.

    Args:
        files: Accepted checksums of the file as it is, in hexadecimal; often only one.
        content: Accepted checksum of what a gzip file holds. The same data compressed by
            another program is another file, but the same content.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a"
        >>> _ = path.write_bytes(b"abc")
        >>> Checksums((hashlib.sha256(b"abc").hexdigest(),)).mismatch(path) is None
        True
        >>> Checksums(("0" * 64,)).mismatch(path)[:35]
        'expected sha256 0000000000000000000'
    """

    files: tuple[str, ...]
    content: str | None = None

    def mismatch(self, path: Path) -> str | None:
        """Return what is wrong with a file, or None if it is one of those accepted.

        Args:
            path: An existing file.
        """
        found = sha256_of(path)
        if found in self.files:
            return None
        message = f"expected sha256 {' or '.join(self.files)}, got {found}"
        if self.content is None:
            return message
        inside = _sha256_inside(path)
        if inside == self.content:
            return None
        return f"{message}; expected content {self.content}, got {inside or 'no gzip file'}"


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return _digest(file)


def _sha256_inside(gzip_path: Path) -> str | None:
    """Return the sha256 of what a gzip file holds; None if it cannot be decompressed."""
    try:
        with gzip.open(gzip_path, "rb") as file:
            return _digest(file)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return None


def _digest(file: IO[bytes] | gzip.GzipFile) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
