"""Slopes of scores in the input: what is left alone, refused, and drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cases import conv_batchnorm, mlp
from draws import noise
from engines import INF, NAN, close, everything, randomised
from scodkit import (
    Categorical,
    Gaussian,
    Monitor,
    MonteCarlo,
)
from scodkit.errors import BatchError, OptionError
from scodkit.explain import Saliency, differentiable_score, saliency_of
from scodkit.explain import saliency as saliency_module
from scodkit.factors.alone import LoopEngine
from scodkit.factors.pieces import FactorSource
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from slopes import NETS, OUTPUTS, QUIET, PicksItsWay, fitted, score_of, slopes

# --- What is left alone --------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_model_inputs_and_modes_are_left_as_they_were(mode) -> None:
    model = conv_batchnorm(OUTPUTS).train()
    monitor = fitted(model, (2, 5, 5), dtype=torch.float32)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = noise(3, 2, 5, 5, dtype=torch.float32)
    expected = slopes(monitor, x.clone())
    with mode():
        given = x.clone()
        found, again = score_of(monitor, given), slopes(monitor, given)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    assert torch.equal(given, x)
    assert not any(tensor.requires_grad for tensor in (given, found, again))
    torch.testing.assert_close(again, expected)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_inputs_made_in_inference_mode() -> None:
    monitor, x = fitted(randomised(mlp(OUTPUTS)), (3,)), noise(3, 3)
    network = Network(monitor.model)
    source = FactorSource(LoopEngine(network, everything(network)), Categorical(), (4,), 2**20)
    with torch.inference_mode():
        found = saliency_of(source, Inputs((x.clone(),), {}), monitor.basis, 0.6)
    close(found.gradient, slopes(monitor, x))


@pytest.mark.parametrize(
    "wrapped", [nn.Identity(), pytest.param(PicksItsWay(nn.Identity()), marks=QUIET)]
)
def test_a_model_that_writes_on_its_input(wrapped: nn.Module) -> None:
    body, x = randomised(mlp(OUTPUTS)), noise(3, 3).requires_grad_()
    monitor = fitted(body, (3,))
    network = Network(nn.Sequential(nn.Sigmoid(), *body))
    in_place = Network(nn.Sequential(wrapped, InPlace(), *body))
    scores = [
        differentiable_score(
            one, everything(one), Categorical(), monitor.basis, 0.6, Inputs((x,), {})
        )
        for one in (network, in_place)
    ]
    (expected,), (found,) = (torch.autograd.grad(score.sum(), x) for score in scores)
    close(found, expected)
    assert torch.equal(x, noise(3, 3))


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid_()


def test_no_weight_is_part_of_the_graph() -> None:
    model = randomised(mlp(OUTPUTS))
    monitor = fitted(model, (3,), parameters=["2.weight", "2.bias", "0.weight", "0.bias"])
    x = noise(2, 3).requires_grad_()
    score_of(monitor, x).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("budget", [1, 2**30])
def test_samples_are_taken_within_the_budget(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, call = [], saliency_module._Scores.__call__

    def counted(self, some: Inputs) -> Tensor:
        sizes.append(some.batch_size)
        return call(self, some)

    monkeypatch.setattr(saliency_module._Scores, "__call__", counted)
    monitor, x = fitted(randomised(mlp(OUTPUTS)), (3,)), noise(4, 3)
    expected = slopes(monitor, x)
    sizes.clear()
    monitor.memory_budget = budget
    close(slopes(monitor, x), expected)
    assert sizes == ([1] * 4 if budget == 1 else [4])


@QUIET
@pytest.mark.parametrize("net", ["mlp", "convolution", "gru"])
@pytest.mark.parametrize("bad", [{2: NAN}, {0: INF, 1: -INF}, {0: NAN, 1: NAN, 2: NAN, 3: NAN}])
def test_samples_with_a_nan_disturb_no_other(net: str, bad: dict[int, float]) -> None:
    build, shape = NETS[net]
    for likelihood in (Categorical(), Categorical(directions=1), Gaussian()):
        monitor = fitted(randomised(build(OUTPUTS)), shape, likelihood)
        x = noise(4, *shape, seed=2)
        expected, broken = slopes(monitor, x), x.clone()
        for i, value in bad.items():
            broken[i].view(-1)[0] = value
        found = slopes(monitor, broken)
        score = score_of(monitor, broken)
        for i in range(4):
            if i in bad:
                assert found[i].isnan().all()
                assert score[i] == INF
            else:
                close(found[i], expected[i])


class Strict(Gaussian):
    """A likelihood that raises on a NaN."""

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        assert output.isfinite().all()
        return super().factor(output, keys)


def test_bad_samples_do_not_decide_how_the_others_are_taken() -> None:
    monitor, x = fitted(randomised(mlp(OUTPUTS)), (3,), Strict()), noise(5, 3)
    broken = x.clone()
    broken[:3, 0] = NAN  # more than are tried, and no warning
    close(slopes(monitor, broken)[3:], slopes(monitor, x)[3:])


# --- What is refused -----------------------------------------------------------------------


class Several(nn.Module):
    """Takes whole numbers, floating-point numbers, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, ids: Tensor, scale: Tensor | None = None, shift: Tensor | None = None):
        y = self.embed(ids)
        y = y if scale is None else y * scale
        return self.head(torch.tanh(y if shift is None else y + shift))


def asked(**inputs: Tensor) -> Tensor:
    monitor = Monitor(randomised(Several()), Gaussian(), rank=3).fit([inputs], progress=False)
    return slopes(monitor, inputs)


def test_inputs_without_a_slope_are_refused() -> None:
    ids, floats = torch.arange(5), noise(5, 3)
    with pytest.raises(
        BatchError, match=r"one floating-point .* \(5,\) of torch.int64; a score"
    ):
        asked(ids=ids)
    with pytest.raises(BatchError, match=r"one floating-point .*differentiable_score and"):
        asked(ids=ids, scale=floats, shift=floats)
    assert asked(ids=ids, scale=floats).abs().sum((1,)).all()


def test_random_draws_are_refused() -> None:
    poisson = MonteCarlo(lambda out: torch.distributions.Poisson(out.exp()))
    monitor = fitted(randomised(mlp(2)), (3,), poisson)
    with pytest.raises(
        OptionError, match=r"without random draws, got MonteCarlo.*saliency=Fal"
    ):
        slopes(monitor, noise(2, 3))


class Steps(nn.Module):
    """Sees the signs of its inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x > 0).to(x.dtype))


def test_a_model_that_sees_signs_has_no_slopes() -> None:
    monitor, x = fitted(randomised(Steps()), (3,)), noise(2, 3)
    assert not slopes(monitor, x).any()
    x[1, 0] = NAN
    assert slopes(monitor, x).isnan().all(1).tolist() == [False, True]


# --- Pictures ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "panels"),
    [((7,), 1), ((4, 5), 3), ((1, 4, 5), 3), ((3, 4, 5), 3), ((2, 4, 5), 3)],
)
def test_pictures(shape: tuple[int, ...], panels: int) -> None:
    saliency = Saliency(noise(2, *shape), noise(2, *shape, seed=1))
    figure = saliency.plot(1)
    assert len(figure.axes) == panels  # a colour bar has axes of its own
    if panels == 3:
        (heat,) = figure.axes[1].images
        assert heat.get_clim()[0] == -heat.get_clim()[1]
        slope = saliency.gradient[1]
        slope = slope if slope.ndim == 2 else slope.sum(0)
        torch.testing.assert_close(torch.tensor(heat.get_array().data), slope)
    else:
        heights = [bar.get_height() for bar in figure.axes[0].patches]
        torch.testing.assert_close(
            torch.tensor(heights, dtype=torch.float64), saliency.gradient[1]
        )


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(BatchError, match=r"expected an image .* got shape \(2, 2, 2, 2\)"):
        Saliency(torch.zeros(1, 2, 2, 2, 2), torch.zeros(1, 2, 2, 2, 2)).plot()
    with pytest.raises(BatchError, match=r"expected a sample with a finite score"):
        Saliency(torch.full((1, 3), NAN), torch.zeros(1, 3)).plot()
    with pytest.raises(OptionError, match="expected a sample from 0 to 0, got 1"):
        Saliency(torch.zeros(1, 3), torch.zeros(1, 3)).plot(1)
