"""Tracks the batch axis: where the samples lie in every tensor of a forward pass.

The hook engine assigns rows to samples by where they lie. To make this right by construction,
each torch function between the batch and the output is looked up in a table of functions that
are known to keep samples apart. The result of any other function counts as mixed: neither a
layer's input nor the output may depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name

from scodkit.factors.layout import (
    COUNTED,
    MIXED,
    NEW,
    NOBODYS,
    Call,
    Where,
    only_reshaped,
    tensors_in,
    written,
)
from scodkit.factors.sample_rules import ASKING, MAKING, RULES

_NAME = "_scodkit_samples"

# tensors and their versions, by id; references are held, so that no id is reused
Strangers = dict[int, tuple[Tensor, int]]


class Samples:
    """Tracks the samples of one batch through a forward pass.

    Args:
        size: Batch size ``B``, at least two.
        constants: The model's own tensors, from `constants_of`, before the pass begins.
        older: Other tensors that existed before the pass, with their versions.

    Attributes:
        lost: Name of the function after which nothing is known; empty if there was none.
        strangers: Tensors that were neither inputs nor returned by a call of this pass.
    """

    def __init__(
        self,
        size: int,
        constants: Mapping[int, Tensor],
        older: Strangers | None = None,
    ) -> None:
        self.size = size
        self.lost = ""
        self.strangers: Strangers = {}
        self._constants, self._older = constants, older or {}

    def put(self, tensor: Tensor, where: Where) -> None:
        """Record where the samples lie in a tensor."""
        setattr(tensor, _NAME, (self, where))

    def of(self, tensor: Tensor) -> Where:
        """Return where the samples lie in a tensor."""
        if id(tensor) in self._constants:
            return None
        mark = getattr(tensor, _NAME, None)
        if mark is not None and mark[0] is self:
            where: Where = mark[1]
            return where
        version = 0 if tensor.is_inference() else tensor._version
        self.strangers[id(tensor)] = (tensor, version)
        return None if self._older.get(id(tensor), (None, -1))[1] == version else MIXED

    def follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Record where the samples lie in the result of a torch function.

        Args:
            func: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            result: Its result.
        """
        if func in ASKING and MIXED not in map(self.of, tensors_in(args)):
            return
        call = Call(self.size, self.of, args, kwargs)
        results = tensors_in((result,))
        if all(where in NOBODYS for where in call.wheres):
            wheres: Sequence[Where] = [self._without(func, call, r) for r in results]
        elif func is Tensor.__setitem__:
            results, wheres = [args[0]], [written(call)]
        elif not results or kwargs.get("out") is not None:
            self._lose(func)  # from here on a value of one sample may affect another
            return
        else:
            wheres = self._ruled(func, call, results)
        self._note(func, call, results, wheres)

    def _note(
        self,
        func: Callable[..., Any],
        call: Call,
        results: list[Tensor],
        wheres: Sequence[Where],
    ) -> None:
        for tensor, where in zip(call.tensors, call.wheres, strict=True):
            if where is NEW:
                self.put(tensor, None)  # it may have views from now on
        for tensor, where in zip(results, wheres, strict=True):
            changed = call.tensors and tensor is call.tensors[0] and where not in NOBODYS
            if changed and where != call.wheres[0] and call.wheres[0] is not NEW:
                self._lose(func)  # overwritten, and with it all tensors that share its memory
            self.put(tensor, where)

    def _without(self, func: Callable[..., Any], call: Call, result: Tensor) -> Where:
        """Return where samples lie in the result of a call whose arguments have none."""
        if func is torch.arange and len(call.args) == 1 and call.args[0] == self.size:
            return COUNTED
        counted = call.wheres[:1] == [COUNTED] and result.shape[:1] == (self.size,)
        if counted and only_reshaped(func, call):
            return COUNTED
        return NEW if func in MAKING else None if call.wheres else MIXED

    def _ruled(
        self, func: Callable[..., Any], call: Call, results: list[Tensor]
    ) -> Sequence[Where]:
        mixed = [MIXED] * len(results)
        rule = RULES.get(func)
        if rule is None or MIXED in call.wheres:
            return mixed
        try:
            wheres = rule(call, results)
        except Exception:  # the rule cannot tell, or does not know these arguments
            return mixed
        wheres = wheres if isinstance(wheres, list) else [wheres] * len(results)
        return [
            where if where in NOBODYS or self._holds(tensor.shape, where) else MIXED
            for tensor, where in zip(results, wheres, strict=True)
        ]

    def _holds(self, shape: Sequence[int], where: Where) -> bool:
        if where is None or not 0 <= where.axis < len(shape):
            return False
        return shape[where.axis] == where.outer * self.size * where.inner

    def _lose(self, func: Callable[..., Any]) -> None:
        self.lost = self.lost or resolve_name(func) or str(func)


def constants_of(model: nn.Module) -> dict[int, Tensor]:
    """Return the tensors of a model, registered or not, by id (with references to them)."""
    attributes = [vars(module).values() for module in model.modules()]
    return {id(tensor): tensor for values in attributes for tensor in tensors_in(values)}
