"""Slow, dense, obviously right versions of what the library computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs


def flat_parameters(model: nn.Module, names: list[str] | None = None) -> dict[str, Tensor]:
    """The chosen parameters (all, each once), by name, in the model's order."""
    named = dict(model.named_parameters())
    return {n: named[n].detach().clone() for n in (names or named)}


def dense_jacobian(model: nn.Module, call: Inputs, names: list[str] | None = None) -> Tensor:
    """d output / d weights, sample by sample and output by output: (B, d, N)."""
    rows = []
    for i in range(call.batch_size):
        weights = {n: w.requires_grad_() for n, w in flat_parameters(model, names).items()}
        sample = call.samples(slice(i, i + 1))
        output = functional_call(model, weights, sample.args, dict(sample.kwargs))
        per_output = []
        for value in output.reshape(-1):
            gradients = torch.autograd.grad(
                value, list(weights.values()), retain_graph=True, allow_unused=True
            )
            per_output.append(
                torch.cat(
                    [
                        (torch.zeros_like(w) if g is None else g).reshape(-1)
                        for w, g in zip(weights.values(), gradients, strict=True)
                    ]
                )
            )
        rows.append(torch.stack(per_output))
    return torch.stack(rows)


def dense_factors(
    model: nn.Module,
    call: Inputs,
    likelihood: Likelihood,
    names: list[str] | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """L^T of each sample: (B, p, N)."""
    with torch.no_grad():
        output = model(*call.args, **call.kwargs)
    return likelihood.factor(output, keys) @ dense_jacobian(model, call, names)


def dense_fisher(rows: Tensor) -> Tensor:
    """F = (1/M) sum_i L_i L_i^T from (M, p, N)."""
    return torch.einsum("mpa,mpb->ab", rows, rows) / rows.shape[0]


def dense_score(fisher: Tensor, num_data: int, rows: Tensor, prior_scale: float) -> Tensor:
    """tr(L^T Sigma L) with Sigma = 1/2 (M F + I/(2 eps^2))^-1, for rows (B, p, N)."""
    identity = torch.eye(fisher.shape[0], dtype=fisher.dtype)
    precision = num_data * fisher + identity / (2 * prior_scale**2)
    solved = torch.linalg.solve(precision, rows.flatten(0, 1).mT).mT.reshape(rows.shape)
    return 0.5 * (rows * solved).sum((1, 2))
