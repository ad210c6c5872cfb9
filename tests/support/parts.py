"""What tests of shares share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contracts import fit
from engines import close, everything
from scodkit import Bernoulli, Categorical, Gaussian, MonteCarlo, Task
from scodkit.explain import Explanation
from scodkit.factors.choose import choose_engine
from scodkit.factors.engine import Engine
from scodkit.factors.pieces import FactorSource
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.sketch import Exact
from scodkit.sketch.eigenbasis import Eigenbasis

OUTPUTS = 3
LIKELIHOODS = {
    "gaussian": Gaussian((0.5, 1.0, 2.0)),
    "bernoulli": Bernoulli(),
    "categorical": Categorical(),
    "one direction": Categorical(directions=1),
    "monte carlo": MonteCarlo(lambda out: torch.distributions.Poisson(out.exp()), samples=2),
    "task": Task(lambda out: out[:, :2].square(), Gaussian(0.1)),
}


def dense_pairs(rows: Tensor, basis: Eigenbasis, prior_scale: float) -> Tensor:
    """``L * (Sigma L)`` for rows ``(B, p, N)``: what a weight has in the score."""
    c = 1 / (2 * max(1, basis.num_data) * prior_scale**2)
    values, vectors = basis.values.double(), basis.vectors.double()
    identity = torch.eye(rows.shape[2], dtype=torch.float64)
    sigma = prior_scale**2 * (identity - vectors * (values / (values + c)) @ vectors.mT)
    return rows.double() * (rows.double() @ sigma)


def same_as_dense(
    split: Explanation,
    source: FactorSource,
    rows: Tensor,
    basis: Eigenbasis,
    prior_scale: float,
) -> None:
    """Check every share by its definition, and every sum."""
    pairs = dense_pairs(rows, basis, prior_scale)
    blocks = source.engine.parameters.blocks
    by_parameter = [pairs[:, :, block.columns].sum((1, 2)) for block in blocks]
    allowed = 1e-11 * prior_scale**2 * float(rows.square().sum((1, 2)).max()) + 1e-300
    close(split.parameters.values, torch.stack(by_parameter, 1), allowed)
    close(split.directions.values, pairs.sum(2), allowed)
    close(split.features, rows @ basis.vectors, 1e-11)
    assert (split.directions.values >= 0).all()
    sums_are_the_score(split, split.score, 1e-10)


def source_of(
    model: nn.Module, call: Inputs, likelihood: Likelihood, kind: type[Engine] | None = None
) -> FactorSource:
    """A source with all the memory there is; with the engine of choice, or as chosen."""
    network = Network(model)
    parameters = everything(network)
    with network.evaluating():
        shape = network(call).shape[1:]
        engine = kind(network, parameters) if kind else choose_engine(network, parameters, call)
    return FactorSource(engine, likelihood, tuple(shape), 2**30)


def basis_of(rows: Tensor, rank: int = 6) -> Eigenbasis:
    return fit(Exact(), rows, rank=rank)


def sums_are_the_score(split, score: Tensor, relative: float) -> None:
    info = torch.finfo(score.dtype)
    last_bit = max(1e-300, info.tiny * info.eps)  # below it a float32 score has underflowed
    for shares in (split.parameters, split.layers, split.directions):
        assert shares.values.dtype == torch.float64
        assert shares.values.shape == (len(score), len(shares.names))
        sums = shares.values.sum(1)
        torch.testing.assert_close(sums, score.double(), rtol=relative, atol=last_bit)
