"""Slopes of scores in the input: against finite differences, and right or refused."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function, gradcheck
from torch.autograd.function import once_differentiable

from cases import CASES, mlp
from draws import noise
from engines import close, everything, randomised
from scodkit import (
    Categorical,
    LastLayers,
    Monitor,
)
from scodkit.errors import EngineFallbackWarning, OptionError
from scodkit.explain import differentiable_score
from scodkit.explain import saliency as saliency_module
from scodkit.factors import alone
from scodkit.factors.engine import Linearization
from scodkit.model.network import Network, differentiable_attention
from scodkit.scoring.energies import Energies
from slopes import (
    LIKELIHOODS,
    NETS,
    OUTPUTS,
    QUIET,
    Heads,
    PicksItsWay,
    fitted,
    score_of,
    slopes,
)

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
        size = float(gradient.abs().max())  # along a direction they may cancel
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


@pytest.mark.parametrize("part", ["total", "along"])
def test_wrong_slopes_are_noticed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own batched layer norm has right values and wrong slopes, as of torch 2.13
    right = saliency_module._Scores._energies
    expected = slopes(fitted(randomised(mlp(OUTPUTS)), (3,)), noise(2, 3, seed=2))

    def wrong(self, linear: Linearization, rows: Tensor) -> Energies:
        found = right(self, linear, rows)
        if not isinstance(linear, alone._FunctionalLinearization):
            return found
        values = getattr(found, part)
        return replace(found, **{part: 2 * values - values.detach()})

    monkeypatch.setattr(saliency_module._Scores, "_energies", wrong)
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


def test_two_threads_turn_fused_attention_back_in_order() -> None:
    before = torch.backends.cuda.flash_sdp_enabled()
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first() -> None:
        with differentiable_attention():
            first_in.set()
            second_in.wait(0.3)
        first_out.set()

    def second() -> None:
        first_in.wait()
        with differentiable_attention():
            second_in.set()
            first_out.wait(0.3)

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
