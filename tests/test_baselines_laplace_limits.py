"""What the Laplace approximation takes, and what it refuses and why."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from baseline_contracts import network, some, training_data
from laplace_oracles import dense_covariances, dense_precision
from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.baselines.kfac_laplace import KFACLaplace
from scodkit.errors import (
    BatchError,
    EngineFallbackWarning,
    MissingPeerError,
    NonFiniteError,
    OptionError,
)

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def small_net(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def linear_fit(model: nn.Module, data: object, **options: object) -> KFACLaplace:
    options = {"samples": None, "prior_precision": 1.0, **options}
    return KFACLaplace(model, Categorical(), **options).fit(data, progress=False)


# --- What it takes -------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [None, 4])
def test_one_logit_is_two_classes(samples: int | None) -> None:
    class Two(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            z = self.model(x)
            return torch.cat([torch.zeros_like(z), z], dim=1)

    model, data = network("bernoulli"), training_data("bernoulli")
    one = KFACLaplace(model, Bernoulli(), samples=samples).fit(data, progress=False)
    two = KFACLaplace(Two(model), Categorical(), samples=samples).fit(data, progress=False)
    first, second = one(some()), two(some())
    torch.testing.assert_close(first.score, second.score, **CLOSE)
    odds = second.output[:, 1:] - second.output[:, :1]
    torch.testing.assert_close(first.output, odds, **CLOSE)


def test_noise_is_in_squared_output_units() -> None:
    """Outputs and their noise in other units: the same uncertainty, in those units."""
    model, x = small_net(), noise(20, 3)
    scaled = small_net()
    with torch.no_grad():
        scaled[2].weight *= torch.tensor([[10.0], [0.1]])
        scaled[2].bias *= torch.tensor([10.0, 0.1])
    options = {"samples": None, "prior_precision": 1e-9}
    plain = KFACLaplace(model, Gaussian((0.5, 2.0)), **options).fit([x], progress=False)
    units = KFACLaplace(scaled, Gaussian((50.0, 0.02)), **options).fit([x], progress=False)
    first, second = (
        method._predict(method._network.inputs_of(x), method._state).variance
        for method in (plain, units)
    )
    wanted = first * torch.tensor([100.0, 0.01])
    torch.testing.assert_close(second, wanted, rtol=1e-5, atol=0)


def test_outputs_of_any_shape_are_numbers() -> None:
    model = nn.Sequential(small_net(6), nn.Unflatten(1, (2, 3)))
    flat = small_net(6)
    x = noise(20, 3)
    for samples in (None, 4):
        options = {"samples": samples, "prior_precision": 1.0}
        found = KFACLaplace(model, Gaussian(0.5), **options).fit([x], progress=False)(x)
        wanted = KFACLaplace(flat, Gaussian(0.5), **options).fit([x], progress=False)(x)
        torch.testing.assert_close(found.score, wanted.score, **CLOSE)
        torch.testing.assert_close(found.output.flatten(1), wanted.output, **CLOSE)


def test_neither_targets_nor_a_second_pass_are_needed() -> None:
    model, x = small_net(), noise(20, 3)
    wanted = linear_fit(model, [(x, torch.zeros(20))])
    found = linear_fit(model, (part for part in x.split(6)))
    torch.testing.assert_close(found.score(x), wanted.score(x), **CLOSE)


class Named(nn.Module):
    """Takes two tensors and a switch, and returns a dict."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, left: Tensor, right: Tensor, *, negate: bool = False) -> dict:
        out = self.net(left + right)
        return {"out": -out if negate else out}


@pytest.mark.parametrize("samples", [None, 4])
def test_several_inputs_and_outputs_are_picked(samples: int | None) -> None:
    net, x, y = small_net(), noise(20, 3), noise(20, 3, seed=1)
    plain = linear_fit(net, [x + y], samples=samples)(x + y)
    method = KFACLaplace(
        Named(net),
        Categorical(),
        samples=samples,
        prior_precision=1.0,
        inputs=lambda batch: {"left": batch["l"], "right": batch["r"], "negate": True},
        outputs=lambda out: -out["out"],
    )
    method.fit([{"l": x, "r": y}], progress=False)
    torch.testing.assert_close(method({"l": x, "r": y}).score, plain.score, **CLOSE)


def test_frozen_weights_count() -> None:
    model, x = small_net(), noise(20, 3)
    wanted = linear_fit(model, [x]).score(x)
    frozen = small_net().requires_grad_(False)
    torch.testing.assert_close(linear_fit(frozen, [x]).score(x), wanted, **CLOSE)


def test_models_that_begin_in_place_leave_the_data_alone() -> None:
    model, x = nn.Sequential(nn.ReLU(inplace=True), small_net()), noise(20, 3)
    wanted = linear_fit(nn.Sequential(nn.ReLU(), small_net()), [x], samples=4).score(x)
    method = linear_fit(model, [x], samples=4)
    for _ in range(2):
        torch.testing.assert_close(method.score(x), wanted, **CLOSE)
    assert torch.equal(x, noise(20, 3))


def test_models_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model, x = small_net(), noise(20, 3)
        found = [linear_fit(model, [x], samples=samples).score(x) for samples in (None, 4)]
    model, x = small_net(), noise(20, 3)
    for score, samples in zip(found, (None, 4), strict=True):
        torch.testing.assert_close(score, linear_fit(model, [x], samples=samples).score(x))


def test_float32_is_precise_enough() -> None:
    model, x = small_net(), noise(20, 3)
    for samples in (None, 4):
        wanted = linear_fit(model, [x], samples=samples).score(x)
        single = linear_fit(small_net().float(), [x.float()], samples=samples)
        assert single._state["prior_precision"].dtype == torch.float32
        found = single.score(x.float())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        return out * 2 if bool(out.isfinite().all()) else out


@pytest.mark.parametrize("last_layer", [False, True])
def test_what_cannot_be_vectorised_is_run_at_one_sample_after_the_other(
    last_layer: bool,
) -> None:
    x = noise(6, 3)
    method = linear_fit(Branches(), [x], samples=4, last_layer=last_layer)
    with pytest.warns(EngineFallbackWarning, match="after the other"):
        found = method.score(x)
    doubled = nn.Sequential(small_net())
    doubled.register_forward_hook(lambda _m, _i, out: out * 2)
    wanted = linear_fit(doubled, [x], samples=4, last_layer=last_layer).score(x)
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_weights_that_are_certain_are_the_models_own() -> None:
    model, x = small_net(), noise(20, 3)
    method = linear_fit(model, [x], samples=4, last_layer=True)
    before = method.score(x)
    model[0].weight = nn.Parameter(2 * model[0].weight.detach())
    found = method.score(x)
    assert not torch.allclose(found, before)
    method._runs.works = False
    torch.testing.assert_close(found, method.score(x), **CLOSE)


def test_scoring_needs_no_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small_net(), noise(20, 3)
    for samples in (None, 4):
        method = linear_fit(model, [x], samples=samples)
        method.save(tmp_path / "method")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "laplace.curvature", None)
            loaded = KFACLaplace.load(tmp_path / "method", model)
            assert torch.equal(loaded.score(x), method.score(x))
            with pytest.raises(MissingPeerError, match="pip install"):
                loaded.fit([x], progress=False)


# --- Layers without factors ----------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.head = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x)))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.other = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        self.other(x)
        return self.layer(x)


class Regrouped(nn.Module):
    """Folds the axis of positions into that of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.head = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.flatten(0, 1)).reshape(len(x), -1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3).double()
        self.second = nn.Linear(3, 3).double()
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
        self.head = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


def before_a_head(layer: nn.Module, size: int) -> nn.Module:
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(size, 2)).double()


IMAGES = (4, 2, 3, 3)
WITHOUT = {
    "norm": (before_a_head(nn.BatchNorm1d(3), 3), (4, 3), r"0 \(BatchNorm1d\)"),
    "conv1d": (before_a_head(nn.Conv1d(2, 2, 1), 6), (4, 2, 3), r"0 \(Conv1d\)"),
    "groups": (before_a_head(nn.Conv2d(2, 2, 1, groups=2), 18), IMAGES, "groups=2"),
    "circular": (
        before_a_head(nn.Conv2d(2, 1, 3, padding=1, padding_mode="circular"), 9),
        IMAGES,
        "padding_mode='circular'",
    ),
    "one-sided": (
        before_a_head(nn.Conv2d(2, 1, 2, padding="same"), 9),
        IMAGES,
        "padded more on one side",
    ),
    "single": (before_a_head(nn.Linear(1, 1, bias=False), 3), (4, 3, 1), "a single weight"),
    "normed": (
        before_a_head(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), 3),
        (4, 3),
        r"0\.parametrizations\.weight \(ParametrizationList\)",
    ),
    "twice": (Twice(), (4, 3), r"layer \(Linear called 2 times\)"),
    "unused": (Unused(), (4, 3), r"other \(Linear without influence"),
    "regrouped": (Regrouped(), (4, 2, 3), r"layer \(Linear called with something else"),
    "tied": (Tied(), (4, 3), r"first \(Linear with weights in common"),
    "attention": (Attends(), (4, 3, 4), r"attention\.out_proj \(.*called 0 times"),
}


@pytest.mark.parametrize("kind", WITHOUT)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_layers_without_factors_are_named(kind: str) -> None:
    model, shape, match = WITHOUT[kind]
    method = KFACLaplace(model, Categorical(), samples=None)
    with pytest.raises(OptionError, match=match) as caught:
        method.fit([noise(*shape)], progress=False)
    assert "skip_unsupported=True" in str(caught.value)


@pytest.mark.parametrize("kind", sorted(set(WITHOUT) - {"normed"}))
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_layers_without_factors_can_be_left_as_they_are(kind: str) -> None:
    model, shape, _ = WITHOUT[kind]
    model.eval()
    x = noise(*shape)
    method = linear_fit(model, [x], skip_unsupported=True)
    names = list(method._parameters(method._state).names)
    assert names
    assert len(names) < len(list(model.parameters()))
    precision = dense_precision(model, x, Categorical(), 1.0, names)
    variances = dense_covariances(model, precision, x, names).diagonal(dim1=1, dim2=2)
    logits = model(x).detach() / (1 + math.pi * variances / 8).sqrt()
    torch.testing.assert_close(method(x).output, logits, rtol=1e-9, atol=1e-12)
    sampled = linear_fit(model, [x], skip_unsupported=True, samples=3)
    assert {key for key in sampled._ready() if key.startswith("samples:")} == {
        f"samples:{name}" for name in names
    }
    assert sampled.score(x).isfinite().all()


def test_nothing_but_layers_without_factors() -> None:
    method = KFACLaplace(nn.Conv1d(2, 2, 1), Gaussian(), skip_unsupported=True)
    with pytest.raises(OptionError, match=r"the model \(Conv1d\); compare with another"):
        method.fit([torch.zeros(3, 2, 4)], progress=False)


def test_a_last_layer_without_factors() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    method = KFACLaplace(model, Categorical(), last_layer=True)
    with pytest.raises(OptionError, match=r"1 \(LayerNorm\); compare"):
        method.fit([torch.zeros(3, 3)], progress=False)


def test_a_model_without_gradients() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    with pytest.raises(OptionError, match="without influence on the output"):
        KFACLaplace(Constant(), Categorical()).fit([torch.zeros(3, 3)], progress=False)


def test_half_precision_is_refused() -> None:
    method = KFACLaplace(nn.Linear(3, 2).bfloat16(), Categorical())
    with pytest.raises(OptionError, match=r"Linear in torch.bfloat16"):
        method.fit([torch.zeros(3, 3).bfloat16()], progress=False)


# --- Other refusals ------------------------------------------------------------------------


def test_several_variables_are_refused() -> None:
    for likelihood, model in [
        (Bernoulli(), small_net(2)),
        (Categorical(class_dim=1), nn.Sequential(small_net(6), nn.Unflatten(1, (2, 3)))),
    ]:
        with pytest.raises(BatchError, match="one variable"):
            KFACLaplace(model, likelihood).fit([noise(5, 3)], progress=False)


def test_variances_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BatchError, match="3 outputs, one per variance"):
        KFACLaplace(small_net(), Gaussian((1.0, 2.0, 3.0))).fit([noise(5, 3)], progress=False)


def test_training_data_must_be_finite() -> None:
    x = noise(5, 3)
    x[3, 1] = torch.nan
    with pytest.raises(NonFiniteError, match=r"outputs.*row 3"):
        KFACLaplace(small_net(), Categorical()).fit([x], progress=False)


def test_numbers_of_samples() -> None:
    for bad in (1, 0, -3):
        with pytest.raises(OptionError, match="two samples or more, or None"):
            KFACLaplace(small_net(), Categorical(), samples=bad)
