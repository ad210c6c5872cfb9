"""What a computation takes at its peak."""

from __future__ import annotations

import gc
from collections.abc import Callable

from scodkit.factors.live_bytes import LiveBytes


def peak_of(run: Callable[[], object]) -> int:
    gc.collect()
    live = LiveBytes()
    with live:
        run()
    return live.most
