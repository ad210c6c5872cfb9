"""Fits by products: the same sums as in rows, whatever happens on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Poisson
from torch.nn import functional as F  # noqa: N812

from cases import CASES
from contracts import dense
from own_derivatives import Custom, OnceOnly
from scodkit import Categorical, Gaussian, LastLayers, Monitor, MonteCarlo
from scodkit.errors import (
    EngineFallbackWarning,
    NonFiniteError,
    OptionError,
    UncertifiedError,
)
from scodkit.factors.choose import choose_jacobian
from scodkit.factors.pieces import MANY
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import select
from scodkit.sketch import Exact, FrequentDirections, Nystrom, Sketch, TwoSided
from together import digits, network, run

NAN = float("nan")


def monitor(sketch: Sketch | None = None, **options) -> Monitor:
    return Monitor(network(), Categorical(), 8, sketch=sketch or Nystrom(size=20), **options)


def fitted(batches, products: bool | None = True, **options) -> Monitor:
    return monitor().fit(batches, progress=False, products=products, **options)


def away(one: Monitor, other: Monitor) -> float:
    """How far the sums of two fits are apart, relative to their size."""
    assert one.fitted.state is not None
    assert other.fitted.state is not None
    expected = other.fitted.state.tensors
    return max(
        float((one.fitted.state.tensors[name] - t).norm() / t.norm())
        for name, t in expected.items()
    )


def batches(count: int = 3) -> list[Tensor]:
    return [digits(9, seed) for seed in range(count)]


# --- Both ways come to the same ------------------------------------------------------------


@pytest.mark.parametrize("sketch", [Nystrom(size=20), TwoSided(size=31)], ids=lambda s: "")
@pytest.mark.parametrize("parameters", ["all", LastLayers(count=1), ["0.*"]])
def test_both_ways_give_one_fit(sketch: Sketch, parameters) -> None:
    rows = monitor(sketch, parameters=parameters).fit(batches(), progress=False, products=False)
    found = monitor(sketch, parameters=parameters).fit(batches(), progress=False, products=True)
    assert away(found, rows) < 1e-9
    torch.testing.assert_close(found.basis.values, rows.basis.values, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        found.score(digits(4, 7)), rows.score(digits(4, 7)), rtol=1e-8, atol=1e-12
    )
    assert not found.basis.certified
    assert found.basis.residual_norm == float("inf")
    assert found.basis.num_data == 27


class Segmenter(nn.Module):
    """A class for every pixel, and a weight that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 5, 3, padding=1)
        self.head = nn.Conv2d(5, 4, 1)
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.head(torch.relu(self.body(x)))


@pytest.mark.parametrize("directions", [None, 1])
def test_a_class_for_every_pixel(directions: int | None) -> None:
    torch.manual_seed(0)
    model = Segmenter().double()
    likelihood = Categorical(class_dim=1, directions=directions)
    ways = [
        Monitor(model, likelihood, 10).fit(batches(2), progress=False, products=way)
        for way in (False, True)
    ]
    assert away(ways[1], ways[0]) < 1e-9


class Transformer(nn.Module):
    """Attention as torch offers it, with kernels for inference and for one derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.layer(x)).reshape(*x.shape[:2], 3, 2, 16).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.head(y.transpose(1, 2).reshape(x.shape).mean(1))


def test_attention_in_float32() -> None:
    torch.manual_seed(0)
    model, x = Transformer().eval(), torch.randn(6, 17, 32)
    torch.backends.mha.set_fastpath_enabled(True)
    own = Network(model)
    with own.evaluating():
        call = Inputs((x,), {})
        assert choose_jacobian(own, select("all", own, call), call) == (True, "")
    ways = [
        Monitor(model, Categorical(), 6).fit([x], progress=False, products=way)
        for way in (False, True)
    ]
    assert away(ways[1], ways[0]) < 1e-4
    assert torch.backends.mha.get_fastpath_enabled()


def test_fits_of_both_ways_add_up() -> None:
    one, two, three = batches()
    whole = fitted([one, two, three], products=False)
    for first, second in ((True, False), (False, True), (True, True)):
        merged = fitted([one], products=first).merge(fitted([two, three], products=second))
        assert away(merged, whole) < 1e-9
        assert not merged.basis.certified
        assert merged.basis.num_data == 27
        assert merged.fitted.state.num_estimated == 9 * first + 18 * second
        assert merged.basis.trace == pytest.approx(whole.basis.trace, rel=0.5)
    assert fitted([one], products=False).merge(fitted([two], products=False)).basis.certified


def test_what_is_estimated_is_remembered_in_files(tmp_path: Path) -> None:
    found = fitted(batches(1))
    found.save(tmp_path / "found.scod")
    loaded = Monitor.load(tmp_path / "found.scod", network())
    with pytest.raises(UncertifiedError):
        loaded.certify(digits(2))
    loaded.update(batches(2)[1:], progress=False)  # a few outputs: in rows
    assert loaded.fitted.state.num_estimated == 9
    assert not loaded.basis.certified
    assert away(loaded, fitted(batches(2))) < 1e-9


def test_captured_curvature_is_at_most_all_of_it() -> None:
    for seed in range(12):  # of which some under-estimate the trace
        sketch = Nystrom(size=100, seed=seed)
        found = Monitor(network(), Gaussian(), 100, sketch=sketch)
        found.fit([digits(4)], progress=False, products=True)
        assert 0.5 < found.basis.captured <= 1 + 1e-9


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_a_fit_in_bfloat16_allows_for_its_rounding(scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale
    x = torch.randn(12, 8)  # of a curvature of less than a hundred ranks
    exact = Monitor(model, Categorical(), 300, sketch=Exact()).fit([x], progress=False).basis
    found = Monitor(model, Categorical(), 90, sketch=Nystrom(size=100))
    found.fit([x], progress=False, products=True, precision=torch.bfloat16)
    basis, largest = found.basis, float(exact.values[0])
    gap = dense(basis) - dense(exact)
    assert float(torch.linalg.eigvalsh(gap)[-1]) < 1e-2 * largest
    assert float(gap.norm()) < 0.05 * float(dense(exact).norm())
    assert 1e-3 * largest < basis.slack < 1e-1 * largest


# --- Samples that are not finite -----------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2**30])
@pytest.mark.parametrize("bad", [[3], [0, 8], list(range(9))])
def test_bad_samples_are_skipped_or_refused_as_in_rows(bad: list[int], budget: int) -> None:
    spoilt = digits(9, 1)
    spoilt[bad, 0, 2, 2] = NAN
    clean = [digits(9, 0), spoilt[[i for i in range(9) if i not in bad]]]
    clean = [batch for batch in clean if len(batch)]
    own = monitor()
    own.memory_budget = budget
    own.fit([digits(9, 0), spoilt], progress=False, products=True, on_bad="skip")
    assert (own.skipped, own.basis.num_data) == (len(bad), 18 - len(bad))
    assert away(own, fitted(clean, products=False)) < 1e-9
    messages = []
    for products in (True, False):
        with pytest.raises(NonFiniteError) as caught:
            fitted([digits(9, 0), spoilt], products=products)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert f"sample {9 + bad[0]} (batch 1, row {bad[0]})" in messages[0]


@pytest.mark.parametrize("bad", [[0], [0, 2]])
def test_a_fit_may_begin_with_bad_samples(bad: list[int]) -> None:
    spoilt = digits(9, 1)
    spoilt[bad] = NAN
    own = fitted([spoilt, digits(9, 0)], on_bad="skip")
    clean = [spoilt[[i for i in range(9) if i not in bad]], digits(9, 0)]
    assert own.skipped == len(bad)
    assert away(own, fitted(clean, products=False)) < 1e-9


class Steep(nn.Module):
    """The gradient of its first output is infinite, or undefined, where the input is zero."""

    def __init__(self, defined: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.defined = defined

    def forward(self, x: Tensor) -> Tensor:
        inner = self.weight[0] * x[:, 0]
        root = inner.abs().sqrt()
        if not self.defined:  # 0 times infinity in a backward pass, nothing in a forward one
            root = torch.where(inner == 0, inner, root)
        return torch.stack([root, self.weight[1] * x[:, 1]], 1)


@pytest.mark.parametrize("defined", [True, False])
@pytest.mark.parametrize("budget", [1, 2**30])
def test_gradients_that_are_not_finite_are_noticed(defined: bool, budget: int) -> None:
    x = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0], [0.0, 3.0]])
    own = Monitor(Steep(defined), Gaussian(), rank=2)
    own.memory_budget = budget
    own.fit([x], on_bad="skip", progress=False, products=True)
    clean = Monitor(Steep(defined), Gaussian(), rank=2).fit([x[:3]], progress=False)
    assert (own.skipped, own.basis.num_data) == (1, 3)
    assert own.basis.trace == pytest.approx(clean.basis.trace)
    with pytest.raises(NonFiniteError, match="in the gradients of sample 3"):
        own.fit([x], progress=False, products=True)


def test_products_that_overflow_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(NonFiniteError, match=r"overflow in torch\.float32"):
        Monitor(model, Gaussian(1e-30), 2).fit(
            [torch.full((3, 2), 1e12)], progress=False, products=True
        )


# --- Interrupted, and together -------------------------------------------------------------


def test_an_interrupted_fit_goes_on_where_it_was(tmp_path: Path) -> None:
    def cut_off():
        yield from batches()[:2]
        raise KeyboardInterrupt

    path = tmp_path / "fit.ckpt"
    with pytest.raises(KeyboardInterrupt):
        fitted(cut_off(), checkpoint=path, every=1)
    resumed = fitted((batch for batch in batches()), checkpoint=path, every=1)
    whole = fitted(batches())
    assert torch.equal(resumed.basis.vectors, whole.basis.vectors)
    assert resumed.basis.trace == whole.basis.trace
    assert resumed.fitted.state.num_estimated == 27
    assert not resumed.basis.certified


def fit_uneven(rank: int, count: int, folder: Path) -> None:
    sizes = (44, 0, 17)
    own = digits().split(list(sizes))[rank]
    for name, sketch in (("nystrom", Nystrom(size=20)), ("two_sided", TwoSided(size=31))):
        found = monitor(sketch)
        found.fit(list(own.split(7)) if len(own) else [], progress=False, products=True)
        found.save(folder / f"{name}.{rank}")


@pytest.mark.slow
def test_processes_add_up_their_products(tmp_path: Path) -> None:
    run(3, fit_uneven, tmp_path)
    for name, sketch in (("nystrom", Nystrom(size=20)), ("two_sided", TwoSided(size=31))):
        alone = monitor(sketch).fit([digits()], progress=False, products=True)
        for rank in range(3):
            found = Monitor.load(tmp_path / f"{name}.{rank}", network())
            assert away(found, alone) < 1e-9
            assert found.fitted.state.num_estimated == found.basis.num_data == 61
            assert found.basis.trace == pytest.approx(alone.basis.trace, rel=1e-9)
            assert not found.basis.certified


# --- Which way is taken --------------------------------------------------------------------


def wide(outputs: int, hidden: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def test_the_cheaper_way_is_taken_for_many_outputs() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    many = Monitor(wide(MANY + 1), Categorical(), 5)
    plan = many.plan(x)
    assert plan.by_products
    assert plan.costs is not None
    assert plan.costs.products.operations * 4 < plan.costs.rows.operations
    assert "matrix-free (" in str(plan)
    assert "times fewer operations)" in str(plan)
    many.fit([x], progress=False)
    assert many.fitted.state.num_estimated == 8
    rows = Monitor(wide(MANY + 1), Categorical(), 5).fit([x], progress=False, products=False)
    assert rows.basis.certified
    assert away(many, rows) < 1e-9
    few = Monitor(wide(MANY), Categorical(), 5)
    assert few.plan(x).costs is None
    assert few.fit([x], progress=False).basis.certified


def test_operations_are_counted() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    costs = Monitor(wide(200), Categorical(), 5).plan(x).costs
    assert costs is not None
    forward = 2 * (4 * 6 + 6 * 200)
    backward = forward + 2 * 6 * 200  # weights of both layers, inputs of the second
    size = 4 * 6 + 6 + 6 * 200 + 200
    assert costs.rows.operations == 8 * (forward + 199 * backward + 4 * 199 * size * 10)
    assert costs.products.operations == 8 * (2 * forward + 20 * backward)
    assert (costs.rows.passes, costs.products.passes) == (8 * 200, 8 * 22)


def test_rows_are_taken_where_products_cost_as_much() -> None:
    # weights that are used at thousands of places, and more columns than outputs
    model = nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 120)
    )
    x = torch.randn(2, 1, 64, 64)
    plan = Monitor(model, Categorical(), 200, parameters=["0.*"]).plan(x)
    assert plan.costs is not None
    assert not plan.by_products
    assert "explicit gradients (matrix-free would take" in str(plan)


@pytest.mark.parametrize(
    ("likelihood", "sketch", "model", "words"),
    [
        (Gaussian(), Exact(), wide(3), r"Exact\(\) takes rows only: type sketch=Nystrom"),
        (Gaussian(), FrequentDirections(), wide(3), "takes rows only"),
        (MonteCarlo(lambda o: Poisson(o.exp())), None, wide(3), "draws a few rows"),
        (Gaussian(), None, wide(3).bfloat16(), "half precision"),
        (Gaussian(), None, Custom(OnceOnly), "all were passed over: all vectors at once"),
    ],
)
def test_products_are_refused_where_there_are_none(likelihood, sketch, model, words) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(5, model.inner.in_features if hasattr(model, "inner") else 4, dtype=dtype)
    own = Monitor(model, likelihood, 3, sketch=sketch)
    with pytest.raises(OptionError, match=words):
        own.fit([x], progress=False, products=True)


class OnceOnlyWide(Custom):
    """Many outputs, through which no product goes."""

    def __init__(self) -> None:
        super().__init__(OnceOnly)
        self.outer = nn.Linear(4, 150)


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
def test_models_without_products_are_left_to_rows() -> None:
    own = Monitor(OnceOnlyWide(), Categorical(), 3)
    with pytest.warns(EngineFallbackWarning, match="fitted in rows, more slowly"):
        own.fit([torch.randn(4, 3)], progress=False)
    assert own.basis.certified


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
def test_every_kind_of_model_is_fitted_by_products() -> None:
    for case in CASES:
        model, call = case.model(4), case.inputs(5, 4)
        before = {name: t.clone() for name, t in model.state_dict().items()}
        batch = call.args[0] if call.args else dict(call.kwargs)
        Monitor(model, Categorical(), 3).fit([batch], progress=False, products=True)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
