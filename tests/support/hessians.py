"""The dense Hessian of a training loss, from torch's own losses."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from baseline_contracts import network, training_data


def loss_of(kind: str, output: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over a batch, for one of the contract's likelihoods."""
    if kind == "categorical":
        return functional.cross_entropy(output, targets)
    y = targets.to(output)
    if kind == "bernoulli":
        total = functional.binary_cross_entropy_with_logits(output, y, reduction="sum")
    elif kind == "heteroscedastic":
        total = functional.gaussian_nll_loss(
            output[:, :1], y, output[:, 1:].exp(), reduction="sum"
        )
    else:
        variance = torch.tensor([0.5, 2.0] if kind == "scaled" else [1.0], dtype=output.dtype)
        total = 0.5 * ((output - y).square() / variance).sum()
    return total / len(output)


@functools.cache
def dense_hessian(kind: str, layer: str = "") -> Tensor:
    """Of the mean loss of the contract's network on its training data: (N, N).

    In the model's order; of one layer, if it is named.
    """
    model = network(kind)
    named = {n: p.detach() for n, p in model.named_parameters() if n.startswith(layer)}
    data = training_data(kind)
    x, y = (torch.cat([batch[i] for batch in data]) for i in (0, 1))

    def mean_loss(flat: Tensor) -> Tensor:
        cut = flat.split([p.numel() for p in named.values()])
        weights = {n: c.view_as(p) for c, (n, p) in zip(cut, named.items(), strict=True)}
        return loss_of(kind, functional_call(model, weights, (x,)), y)

    flat = torch.cat([p.flatten() for p in named.values()]).requires_grad_()
    (gradient,) = torch.autograd.grad(mean_loss(flat), flat, create_graph=True)
    rows = [torch.autograd.grad(g, flat, retain_graph=True)[0] for g in gradient]
    return torch.stack(rows)
