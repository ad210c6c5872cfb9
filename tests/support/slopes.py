"""What tests of slopes share: networks, likelihoods, monitors of a low rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from cases import Attention, Recurrent, conv_batchnorm, dilated_groupnorm, mlp
from draws import noise
from engines import everything
from scodkit import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Monitor,
    Task,
)
from scodkit.explain import differentiable_score
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network

OUTPUTS = 4
QUIET = pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")


class Heads(nn.Module):
    """Attention as transformers call it, which torch answers with a fused kernel."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, dim=-1))
        return self.head(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


class PicksItsWay(nn.Module):
    """Asks for values on the way, as no function transform allows."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if float(x.detach().sum()) < 1e9 else x


NETS = {
    "mlp": (mlp, (3,)),
    "convolution": (conv_batchnorm, (2, 5, 5)),
    "group norm": (dilated_groupnorm, (2, 6)),
    "attention": (Attention, (4, 4)),
    "fused attention": (Heads, (4, 4)),
    "gru": (lambda outputs: Recurrent(nn.GRU, outputs), (4, 3)),
}
LIKELIHOODS = {
    "gaussian": Gaussian(0.3),
    "heteroscedastic": HeteroscedasticGaussian(),
    "bernoulli": Bernoulli(),
    "categorical": Categorical(),
    "one direction": Categorical(directions=1),
    "task": Task(lambda out: out[:, :2].square(), Gaussian(0.1)),
}


def fitted(
    model: nn.Module, shape: tuple[int, ...], likelihood=None, dtype=torch.float64, **options
) -> Monitor:
    """A monitor of so low a rank that scores are partly inside and partly outside of it."""
    likelihood = Categorical() if likelihood is None else likelihood
    monitor = Monitor(model, likelihood, rank=4, prior_scale=0.6, **options)
    return monitor.fit([noise(20, *shape, seed=1, dtype=dtype)], progress=False)


def score_of(monitor: Monitor, x: Tensor) -> Tensor:
    network = Network(monitor.model)
    likelihood = monitor.likelihood
    call = Inputs((x,), {})
    parameters = everything(network)
    return differentiable_score(network, parameters, likelihood, monitor.basis, 0.6, call)


def slopes(monitor: Monitor, x: object) -> Tensor:
    found = monitor.explain(x, saliency=True).saliency
    assert found is not None
    return found.gradient
