"""Models whose weights FSDP2 divides among processes, made whole for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import distributed, nn

from scodkit.errors import OptionError

_THEIRS = "torch.distributed.fsdp."


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[nn.Module]:
    """Gather all weights of a model that `torch.distributed.fsdp.fully_shard` has divided.

    Inside this context every process has the whole model, and works on it without the others:
    it may fit with batches of its own, score, save and load. Enter and leave it in all
    processes at once. There must be room for all weights in each.

    Args:
        model: The model, sharded by ``fully_shard``: the whole, or some of its modules.

    Yields:
        The same model, with whole weights. It is to be read only: its weights are divided
        again afterwards, and changes of them are lost.

    Raises:
        OptionError: If nothing of it is sharded by ``fully_shard``.
    """
    parts: list[Any] = []
    if distributed.is_available():
        from torch.distributed.fsdp import FSDPModule  # takes long

        parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        raise OptionError(
            f"expected a model sharded by fully_shard, got {type(model).__name__} without such "
            "modules; leave out unsharded(...)"
        )
    taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
    try:
        for module in parts:
            module.unshard()
            # they gather weights that are there, and would divide them again
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                taken.append((hooks, dict(hooks)))
                for key, hook in list(hooks.items()):
                    if getattr(hook, "__module__", "").startswith(_THEIRS):
                        del hooks[key]
        yield model
    finally:
        for hooks, before in taken:
            hooks.clear()
            hooks.update(before)
        for module in parts:
            module.reshard()
