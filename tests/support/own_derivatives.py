"""Functions with a backward pass of their own, and a network around one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WithoutTangents(torch.autograd.Function):
    """A square with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class OnceOnly(WithoutTangents):
    """The same, through which nothing goes twice."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return WithoutTangents.backward(ctx, gradient)


class Custom(nn.Module):
    """A layer around such a function."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.function.apply(self.inner(x)))
