"""Files: only regular ones are read; all are replaced atomically, or left unchanged."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from scodkit.errors import FileError, MissingFileError, ScodError

try:
    import fcntl
except ImportError:  # Windows, where leftovers cannot be told from folders in use
    fcntl = None  # type: ignore[assignment]

_LETTERS = 16  # random hexadecimal digits in the name of a writer's folder

# advice to the user, by errno
_INSTEAD = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "free some space, or choose another place, and try again",
    ),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a place you may use"),
    errno.ENAMETOOLONG: "choose a shorter name",
}

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextlib.contextmanager
def file_errors(
    path: str | Path, done: Literal["read", "written", "removed"]
) -> Iterator[None]:
    """Turn errors of the operating system on a file into a `FileError`.

    Args:
        path: The file.
        done: What the body does with it.

    Yields:
        Nothing.

    Raises:
        FileError: With the system's reason, and advice.
    """
    try:
        os.stat(path)  # raises ValueError for a name that no file can have
    except ValueError as error:
        raise FileError(
            f"expected the name of a file, got {str(path)!r}, which cannot be one ({error}); "
            "choose another name"
        ) from error
    except OSError:
        pass  # the body raises it again
    try:
        yield
    except Exception as error:
        by_rust = type(error).__name__ == "SafetensorError"  # by name: its import is slow
        if isinstance(error, ScodError) or not (by_rust or isinstance(error, OSError)):
            raise
        in_text = re.search(r"(?:\(os error |Os { code: )(\d+)", str(error))  # of safetensors
        number = int(in_text[1]) if in_text else getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number else str(error)
        unchanged = "nothing was changed: " if done == "written" else ""
        failure = FileError(
            f"expected a file that can be {done}, got one that could not be {done}: {reason} "
            f"({path}); {unchanged}{_INSTEAD.get(number, 'choose another place')}"
        )
        failure.errno = number
        raise failure from error


def kind_of(mode: int) -> str:
    """Return a description of the type of file with this mode."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def regular_file(path: str | Path, what: str = "file") -> Path:
    """Return the path of a regular file, following links; reading a pipe could block.

    Args:
        path: The file.
        what: Description of the expected file, for messages.

    Raises:
        MissingFileError: If there is none.
        FileError: If it is a folder, a pipe or a device, or cannot be reached.
    """
    with file_errors(path, "read"):
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            missing = MissingFileError(f"expected a {what} at {path}, found no file there")
            missing.path = str(path)
            raise missing from None
        if not stat.S_ISREG(mode):
            raise FileError(
                f"expected a {what} at {path}, got {kind_of(mode)}; type the name of an "
                "ordinary file"
            )
        with open(path, "rb"):  # safetensors would not report why it cannot be read
            return Path(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces a file at the end.

    The new file has the permissions of the old one, or the default ones. If writing fails, the
    old file is unchanged and nothing else is left behind; if it succeeds, leftovers of killed
    writers of this file are removed, too.

    Args:
        path: The file to replace; for a link, its target.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "note.txt"
        ...     with replacing(path) as temporary:
        ...         _ = temporary.write_text("whole")
        ...     path.read_text()
        'whole'
    """
    with file_errors(path, "written"):
        path = target_of(path)
        with own_folder(path) as folder:
            temporary = folder / path.name
            temporary.touch()
            mode = (path if path.is_file() else temporary).stat().st_mode
            yield temporary
            os.chmod(temporary, stat.S_IMODE(mode))  # safetensors creates private files
            _flush(temporary)
            os.replace(temporary, path)
        _flush(path.parent)
        remove_leftovers(path)


def target_of(path: Path) -> Path:
    """Return the file to write: for a link, its target.

    Args:
        path: The file, or a link to it.

    Raises:
        FileError: If it is a dangling link.
    """
    if not path.is_symlink():
        return path
    try:
        return Path(os.path.realpath(path, strict=True))
    except OSError as error:
        raise FileError(
            f"expected a file, or a link to one, at {path}, got a link that leads nowhere "
            f"({error.strerror}); delete it, or type the name of the file itself"
        ) from error


@contextlib.contextmanager
def own_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden folder beside a file, for one writer of it; removed at the end.

    A folder, because some libraries write to a temporary name of their own beside a file.

    Args:
        path: The file.
    """
    while True:
        folder = path.with_name(f".{path.name}.{secrets.token_hex(_LETTERS // 2)}")
        folder.mkdir()
        # another writer may mistake it for a leftover before it is locked
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = _locked(folder)
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder exclusively, to mark it as in use for other writers.

    The lock is released when the process ends, in whatever way.

    Returns:
        A file descriptor, locked while it is open; None if folders cannot be locked.

    Raises:
        OSError: A ``BlockingIOError`` if another process has locked it, a
            ``FileNotFoundError`` if another has removed it.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.lstat(folder)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, (BlockingIOError, FileNotFoundError)):
            raise
        return None  # as on some network file systems
    return descriptor


def remove_leftovers(path: Path) -> None:
    """Remove the folders of killed writers of a file, but not those in use.

    Args:
        path: The file.
    """
    names = f".{glob.escape(path.name)}." + "[0-9a-f]" * _LETTERS
    with contextlib.suppress(OSError):  # no folder, or one that cannot be listed
        for folder in list(path.parent.glob(names)):
            with contextlib.suppress(OSError):  # in use, or not a folder
                lock = _locked(folder)
                if lock is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)


def _flush(path: str | Path) -> None:
    """Flush to disk, so that a rename survives a power cut; errors are ignored.

    Some file systems do not support it, and report an error.

    Args:
        path: A file, or the folder it is in.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
