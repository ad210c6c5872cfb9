"""What tests of engines share: rows put together, and the hook engine against the loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cases import CASES
from draws import noise
from scodkit.errors import EngineFallbackWarning
from scodkit.factors.alone import FunctionalEngine, LoopEngine
from scodkit.factors.choose import choose_engine
from scodkit.factors.engine import Engine, Factors
from scodkit.factors.hooks import HookEngine
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import ParameterSet, select_names

BY_NAME = {case.name: case for case in CASES}
MLP = BY_NAME["mlp"]
NAN, INF = float("nan"), float("inf")
ENGINES = [HookEngine, FunctionalEngine, LoopEngine]


def close(actual: Tensor, expected: Tensor, atol: float = 1e-13) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=atol)


def joined(factors: Factors) -> Tensor:
    """Rows (b, q, N), put together by the columns the blocks claim."""
    parts = list(factors.blocks())
    width = sum(rows.shape[2] for _, rows in parts)
    whole = parts[0][1].new_full((*parts[0][1].shape[:2], width), NAN)
    for columns, rows in parts:
        whole[:, :, columns] = rows
    assert factors.num_rows == whole.shape[0] * whole.shape[1]
    return whole


def everything(network: Network, names: list[str] | None = None) -> ParameterSet:
    return select_names(network.model, names or list(dict(network.model.named_parameters())))


def engine_rows(
    kind: type[Engine], network: Network, call: Inputs, likelihood: Likelihood, names=None
) -> Tensor:
    with network.evaluating():
        linear = kind(network, everything(network, names)).linearize(call)
        return joined(linear.pull_back(likelihood.factor(linear.output)))


def chosen_engine(model: nn.Module, call: Inputs, names=None) -> Engine:
    network = Network(model)
    with network.evaluating():
        return choose_engine(network, everything(network, names), call)


# --- The hook engine against the loop ------------------------------------------------------


class Uses(nn.Module):
    """A function of the inputs and of parameters or modules of its own."""

    def __init__(self, function: Callable[..., Tensor], **own: tuple[int, ...] | nn.Module):
        super().__init__()
        self.function = function
        for name, value in own.items():
            is_module = isinstance(value, nn.Module)
            setattr(self, name, value if is_module else nn.Parameter(torch.zeros(value)))

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.tanh(self.function(self, *inputs))


def randomised(model: nn.Module) -> nn.Module:
    """The model in float64 and eval mode, every weight and running statistic drawn anew."""
    generator = torch.Generator().manual_seed(1)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(generator=generator)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0, generator=generator)
    return model


def pulled(
    kind: type[Engine], model: nn.Module, call: Inputs, directions: int, names=None
) -> Factors:
    """The factors a new engine gives for some random rows at the output."""
    network = Network(model)
    return pulled_by(kind(network, everything(network, names)), call, directions)


def pulled_by(engine: Engine, call: Inputs, directions: int) -> Factors:
    """The same of an engine that may have seen other batches."""
    with engine.network.evaluating():
        linear = engine.linearize(call)
        shape = (call.batch_size, directions, linear.output[0].numel())
        return linear.pull_back(noise(*shape, seed=2))


def same_as_the_loop(model: nn.Module, *inputs: Tensor, names=None) -> None:
    """Check all that the hook engine's factors can be asked for, for one and two directions."""
    model, call = randomised(model), Inputs(inputs, {})
    for directions in (1, 2):
        expected = joined(pulled(LoopEngine, model, call, directions, names))
        factors = pulled(HookEngine, model, call, directions, names)
        assert expected.any()
        close(joined(factors), expected, atol=1e-12)
        close(joined(factors.hold()), expected, atol=1e-12)
        wanted = expected.square().sum((1, 2))
        close(factors.squared_norms(), wanted, atol=1e-12)
        matrix = noise(expected.shape[2], 3, seed=3)
        norms, products = factors.project(matrix)
        close(norms, wanted, atol=1e-12)
        close(products, expected @ matrix, atol=1e-12)


def right_rows(
    model: nn.Module, *inputs: Tensor, then: Tensor | None = None, names=None
) -> tuple[type, list[str]]:
    """Check the rows of the engine that is chosen; return its kind, and what was said.

    Args:
        model: A model.
        inputs: The batch to choose the engine with.
        then: The batch to ask for rows of, if another one.
        names: The chosen parameters.
    """
    model, call = randomised(model), Inputs(inputs, {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = chosen_engine(model, call, names)
        later = call if then is None else Inputs((then,), {})
        for directions in (1, 2):
            expected = joined(pulled(LoopEngine, model, later, directions, names))
            close(joined(pulled_by(engine, later, directions)), expected, 1e-12)
    said = [w for w in caught if issubclass(w.category, EngineFallbackWarning)]
    return type(engine), [str(w.message) for w in said]
