"""Fetching one file: continued where it was cut off, and there only when it is right.

What has come waits beside the file in ``NAME.part``; ``NAME.part.json`` notes which version of
it the server was sending. The next try, in this process or a later one, asks for the rest of
that same version. A server that cannot do so, or has another version by now, sends all of it
and the part is begun anew.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from tqdm.auto import tqdm

from scodbench.data.checksums import Checksums
from scodbench.data.errors import ChecksumError, DownloadError
from scodkit.errors import OptionError
from scodkit.replacing import flush
from scodkit.version import __version__

_CHUNK = 1 << 18
# answers that may be another one in a moment
_PASSING = (408, 429, 500, 502, 503, 504)


class _CutError(Exception):
    """The connection broke, or the answer cannot be used; another try may help."""


@dataclass(frozen=True)
class _Version:
    """Which version of a file a server was sending.

    Args:
        url: Where from.
        validator: The server's name for the version; empty if it gave none.
        total: Bytes of the whole file; None if the server did not say.
    """

    url: str
    validator: str
    total: int | None


class _Part:
    """What has come of a file so far, on disk."""

    def __init__(self, url: str, path: Path) -> None:
        self.url = url
        self.path = path.with_name(path.name + ".part")
        self._notes = path.with_name(path.name + ".part.json")

    def length(self) -> int:
        """Return how many bytes there are."""
        return self.path.stat().st_size if self.path.exists() else 0

    def version(self) -> _Version | None:
        """Return the version they belong to; None where they are of no use."""
        try:
            version = _Version(**json.loads(self._notes.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return version if version.url == self.url and version.validator else None

    def is_whole(self) -> bool:
        """Return whether nothing is missing."""
        version = self.version()
        return version is not None and version.total == self.length()

    def begin(self, version: _Version) -> None:
        """Start anew with a version. Emptied first: old bytes never meet new notes."""
        self.path.write_bytes(b"")
        self._notes.write_text(json.dumps(vars(version)))

    def remove(self) -> None:
        """Leave nothing."""
        self._notes.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def keep_as(self, path: Path) -> None:
        """Give the file its name."""
        flush(self.path)
        os.replace(self.path, path)
        self._notes.unlink(missing_ok=True)
        flush(path.parent)


def fetch(
    url: str,
    path: str | Path,
    checksums: Checksums,
    *,
    progress: bool = True,
    timeout: float = 30.0,
    retries: int = 4,
    wait: float = 1.0,
) -> Path:
    """Fetch a file, unless it is there already.

    Args:
        url: Where from, http or https.
        path: Where to; its folder is made.
        checksums: What the file must be. Until it is known to be that, nothing has its name.
        progress: Whether to show a bar.
        timeout: Seconds without a byte after which the connection counts as cut.
        retries: How many more tries a cut is worth; one that brings something is worth as
            many again.
        wait: Seconds before the first of them; doubled each time.

    Returns:
        The path.

    Raises:
        OptionError: If the URL is of another kind.
        DownloadError: If it cannot be fetched or written; the same call continues it later.
        ChecksumError: If another file came; it is removed.

    Examples:
        >>> fetch("ftp://example.org/a", "a", Checksums(("0" * 64,)))
        Traceback (most recent call last):
        ...
        scodkit.errors.OptionError: expected a URL with http or https, got ftp://example.org/a
    """
    path = Path(path)
    if urlsplit(url).scheme not in ("http", "https"):
        raise OptionError(f"expected a URL with http or https, got {url}")
    if path.is_file() and checksums.mismatch(path) is None:
        return path
    part = _Part(url, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tqdm(desc=path.name, unit="B", unit_scale=True, disable=not progress) as bar:
            _complete(part, bar, timeout, retries, wait)
        wrong = checksums.mismatch(part.path)
        if wrong is None:
            part.keep_as(path)
            return path
        part.remove()
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(
            f"expected to write {path}, got: {error}; make room or choose another folder, and "
            "run the same command again: what has come is kept"
        ) from error
    raise ChecksumError(
        f"{path.name} from {url}: {wrong}; it was removed. Run the same command again; if it "
        "fails again the file on the server has changed"
    )


def _complete(part: _Part, bar: tqdm[None], timeout: float, retries: int, wait: float) -> None:
    """Fetch until nothing is missing, waiting longer after each try that brings nothing.

    Raises:
        DownloadError: If too many bring nothing.
    """
    furthest, failures = part.length() if part.version() else 0, 0
    while not part.is_whole():
        try:
            _continue(part, bar, timeout)
            return
        except _CutError as cut:
            if part.length() > furthest:
                furthest, failures = part.length(), 0
            failures += 1
            if failures > retries:
                raise DownloadError(
                    f"expected all of {part.url}, got {part.length()} bytes and no more in "
                    f"{retries} retries ({cut}); run the same command again to continue"
                ) from cut
            time.sleep(wait * 2 ** (failures - 1))


def _continue(part: _Part, bar: tqdm[None], timeout: float) -> None:
    """Ask once for what is missing, and write what comes.

    Raises:
        _CutError: If it is not all.
    """
    version, held = part.version(), part.length()
    headers = {"User-Agent": f"scodkit/{__version__}", "Accept-Encoding": "identity"}
    if version and held:
        headers |= {"Range": f"bytes={held}-", "If-Range": version.validator}
    with _open(part, headers, timeout) as response:
        if response.status == 206:
            if version is None or not _is_the_rest(response, held, version):
                part.remove()
                raise _CutError("the server sent another piece than the one asked for")
        else:
            version, held = _version_of(part.url, response), 0
            part.begin(version)
        bar.total, bar.n = version.total, held
        bar.refresh()
        with part.path.open("ab") as file:
            for chunk in _chunks(response):
                file.write(chunk)
                bar.update(len(chunk))
    if version.total is not None and part.length() < version.total:
        raise _CutError(f"the connection ended at {part.length()} of {version.total} bytes")


def _open(part: _Part, headers: dict[str, str], timeout: float) -> HTTPResponse:
    """Send a request; redirections are followed within http and https.

    Returns:
        The answer.

    Raises:
        _CutError: If there is none, or one that may change.
        DownloadError: If the server says that it will not send the file.
    """
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    try:
        request = urllib.request.Request(part.url, headers=headers)
        return cast(HTTPResponse, opener.open(request, None, timeout))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # nothing there to continue with
            part.remove()
        if error.code in (416, *_PASSING):
            raise _CutError(f"the server answered {error.code} {error.reason}") from error
        raise DownloadError(
            f"expected {part.url} to be there, got the answer {error.code} {error.reason}; "
            "look whether the page it is linked from has moved"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise _CutError(str(error) or type(error).__name__) from error


def _chunks(response: HTTPResponse) -> Iterator[bytes]:
    """Yield what comes, its errors told from those of the disk.

    Raises:
        _CutError: If the connection breaks.
    """
    while True:
        try:
            chunk = response.read1(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _CutError(str(error) or type(error).__name__) from error
        if not chunk:
            return
        yield chunk


def _version_of(url: str, response: HTTPResponse) -> _Version:
    length = response.headers.get("Content-Length", "")
    return _Version(url, _validator(response), int(length) if length.isdigit() else None)


def _validator(response: HTTPResponse) -> str:
    """Return the server's name for a version: a strong ETag, or else the date of change."""
    tag = response.headers.get("ETag", "")
    if tag and not tag.startswith("W/"):
        return str(tag)
    return str(response.headers.get("Last-Modified", ""))


def _is_the_rest(response: HTTPResponse, held: int, version: _Version) -> bool:
    """Return whether an answer continues what is held: same place, same version."""
    place = response.headers.get("Content-Range", "").removeprefix("bytes ")
    span, _, total = place.partition("/")
    return (
        span.partition("-")[0] == str(held)
        and total == str(version.total)
        and _validator(response) in ("", version.validator)
    )
