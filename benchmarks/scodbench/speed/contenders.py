"""What a scored prediction is compared with: floors, loops and peers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scodbench.speed.paper_nets import Domain
from scodkit import Monitor
from scodkit.likelihoods import Categorical, Likelihood
from scodkit.sketch import Nystrom
from scodkit.sketch.eigenbasis import Eigenbasis

FIT_ON = 512


def fitted_monitor(domain: Domain, model: nn.Module, **options: object) -> Monitor:
    """Return a monitor with the paper's sketch size and rank, fitted on random inputs."""
    device = str(next(model.parameters()).device)
    likelihood = options.pop("likelihood", domain.likelihood)
    assert isinstance(likelihood, Likelihood)
    sketch = Nystrom(size=domain.size)
    monitor = Monitor(model, likelihood, domain.rank, sketch=sketch, **options)  # type: ignore[arg-type]
    batches = [domain.batch(64, device) + 0.1 * i for i in range(FIT_ON // 64)]
    return monitor.fit(batches, progress=False, check_deterministic=False)


def forward(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Return the prediction alone."""

    def run() -> Tensor:
        with torch.no_grad():
            return model(x)

    return run


def floor(
    model: nn.Module, x: Tensor, likelihood: Likelihood, basis: Eigenbasis
) -> Callable[[], Tensor]:
    """Return forward, p batched backward passes, and the bare product with the basis."""
    weights = list(model.parameters())
    with torch.no_grad():
        rows = likelihood.factor(model(x))
    vectors = basis.vectors
    flat = torch.randn(rows.shape[0] * rows.shape[1], len(vectors), device=x.device)

    def run() -> Tensor:
        output = model(x)
        for j in range(rows.shape[1]):
            torch.autograd.grad(output, weights, rows[:, j], retain_graph=True)
        return flat @ vectors

    return run


def sample_rows(model: nn.Module, x: Tensor, likelihood: Likelihood) -> Tensor:
    """Return the Fisher factor of one sample ``(1, ...)`` by plain autograd, ``(p, N)``."""
    weights = list(model.parameters())
    output = model(x)
    return torch.stack(
        [
            torch.cat(
                [
                    g.reshape(-1)
                    for g in torch.autograd.grad(output, weights, row[None], retain_graph=True)
                ]
            )
            for row in likelihood.factor(output.detach())[0]
        ]
    )


def _score(rows: Tensor, basis: Eigenbasis) -> Tensor:
    """Return the score of one sample from its rows ``(p, N)``, at prior scale 1."""
    along = (rows @ basis.vectors).square().sum(0)
    kept = along * basis.values / (basis.values + 1.0 / (2 * basis.num_data))
    return rows.square().sum() - kept.sum()


def loop(
    model: nn.Module, x: Tensor, likelihood: Likelihood, basis: Eigenbasis
) -> Callable[[], Tensor]:
    """Return scores by plain autograd, one sample and one direction after the other."""

    def run() -> Tensor:
        scores = []
        for i in range(len(x)):
            rows = sample_rows(model, x[i : i + 1], likelihood)
            scores.append(_score(rows, basis))
        return torch.stack(scores)

    return run


def batch_loop(
    model: nn.Module, x: Tensor, likelihood: Likelihood, basis: Eigenbasis
) -> Callable[[], Tensor]:
    """Return scores by plain autograd through the graph of the whole batch.

    Every sample's gradient goes back through all of the batch, as in the authors' code.
    """
    weights = list(model.parameters())

    def run() -> Tensor:
        output = model(x)
        rows = likelihood.factor(output.detach())
        scores = []
        for i in range(len(x)):
            flat = []
            for row in rows[i]:
                found = torch.autograd.grad(output[i], weights, row, retain_graph=True)
                flat.append(torch.cat([gradient.reshape(-1) for gradient in found]))
            scores.append(_score(torch.stack(flat), basis))
        return torch.stack(scores)

    return run


def loop_fit(
    model: nn.Module, x: Tensor, likelihood: Likelihood, size: int
) -> Callable[[], Tensor]:
    """Return a sketch of a batch by plain autograd, one sample after the other."""
    total = sum(weight.numel() for weight in model.parameters())
    omega = torch.randn(total, size, device=x.device)

    def run() -> Tensor:
        y = torch.zeros_like(omega)
        for i in range(len(x)):
            rows = sample_rows(model, x[i : i + 1], likelihood)
            y.addmm_(rows.T, rows @ omega)
        return y

    return run


def fit_floor(
    model: nn.Module, x: Tensor, likelihood: Likelihood, size: int
) -> Callable[[], Tensor]:
    """Return forward, p batched backward passes, and the two bare products of an update."""
    weights = list(model.parameters())
    total = sum(weight.numel() for weight in weights)
    omega = torch.randn(total, size, device=x.device)
    y = torch.zeros_like(omega)
    with torch.no_grad():
        rows = likelihood.factor(model(x))
    flat = torch.randn(rows.shape[0] * rows.shape[1], total, device=x.device)

    def run() -> Tensor:
        output = model(x)
        for j in range(rows.shape[1]):
            torch.autograd.grad(output, weights, rows[:, j], retain_graph=True)
        return y.addmm_(flat.T, flat @ omega)

    return run


def laplace(
    domain: Domain, model: nn.Module, weights: str
) -> Callable[[Tensor], object] | None:
    """Return laplace-torch's predictive with KFAC on some weights; None if not installed."""
    try:
        from laplace import Laplace
    except ImportError:
        return None
    classes = isinstance(domain.likelihood, Categorical)
    x = torch.cat([domain.batch(64) + 0.1 * i for i in range(FIT_ON // 64)])
    y = torch.randint(0, 5, (FIT_ON,)) if classes else torch.randn(FIT_ON, domain.outputs)
    kind = "classification" if classes else "regression"
    peer = Laplace(model, kind, subset_of_weights=weights, hessian_structure="kron")
    peer.fit(DataLoader(TensorDataset(x, y), batch_size=64))

    def run(x: Tensor) -> object:
        return peer(x)

    return run
