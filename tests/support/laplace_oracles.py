"""The Kronecker-factored Laplace approximation with dense matrices, by plain autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from oracles import dense_jacobian
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """What the weights of a layer are multiplied with, (positions, i), of one sample."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1])
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    ph, pw = layer.padding
    padded = nn.functional.pad(x, (pw, pw, ph, ph))
    rows = (padded.shape[1] - dh * (kh - 1) - 1) // sh + 1
    columns = (padded.shape[2] - dw * (kw - 1) - 1) // sw + 1
    return torch.stack(
        [
            padded[:, r * sh :, c * sw :][:, : dh * kh : dh, : dw * kw : dw].reshape(-1)
            for r in range(rows)
            for c in range(columns)
        ]
    )


def slopes(layer: nn.Module, gradient: Tensor) -> Tensor:
    """The gradient at a layer's output, (positions, o), of one sample."""
    if isinstance(layer, nn.Linear):
        return gradient.reshape(-1, gradient.shape[-1])
    return gradient.flatten(1).T


def factors_of(
    model: nn.Module, layer: nn.Module, x: Tensor, likelihood: Likelihood
) -> tuple[Tensor, Tensor]:
    """mean of a a^T and sum of g g^T over samples, positions and directions of the output."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
    inputs, gradients = [], []
    for i in range(len(x)):
        seen.clear()
        output = model(x[i : i + 1])
        ((given, out),) = seen
        inputs.append(patches(layer, given[0].detach()))
        for row in likelihood.factor(output.detach())[0]:
            (gradient,) = torch.autograd.grad(
                (output.flatten() * row).sum(), out, retain_graph=True
            )
            gradients.append(slopes(layer, gradient[0]))
    handle.remove()
    a, g = torch.cat(inputs), torch.cat(gradients)
    return a.T @ a / len(a), g.T @ g


def dense_fisher_blocks(
    model: nn.Module, x: Tensor, likelihood: Likelihood, names: list[str]
) -> list[Tensor]:
    """The approximate Fisher information of each parameter, summed over the data."""
    blocks = []
    for name in names:
        owner, _, kind = name.rpartition(".")
        a, g = factors_of(model, model.get_submodule(owner), x, likelihood)
        blocks.append(torch.kron(g, a) if kind == "weight" else g)
    return blocks


def dense_precision(
    model: nn.Module, x: Tensor, likelihood: Likelihood, prior: float, names: list[str]
) -> Tensor:
    fisher = torch.block_diag(*dense_fisher_blocks(model, x, likelihood, names))
    return fisher + prior * torch.eye(len(fisher), dtype=fisher.dtype)


def dense_covariances(
    model: nn.Module, precision: Tensor, x: Tensor, names: list[str]
) -> Tensor:
    """J Sigma J^T of each sample, (B, d, d)."""
    jacobian = dense_jacobian(model, Inputs((x,), {}), names)
    solved = torch.linalg.solve(precision, jacobian.flatten(0, 1).T).T
    return jacobian @ solved.reshape(jacobian.shape).mT


def log_evidence(fisher: Tensor, weights: Tensor, prior: float) -> float:
    """log marginal likelihood less the log-likelihood, as Laplace approximates it."""
    precision = fisher + prior * torch.eye(len(fisher), dtype=fisher.dtype)
    log_ratio = torch.logdet(precision) - len(fisher) * math.log(prior)
    return float(-0.5 * (log_ratio + prior * weights @ weights))
