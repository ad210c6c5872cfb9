"""Activation checkpointing, which a model may have for training: passed over while we look.

Checkpointed blocks recompute their activations on the way back. Recomputed layers are not
those that were watched on the way forth, and the reentrant kind gives their weights no gradient
at all where the input needs none. So they are run as they are, without recomputing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

_lock = threading.Lock()
_here = threading.local()  # whether this thread is looking
_looking = 0  # how many threads are

_apply = checkpoint.CheckpointFunction.apply
_around = checkpoint._checkpoint_without_reentrant_generator


@contextlib.contextmanager
def not_recomputing() -> Iterator[None]:
    """Let this thread run checkpointed blocks as they are; other threads are not concerned.

    Yields:
        Nothing.
    """
    outer = getattr(_here, "looking", False)
    _here.looking = True
    _exchange(1)
    try:
        yield
    finally:
        _exchange(-1)
        _here.looking = outer


def _exchange(change: int) -> None:
    """Put our own functions into torch's module for the first thread; take them out again."""
    global _looking
    with _lock:
        _looking += change
        own = _looking > 0
        block: Any = checkpoint.CheckpointFunction
        block.apply = staticmethod(_plain_apply) if own else _apply
        checkpoint._checkpoint_without_reentrant_generator = _plain_around if own else _around


def _plain_apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    if getattr(_here, "looking", False):
        return function(*args)
    return _apply(function, preserve, *args)  # type: ignore[no-untyped-call]


def _plain_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    if getattr(_here, "looking", False):
        yield
    else:
        yield from _around(*args, **kwargs)
