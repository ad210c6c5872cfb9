"""Baselines that look at features: the contract, how features are found, what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from baseline_contracts import (
    OUTPUTS,
    BaselineContract,
    cases,
    network,
    parametrised,
    some,
    training_data,
)
from draws import noise
from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.baselines.features import forward_pass
from scodkit.baselines.knn import KNN
from scodkit.baselines.mahalanobis import Mahalanobis
from scodkit.baselines.one_pass import GradNorm
from scodkit.baselines.residual import Residual, ViM, settled_dim
from scodkit.errors import BatchError, NonFiniteError, OptionError
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network

EVERY = tuple(OUTPUTS)


@parametrised(
    cases(Mahalanobis, *EVERY),
    cases(lambda model, family: Mahalanobis(model, family, layer="3"), "categorical"),
    cases(lambda model, family: KNN(model, family, k=5), *EVERY),
    cases(
        lambda model, family: KNN(model, family, k=2, normalise=False, most=15, seed=1),
        "gaussian",
    ),
    cases(Residual, *EVERY),
    cases(lambda model, family: Residual(model, family, dim=1, layer="4"), "scaled"),
    cases(ViM, "categorical"),
    cases(lambda model, family: ViM(model, family, dim=4), "categorical"),
    cases(GradNorm, "categorical", rises="unsure"),
)
class TestContract(BaselineContract):
    pass


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Written(nn.Module):
    """Any forward pass over some layers, in whatever order they were made."""

    def __init__(self, forward, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._written = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._written(self, x)


def entering(model: nn.Module, x: Tensor, layer: str | None = None) -> Tensor:
    """Return the features the package finds."""
    return forward_pass(Network(model.double().eval()), Inputs((x,), {}), layer).features


def refused(model: nn.Module, x: Tensor, match: str, layer: str | None = None) -> None:
    with pytest.raises(BatchError, match=match):
        entering(model, x, layer)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_last_linear_layer_is_the_last_that_is_called() -> None:
    model = Written(
        lambda self, x: self.head(self.body(x).tanh()),
        head=nn.Linear(3, 2),
        body=nn.Linear(4, 3),
        unused=nn.Linear(5, 5),
    )
    x = noise(6, 4)
    found = forward_pass(Network(model.double()), Inputs((x,), {}))
    assert torch.equal(found.features, model.body(x).tanh())
    assert torch.equal(found.output, model(x))
    assert found.name == "head"
    assert found.layer.weight is model.head.weight


def test_a_layer_can_be_named() -> None:
    model, x = network("categorical"), some()
    assert torch.equal(entering(model, x, "3"), model[:3](x))
    assert torch.equal(entering(model, x, "1"), model[0](x).flatten(1))
    assert torch.equal(entering(model, x, ""), x.flatten(1))


def test_features_are_those_before_the_layer_changes_them() -> None:
    model = Written(
        lambda self, x: self.head(self.relu(self.body(x))).mul_(2),
        body=nn.Linear(4, 3),
        relu=nn.ReLU(inplace=True),
        head=nn.Linear(3, 2),
    )
    x = noise(6, 4)
    found = entering(model, x, "relu")
    assert torch.equal(found, model.body(x))
    assert (found < 0).any()

    def later(self: nn.Module, x: Tensor) -> Tensor:
        features = self.body(x)
        output = self.head(features)
        features.zero_()
        return output

    model = Written(later, body=nn.Linear(4, 3), head=nn.Linear(3, 2)).double()
    assert torch.equal(entering(model, x), model.body(x))


def test_a_layer_may_be_called_by_keyword() -> None:
    model = Written(lambda self, x: self.head(input=x.tanh()), head=nn.Linear(4, 2))
    x = noise(6, 4)
    assert torch.equal(entering(model, x), x.tanh())


def test_features_of_float32_are_not_rounded_further() -> None:
    x = noise(6, 4).float()
    model = nn.Linear(4, 2)
    found = forward_pass(Network(model), Inputs((x,), {})).features
    assert found.dtype == torch.float64
    assert torch.equal(found.float(), x)
    method = KNN(model, Gaussian(), k=1).fit([x], progress=False)
    assert method.score(x).dtype == torch.float32


def test_a_model_without_linear_layers_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten())
    x = noise(3, 1, 2, 2)
    refused(model, x, r"(?m)calls a Linear layer.*one of '0', '1'$")
    assert torch.equal(entering(model, x, "1"), model[0](x).flatten(1))
    aside = Written(lambda self, x: x, other=nn.Linear(4, 4))
    refused(aside, noise(6, 4), r"(?m)the layer 'other'.*one of 'other'$", "other")


def test_a_layer_that_is_called_twice_is_refused() -> None:
    model = Written(lambda self, x: self.same(self.same(x)), same=nn.Linear(4, 4))
    refused(model, noise(6, 4), "'same' to be called once.*got 2 calls")
    assert torch.equal(entering(model, noise(6, 4), ""), noise(6, 4))


def test_layers_before_the_last_may_be_called_twice() -> None:
    model = Written(
        lambda self, x: self.head(self.same(self.same(x))),
        same=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
    )
    x = noise(6, 4)
    assert torch.equal(entering(model, x), model.same(model.same(x)))


def test_features_without_one_row_per_sample_are_refused() -> None:
    model = Written(
        lambda self, x: self.head(x.reshape(-1, 2)).reshape(len(x), -1), head=nn.Linear(2, 2)
    )
    refused(model, noise(6, 4), re.escape("got 1 calls, the last with (12, 2)"))
    silent = Written(lambda self, x: x * self.scale(3), scale=Written(lambda self, n: n))
    refused(silent, noise(6, 4), "the last with None", "scale")


def test_hooks_are_gone_after_a_failure() -> None:
    def fails(self: nn.Module, x: Tensor) -> Tensor:
        self.head(x)
        raise ArithmeticError("of the model")

    model = Written(fails, head=nn.Linear(4, 2)).double()
    with pytest.raises(ArithmeticError):
        entering(model, noise(6, 4))
    assert not model.head._forward_pre_hooks


@pytest.mark.parametrize("method", [Mahalanobis, KNN, Residual, ViM, GradNorm])
def test_names_that_are_none_are_refused(method: type) -> None:
    with pytest.raises(OptionError, match=r"layer='head'; type one of '0', .*'5', or None"):
        method(network("categorical"), Categorical(), layer="head")


def test_further_axes_are_flattened_where_no_head_is_needed() -> None:
    tokens = Written(lambda self, x: self.head(x).mean(1), head=nn.Linear(4, 3)).double()
    x = noise(60, 5, 4)
    found = KNN(tokens, Categorical(), k=2).fit([x], progress=False).score(x)
    flat = KNN(nn.Linear(20, 3).double(), Categorical(), k=2)
    wanted = flat.fit([x.flatten(1)], progress=False).score(x.flatten(1))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    with pytest.raises(BatchError, match=r"features \(B, m\), got 'head'.*\(60, 5, 4\)"):
        ViM(tokens, Categorical()).fit([x], progress=False)
    with pytest.raises(BatchError, match="Linear layer applied to features"):
        GradNorm(tokens, Categorical()).score(x)


@pytest.mark.parametrize("after", [nn.Softmax(1), nn.LogSoftmax(1), nn.Hardtanh()])
@pytest.mark.parametrize("method", [ViM, GradNorm])
def test_outputs_must_be_the_logits_of_the_head(method: type, after: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), after).double()
    with torch.no_grad():
        model[1].weight.mul_(20)
    with pytest.raises(BatchError, match="returns what its layer '1' makes"):
        method(model, Categorical()).fit([noise(9, 4)], progress=False).score(noise(9, 4))
    with pytest.raises(BatchError, match="returns what its layer '0' makes"):
        method(model[:2], Categorical(), layer="0").fit([noise(9, 4)]).score(noise(9, 4))
    with pytest.raises(BatchError, match=r"Linear layer applied to.*got '2'"):
        method(model, Categorical(), layer="2").fit([noise(9, 4)]).score(noise(9, 4))


def test_a_model_may_leave_out_its_last_outputs() -> None:
    ten = nn.Linear(4, 10).double()
    five = nn.Linear(4, 5).double()
    with torch.no_grad():
        five.weight.copy_(ten.weight[:5])
        five.bias.copy_(ten.bias[:5])
    some_of_ten = Written(lambda self, x: self.head(x)[:, :5], head=ten)
    x = 5 * noise(30, 4)
    for method in (ViM, GradNorm):
        found = method(some_of_ten, Categorical()).fit([x], progress=False).score(x)
        wanted = method(five, Categorical()).fit([x], progress=False).score(x)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        last = Written(lambda self, x: self.head(x)[:, 5:], head=ten)
        more = Written(lambda self, x: torch.cat([self.head(x), x], 1), head=ten)
        for other in (last, more):
            with pytest.raises(BatchError, match="the first ones"):
                method(other, Categorical()).fit([x], progress=False).score(x)


def test_a_named_head_is_told_from_one_called_later() -> None:
    def with_extra(self: nn.Module, x: Tensor) -> Tensor:
        output = self.head(x)
        self.extra(x)
        return output

    model = Written(with_extra, head=nn.Linear(4, 3), extra=nn.Linear(4, 3)).double()
    plain = GradNorm(model.head, Categorical()).score(noise(9, 4))
    with pytest.raises(BatchError, match="its layer 'extra' makes"):
        GradNorm(model, Categorical()).score(noise(9, 4))
    found = GradNorm(model, Categorical(), layer="head").score(noise(9, 4))
    assert torch.equal(found, plain)


def test_features_of_half_precision_models_pass_for_those_of_the_head() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)).bfloat16()
    x = noise(40, 64).bfloat16()
    assert GradNorm(model, Categorical()).score(x).isfinite().all()
    assert ViM(model, Categorical()).fit([x], progress=False).score(x).isfinite().all()


def test_models_made_in_inference_mode_are_no_exception() -> None:
    plain = network("categorical")
    with torch.inference_mode():
        model = network("categorical")
    for method in (GradNorm, ViM, Mahalanobis):
        found, wanted = (
            method(m, Categorical()).fit(training_data("categorical"), progress=False)
            for m in (model, plain)
        )
        assert torch.equal(found.score(some()), wanted.score(some()))


@pytest.mark.parametrize("method", [Mahalanobis, KNN, Residual])
def test_samples_of_another_size_are_refused(method: type) -> None:
    model = Written(lambda self, x: self.head(x).mean(1), head=nn.Linear(4, 1)).double()
    options = {"k": 3} if method is KNN else {}
    made = method(model, Gaussian(), **options)
    with pytest.raises(BatchError, match=r"expected 20 features .* got 24"):
        made.fit([noise(9, 5, 4), noise(9, 6, 4)], progress=False)
    made.fit([noise(9, 5, 4)], progress=False)
    with pytest.raises(BatchError, match=r"expected 20 features .* got 8"):
        made.score(noise(3, 2, 4))


@pytest.mark.parametrize("method", [Mahalanobis, KNN, Residual, ViM])
def test_training_data_with_nan_is_refused(method: type) -> None:
    data = training_data("categorical")
    data[2][0][3, 0, 1, 1] = torch.nan
    with pytest.raises(NonFiniteError, match=r"finite features, got .* in row 3"):
        method(network("categorical"), Categorical()).fit(data, progress=False)


@pytest.mark.parametrize("method", [KNN, Residual, ViM])
def test_no_targets_are_needed_where_no_classes_are(method: type) -> None:
    bare = [x for x, _ in training_data("categorical")]
    options = {"k": 3} if method is KNN else {}
    made = method(network("categorical"), Categorical(), **options)
    wanted = made.fit(training_data("categorical"), progress=False).score(some())
    assert torch.equal(made.fit(bare, progress=False).score(some()), wanted)


def test_mahalanobis_needs_targets_for_classes_only() -> None:
    bare = [x for x, _ in training_data("gaussian")]
    Mahalanobis(network("gaussian"), Gaussian()).fit(bare, progress=False)
    with pytest.raises(BatchError, match="with 8 targets"):
        Mahalanobis(network("categorical"), Categorical()).fit(bare, progress=False)


@pytest.mark.parametrize(
    ("targets", "got"),
    [
        (torch.tensor([0, 1, 3]), r"values 0 to 3 of shape \(3,\)"),
        (torch.tensor([0, -100, 1]), "values -100 to 1"),
        (torch.tensor([0.0, 0.5, 1.0]), "values 0 to 1"),
        (torch.eye(3), r"values 0 to 1 of shape \(3, 3\).*argmax"),
    ],
)
def test_targets_must_be_class_indices(targets: Tensor, got: str) -> None:
    method = Mahalanobis(nn.Linear(4, 3).double(), Categorical())
    with pytest.raises(BatchError, match=f"class index from 0 to 2 per sample.*{got}"):
        method.fit([(noise(3, 4), targets)], progress=False)


def test_mahalanobis_of_several_variables_is_refused() -> None:
    method = Mahalanobis(nn.Linear(4, 2).double(), Bernoulli())
    with pytest.raises(BatchError, match="one variable"):
        method.fit([(noise(9, 4), torch.ones(9, 2))], progress=False)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6])
def test_features_that_never_vary_are_refused(constant: float) -> None:
    x = torch.full((9, 4), constant, dtype=torch.float64)
    method = Mahalanobis(nn.Linear(4, 1).double(), Gaussian())
    with pytest.raises(BatchError, match="vary within a class"):
        method.fit([x, x[:5]], progress=False)


def test_options_of_knn_are_checked() -> None:
    model = nn.Linear(4, 1).double()
    for options, said in (({"k": 0}, "k >= 1"), ({"k": 5, "most": 4}, "1 <= k <= most")):
        with pytest.raises(OptionError, match=said):
            KNN(model, Gaussian(), **options)
    with pytest.raises(BatchError, match=r"at least k=50 training samples, got 9.*k=9"):
        KNN(model, Gaussian()).fit([noise(9, 4)], progress=False)


@pytest.mark.parametrize("method", [ViM, Residual])
def test_the_number_of_components_is_checked(method: type) -> None:
    model = nn.Linear(4, 3).double()
    with pytest.raises(OptionError, match="dim >= 1"):
        method(model, Categorical(), dim=0)
    with pytest.raises(OptionError, match=r"number of features, 4, got 4; type dim=2"):
        method(model, Categorical(), dim=4).fit([noise(9, 4)], progress=False)


def test_the_default_number_of_components_leaves_some_outside() -> None:
    widths = [1, 2, 5, 767, 768, 2047, 2048, 4096]
    assert [settled_dim(None, m) for m in widths] == [0, 1, 2, 383, 512, 512, 1000, 1000]


def test_vim_reads_the_data_twice() -> None:
    method = ViM(network("categorical"), Categorical())
    with pytest.raises(OptionError, match="more than once, as ViM needs"):
        method.fit(iter(training_data("categorical")), progress=False)
    assert "not fitted" in repr(method)


def test_vim_needs_something_outside() -> None:
    flat = noise(20, 2) @ noise(2, 6, seed=1)
    head = nn.Linear(6, 3, bias=False).double()
    with pytest.raises(OptionError, match=r"dim below 2, .* got 3.*smaller dim"):
        ViM(head, Categorical()).fit([flat], progress=False)
    ViM(head, Categorical(), dim=1).fit([flat], progress=False)


def test_vim_needs_a_positive_scale() -> None:
    head = nn.Linear(4, 3).double()
    with torch.no_grad():
        head.bias.sub_(100)
    with pytest.raises(BatchError, match="positive on average"):
        ViM(head, Categorical()).fit([noise(20, 4)], progress=False)
