"""Slopes of scores in the input: against finite differences, and right or refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function, gradcheck
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from cases import CASES, Attention, Recurrent, conv_batchnorm, dilated_groupnorm, mlp
from engines import INF, NAN, close, everything, randomised
from scodkit import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LastLayers,
    Monitor,
    MonteCarlo,
    Task,
)
from scodkit.errors import BatchError, EngineFallbackWarning, OptionError
from scodkit.explain import Saliency, differentiable_score
from scodkit.explain import saliency as saliency_module
from scodkit.network import Inputs, Network
from scodkit.score import Energies

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


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


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


# --- Right ---------------------------------------------------------------------------------


@QUIET
@pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS)
@pytest.mark.parametrize("net", NETS)
def test_slopes_are_those_of_the_score(net: str, likelihood) -> None:
    build, shape = NETS[net]
    monitor = fitted(randomised(build(OUTPUTS)), shape, likelihood)
    x = noise(2, *shape, seed=2)
    close(score_of(monitor, x), monitor.score(x))
    leaf = x.clone().requires_grad_()
    assert gradcheck(lambda at: score_of(monitor, at), leaf, fast_mode=net != "mlp")
    # and by the monitor's own scores, which share nothing with the derivative
    gradient, step = slopes(monitor, x), 1e-5
    for seed in range(3):
        along = noise(*x.shape, seed=seed)
        both = monitor.score(torch.cat([x + step * along, x - step * along]))
        found = (both[:2] - both[2:]) / (2 * step)
        expected = (gradient * along).flatten(1).sum(1)
        size = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * size)


@QUIET
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scores_are_the_monitors(case, dtype) -> None:
    model, test = case.model(OUTPUTS, dtype), case.inputs(4, OUTPUTS, 2, dtype)
    train = case.inputs(20, OUTPUTS, 1, dtype)
    batches = [dict(call.kwargs) if call.kwargs else call.args[0] for call in (train, test)]
    monitor = Monitor(model, Categorical(), rank=6).fit(batches[:1], progress=False)
    network = Network(model)
    parameters = everything(network)
    found = differentiable_score(network, parameters, Categorical(), monitor.basis, 1.0, test)
    assert found.dtype == torch.float64
    assert not found.requires_grad
    relative = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(
        found.to(dtype), monitor.score(batches[1]), rtol=relative, atol=0
    )


@pytest.mark.parametrize("chosen", [LastLayers(count=1), ["0.bias", "2.weight"]])
def test_chosen_and_frozen_weights(chosen) -> None:
    model = randomised(mlp(OUTPUTS))
    model[2].weight.requires_grad_(False)
    monitor, x = fitted(model, (3,), parameters=chosen), noise(2, 3, seed=2)
    gradient, step = slopes(monitor, x), 1e-5
    for i in range(3):
        along = step * torch.eye(3, dtype=torch.float64)[i]
        found = (monitor.score(x + along) - monitor.score(x - along)) / (2 * step)
        torch.testing.assert_close(found, gradient[:, i], rtol=1e-5, atol=1e-8)


@QUIET
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("net", ["mlp", "convolution", "attention", "fused attention"])
def test_lower_precision_is_close(net: str, dtype) -> None:
    build, shape = NETS[net]
    x = noise(5, *shape, seed=2, dtype=dtype)
    expected = slopes(fitted(randomised(build(OUTPUTS)), shape), x.double())
    found = slopes(fitted(randomised(build(OUTPUTS)).to(dtype), shape, dtype=dtype), x)
    assert found.dtype == dtype
    allowed = 1e-3 if dtype == torch.float32 else 0.3
    assert float((found - expected).norm() / expected.norm()) < allowed


# --- Where function transforms fail --------------------------------------------------------


def test_a_model_that_cannot_be_batched_is_taken_alone_with_one_warning() -> None:
    body, x = randomised(mlp(OUTPUTS)), noise(5, 3, seed=2)
    expected = slopes(fitted(body, (3,)), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineFallbackWarning)
        monitor = fitted(PicksItsWay(body), (3,))
    monitor.memory_budget = 1  # in five pieces
    with pytest.warns(EngineFallbackWarning, match="PicksItsWay is differentiated one") as said:
        close(slopes(monitor, x), expected)
    assert len(said) == 1
    assert "all at once it raised RuntimeError" in str(said[0].message)


def test_wrong_slopes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own batched layer norm has right values and wrong slopes, as of torch 2.13
    together = saliency_module._Scores._together
    expected = slopes(fitted(randomised(mlp(OUTPUTS)), (3,)), noise(2, 3, seed=2))

    def wrong(self, weights, call: Inputs, rows: Tensor) -> Energies:
        found = together(self, weights, call, rows)
        return Energies(2 * found.total - found.total.detach(), found.along)

    monkeypatch.setattr(saliency_module._Scores, "_together", wrong)
    monitor, x = fitted(randomised(mlp(OUTPUTS)), (3,)), noise(2, 3, seed=2)
    with pytest.warns(EngineFallbackWarning, match=r"differ from plain autograd's by \d"):
        close(slopes(monitor, x), expected)


def test_no_warning_without_need() -> None:
    for net in ("mlp", "convolution", "group norm", "fused attention"):
        build, shape = NETS[net]
        for dtype in (torch.float64, torch.float32):
            model = randomised(build(OUTPUTS)).to(dtype)
            slopes(fitted(model, shape, dtype=dtype), noise(3, *shape, dtype=dtype))


def test_fused_attention_is_back_afterwards() -> None:
    before = torch.backends.cuda.flash_sdp_enabled()
    slopes(fitted(randomised(Heads(OUTPUTS)), (4, 4)), noise(2, 4, 4))
    assert torch.backends.cuda.flash_sdp_enabled() == before


class Once(Function):
    """A square whose author did not think of second derivatives."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(self.layer(x))


def test_a_model_without_second_derivatives_is_refused() -> None:
    monitor = fitted(randomised(Squared()), (3,))
    with pytest.raises(OptionError, match=r"differentiate twice.*once_diff.*saliency=False"):
        slopes(monitor, noise(2, 3))
    assert monitor.explain(noise(2, 3)).saliency is None


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


@QUIET
@pytest.mark.parametrize("wrapped", [nn.Identity(), PicksItsWay(nn.Identity())])
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
    assert not slopes(fitted(randomised(Steps()), (3,)), noise(2, 3)).any()


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
