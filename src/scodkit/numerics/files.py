"""Files: only ordinary ones are read, and all are replaced whole, or left as they were."""

from __future__ import annotations

import contextlib
import errno
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
except ImportError:  # Windows, where nobody can tell whether a writer lives
    fcntl = None  # type: ignore[assignment]

_LETTERS = 16  # that tell writers of one file from each other

_FULL = "free some space, or choose another place, and try again"
_RIGHTS = "choose a place you may use"
_INSTEAD = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
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
    """Let errors of the system, around one file, come as ours.

    Args:
        path: The file.
        done: What is being done with it.

    Yields:
        Nothing.

    Raises:
        FileError: With the system's reason, and what to do about it.
    """
    try:
        os.stat(path)  # a name that no file can have is a ValueError, before anything else
    except ValueError as error:
        raise FileError(
            f"expected the name of a file, got {str(path)!r}, which cannot be one ({error}); "
            "choose another name"
        ) from error
    except OSError:
        pass  # whoever uses the file will meet it again
    try:
        yield
    except Exception as error:
        if isinstance(error, ScodError) or not (isinstance(error, OSError) or _by_rust(error)):
            raise
        number, reason = _system_error(error)
        unchanged = "nothing was changed: " if done == "written" else ""
        failure = FileError(
            f"expected a file that can be {done}, got one that could not be {done}: {reason} "
            f"({path}); {unchanged}{_INSTEAD.get(number, 'choose another place')}"
        )
        failure.errno = number
        raise failure from error


def _by_rust(error: Exception) -> bool:
    """Return whether an error is one of safetensors, which takes long to import."""
    return type(error).__name__ == "SafetensorError"


def _system_error(error: Exception) -> tuple[int, str]:
    """Return the system's number of an error, 0 if there is none, and the reason."""
    number = getattr(error, "errno", None)
    if _by_rust(error):  # which keeps the number in its text
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else None
    return (number, os.strerror(number)) if number else (0, str(error))


def kind_of(mode: int) -> str:
    """Return in words what is no ordinary file, by its mode."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def regular_file(path: str | Path, what: str = "file") -> Path:
    """Return the path of an ordinary file, links followed: others may keep a reader waiting.

    Args:
        path: Where it is.
        what: What it is expected to be, in words.

    Raises:
        MissingFileError: If there is none.
        FileError: If it is a folder, a pipe or a device, or cannot be reached.
    """
    with file_errors(path, "read"):
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFileError(
                f"expected a {what} at {path}, found no file there"
            ) from None
    if not stat.S_ISREG(mode):
        raise FileError(
            f"expected a {what} at {path}, got {kind_of(mode)}; type the name of an ordinary "
            "file"
        )
    with file_errors(path, "read"), open(path, "rb"):
        return Path(path)  # safetensors would not say why it cannot


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and give what was written its name at the end.

    Args:
        path: The file to be, with the rights of the one that was there, or of any new file;
            of a link the file it leads to. It is as it was, and nothing else is left, if
            writing fails. What killed writers of it left behind goes when it succeeds.

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
            rights = (path if path.is_file() else temporary).stat().st_mode
            yield temporary
            os.chmod(temporary, stat.S_IMODE(rights))  # and leave it to its owner alone
            flush(temporary)
            os.replace(temporary, path)
        flush(path.parent)
        remove_leftovers(path)


def target_of(path: Path) -> Path:
    """Return the file that is to be written: of a link the one it leads to.

    Args:
        path: Where to write.

    Raises:
        FileError: If it is a link that leads nowhere.
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
    """Yield a hidden folder beside a file, for one writer of it; gone at the end.

    Some libraries write to a name of their choice beside a file first.

    Args:
        path: The file.
    """
    folder, handle = _new_folder(path)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _new_folder(path: Path) -> tuple[Path, int | None]:
    while True:
        folder = path.with_name(f".{path.name}.{secrets.token_hex(_LETTERS // 2)}")
        folder.mkdir()
        try:
            return folder, _hold(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # another writer took it for a left-over before it was held


def _hold(folder: Path) -> int | None:
    """Return a handle that tells others, while it is open, that a folder is in use.

    A lock goes with its process, however that ends. None where folders cannot be locked.

    Raises:
        OSError: A ``BlockingIOError`` if another has it, a ``FileNotFoundError`` if another
            has removed it.
    """
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.lstat(folder)
    except OSError as error:
        os.close(handle)
        if isinstance(error, (BlockingIOError, FileNotFoundError)):
            raise
        return None  # as on some network file systems
    return handle


def remove_leftovers(path: Path) -> None:
    """Remove what writers of a file left behind when they were killed; not those that live.

    Args:
        path: The file.
    """
    name = re.compile(re.escape(f".{path.name}.") + f"[0-9a-f]{{{_LETTERS}}}")
    with contextlib.suppress(OSError):  # a folder that can be written to, but not listed
        for folder in path.parent.iterdir() if path.parent.is_dir() else ():
            if name.fullmatch(folder.name):
                _remove_unheld(folder)


def _remove_unheld(folder: Path) -> None:
    with contextlib.suppress(OSError):
        handle = _hold(folder)
        if handle is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def flush(path: str | Path) -> None:
    """Make sure a rename survives a power cut; some file systems cannot, and say so.

    Args:
        path: A file, or the folder it is in.
    """
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
