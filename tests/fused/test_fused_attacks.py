"""`Fused` where it was wrong, lost state or fell over: odd models, data, processes, changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_fused import WIDTH, covariance, made, network, samples
from torch import Tensor, nn
from torch.nn import functional

from scodkit import Bernoulli, Budget, Categorical, Fused, Gaussian, Monitor, predicted_class
from scodkit.errors import (
    BatchError,
    CalibrationError,
    CaptureWarning,
    MergeError,
    NotFittedError,
    OptionError,
)
from scodkit.fused import features as feature_module
from scodkit.fused import parts as parts_module
from scodkit.fused.features import FeatureBank
from scodkit.scoring.compiled import Captured
from scodkit.scoring.evidence import energy, standardised_logit
from together import run

# --- Models --------------------------------------------------------------------------------


class Ended(nn.Module):
    """A network that ends in a layer, and something done with what that makes."""

    def __init__(self, head: nn.Module, act: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh())
        self.head = head
        self.act = act
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        made = self.head(self.body(x))
        return made if self.act is None else self.act(made)


class BiasFirst(nn.Linear):
    """A layer whose bias is registered before its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        weight = self.weight
        del self.weight
        self.weight = weight


class Scaling(nn.Linear):
    """A layer that is no longer linear in the way of its parent."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class Fixed(nn.Linear):
    """A layer whose weight is a buffer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", weight)


def masked(logits: Tensor) -> Tensor:
    logits[:, 2] = -20.0
    return logits


def hooked() -> nn.Linear:
    layer = nn.Linear(12, 3)
    layer.register_forward_hook(lambda module, args, output: 3 * output)
    return layer


def given_forward() -> nn.Linear:
    layer = nn.Linear(12, 3)
    layer.forward = lambda x: 3 * functional.linear(x, layer.weight, layer.bias)  # type: ignore[method-assign]
    return layer


class Keyed(nn.Module):
    """Two layers, of which the name of one is a pattern that matches the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleDict({"a[0]": nn.Linear(WIDTH, 3), "a0": nn.Linear(WIDTH, 3)})
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["a[0]"](x)


ENDS: dict[str, tuple[Any, bool]] = {
    "bias first": (lambda: Ended(BiasFirst(12, 3)), True),
    "scaling subclass": (lambda: Ended(Scaling(12, 3)), False),
    "weight in a buffer": (lambda: Ended(Fixed(12, 3)), False),
    "scaled in place": (lambda: Ended(nn.Linear(12, 3), lambda z: z.mul_(3)), False),
    "masked in place": (lambda: Ended(nn.Linear(12, 3), masked), False),
    "scaled by a hook": (lambda: Ended(hooked()), False),
    "forward of its own": (lambda: Ended(given_forward()), False),
    "weight norm": (
        lambda: Ended(nn.utils.parametrizations.weight_norm(nn.Linear(12, 3))),
        False,
    ),
    "a name with brackets": (Keyed, True),
}


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize("kind", ENDS)
def test_a_closed_form_is_of_what_the_model_computes(kind: str) -> None:
    build, closed = ENDS[kind]
    fused = made(build(), Categorical())
    assert fused._ready().closed == closed
    x = samples(3, 5)
    found = fused.parts(x)["standardised logit"]
    for i, one in enumerate(x):
        z = fused.model(one[None]).detach()[0]
        expected = -(z.max() - z.mean()) / covariance(fused.monitor, one).trace().sqrt()
        torch.testing.assert_close(found[i], expected, rtol=1e-6, atol=1e-9)


def test_features_given_by_keyword_are_those_of_the_last_layer() -> None:
    model = Ended(nn.Linear(12, 3))
    model.forward = lambda x: model.head(input=model.body(x))  # type: ignore[method-assign]
    assert made(model, Categorical()).layer_name == "head"


class Attending(nn.Module):
    """A classifier of tokens, whose layers are given nested tensors where some are padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encode(self.embed(ids), src_key_padding_mask=mask == 0)[:, 0])


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_layers_may_be_given_nested_tensors() -> None:
    def batch(count: int, seed: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 30, (count, 6), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones(count, 6, dtype=torch.int64)
        mask[::2, 4:] = 0
        return {"ids": ids, "mask": mask}

    fused = Fused(Attending(), Categorical()).fit([batch(100, 1)], progress=False)
    assert fused.layer_name == "head"
    fused.calibrate([batch(100, 2)], progress=False)
    assert bool(fused.score(batch(5, 3)).isfinite().all())


def test_half_precision_inside_and_single_outside() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = network().bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x.bfloat16()).float()

    fused = Fused(Wide(), Categorical()).fit([samples(100, 1).float()], progress=False)
    fused.calibrate([samples(100, 2).float()], progress=False)
    assert bool(fused.score(samples(5, 3).float()).isfinite().all())
    assert fused.monitor.selftest(samples(5, 3).float()).ok


def test_maps_are_averaged_over_positions_before_a_pooling_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    ).double()
    x = torch.randn(60, 1, 8, 8, dtype=torch.float64)
    by_name = Fused(model, Categorical(), layer="2").fit([x], progress=False).parts(x)
    for name, part in Fused(model, Categorical()).fit([x], progress=False).parts(x).items():
        if name != "standardised logit":  # of other weights
            torch.testing.assert_close(by_name[name], part)


def test_a_layer_is_taken_by_its_name_or_refused() -> None:
    assert made(network(), Categorical(), layer="").layer_name == ""
    embedding = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))
    ids = torch.randint(9, (50, 5), generator=torch.Generator().manual_seed(0))
    assert Fused(embedding, Categorical()).fit([ids], progress=False).layer_name == "2"
    with pytest.raises(BatchError, match="floating-point tensor"):
        Fused(embedding, Categorical(), layer="0").fit([ids], progress=False)


# --- Numbers -------------------------------------------------------------------------------


def test_log_probabilities_have_no_energy_that_rounding_makes() -> None:
    model = nn.Sequential(*network(), nn.LogSoftmax(1)).float()
    assert bool((energy(Categorical(), model(samples(500, 1).float())) == 0).all())
    fused = Fused(model, Categorical()).fit([samples(300, 1).float()], progress=False)
    fused.calibrate([samples(300, 2).float()], progress=False)
    found = fused.explain(samples(500, 3).float())
    assert not found.contributions[:, fused.names.index("energy")].any()


def test_logits_that_no_weight_changes_are_finite() -> None:
    logits = torch.tensor([[9.0, 0.0]], dtype=torch.float64)
    nothing = torch.zeros(1, dtype=torch.float64)
    for likelihood in (Categorical(), Bernoulli()):
        assert bool(standardised_logit(likelihood, logits, nothing).isfinite().all())


def test_variances_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, x = made(network(), Categorical()), samples(9, 4)
    whole = fused.parts(x)["standardised logit"]
    rows: list[int] = []
    along = feature_module.activations_along

    def counted(a: Tensor, matrix: Tensor) -> Tensor:
        rows.append(len(a))
        return along(a, matrix)

    monkeypatch.setattr(feature_module, "activations_along", counted)
    monkeypatch.setattr(feature_module, "_AT_ONCE", 1)
    torch.testing.assert_close(fused.parts(x)["standardised logit"], whole)
    assert rows == [1] * 9


def test_repeated_samples_fall_on_both_sides_of_the_split() -> None:
    # or new samples of a value that p-values do not count would be false alarms, all of them
    values = samples(8, 1)
    fused = Fused(network(), Categorical()).fit([samples(160, 2)], progress=False)
    fused.calibrate([values.repeat(100, 1)], progress=False)
    assert fused.calibration is not None
    for score in fused.score(values):
        count = int(((fused.calibration.scores - score).abs() < 1e-9).sum())
        # of a hundred samples alike three in four are counted, give or take a binomial's spread
        assert abs(count - 75) < 5 * (100 * 0.75 * 0.25) ** 0.5


def test_samples_that_come_often_do_not_crowd_out_others() -> None:
    values = torch.randn(16, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bank, labels = FeatureBank(1, 20), torch.zeros(16, dtype=torch.int64)
    for _ in range(10):
        bank.add(values, labels, torch.arange(16))
    assert torch.equal(bank.samples, functional.normalize(values).float())
    assert bank.keys.tolist() == list(range(16))


def test_evidence_of_samples_that_are_not_finite_is_the_worst_there_is() -> None:
    x = samples(3, 2)
    x[1] = torch.nan
    for likelihood in (Categorical(), Bernoulli()):
        monitor = Monitor(network(), likelihood).fit([samples(100, 1)], progress=False)
        found = monitor.evidence(x)
        assert found.standardised_logit is not None
        assert float(found.standardised_logit[1]) == 0.0
        assert float(found.unexplained_share[1]) == 1.0
        assert bool((found.standardised_logit[::2] < 0).all())


# --- Data ----------------------------------------------------------------------------------


def test_batches_without_a_finite_sample_are_skipped() -> None:
    bad, good = torch.full((10, WIDTH), torch.nan).double(), samples(100, 1)
    expected = Fused(network(), Categorical()).fit([good], progress=False).parts(samples(5, 2))
    for batches in ([bad, good], [good, bad]):
        fused = Fused(network(), Categorical()).fit(batches, progress=False, on_bad="skip")
        assert fused.monitor.skipped == 10
        for name, part in fused.parts(samples(5, 2)).items():
            torch.testing.assert_close(part, expected[name])
    budget = Budget(milliseconds=1e9)
    timed = Fused(network(), Gaussian(), budget=budget)
    assert timed.fit([bad, good], progress=False, on_bad="skip").monitor.skipped == 10


def test_held_out_samples_that_are_all_alike_are_refused() -> None:
    for dtype in (torch.float32, torch.float64):
        fused = Fused(network().to(dtype), Categorical())
        fused.fit([samples(100, 1).to(dtype)], progress=False)
        with pytest.raises(CalibrationError, match="that differ"):
            fused.calibrate([torch.ones(50, WIDTH, dtype=dtype)], progress=False)


def test_options_are_refused_at_once() -> None:
    with pytest.raises(OptionError, match="a Budget, got 5"):
        Fused(network(), Categorical(), budget=5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="bytes as a whole number"):
        Budget(bytes=2**63)  # more than a file can say
    with pytest.raises(OptionError, match="milliseconds > 0, got '5'"):
        Budget(milliseconds="5")  # type: ignore[arg-type]


# --- State ---------------------------------------------------------------------------------


class Sized(nn.Module):
    """A network that takes samples of any size, and a layer whose input is as wide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look = nn.Identity()
        self.last = nn.Linear(1, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.look(x).mean(1, keepdim=True))


def test_features_of_another_size_leave_all_as_it_was() -> None:
    model, x = Sized(), samples(60, 1)
    fused = Fused(model, Categorical(), layer="look").fit([x], progress=False)
    fused.calibrate([samples(60, 2)], progress=False)
    before, narrow = fused.score(x[:5]), samples(60, 3)[:, :3]
    with pytest.raises(BatchError, match="expected 4 features per sample"):
        fused.score(narrow)
    with pytest.raises(BatchError, match="expected 4 features per sample"):
        fused.update([narrow], progress=False)
    other = Fused(model, Categorical(), layer="look").fit([narrow], progress=False)
    with pytest.raises(MergeError, match="as many classes and features"):
        fused.merge(other)
    assert torch.equal(fused.score(x[:5]), before)
    assert fused.monitor.basis.num_data == 60


def test_merges_are_of_one_kind_and_choice() -> None:
    model = network()
    fused = Fused(model, Categorical()).fit([samples(50, 1)], progress=False)
    monitor = Monitor(model, Categorical()).fit([samples(50, 2)], progress=False)
    with pytest.raises(MergeError, match="expected a Fused"):
        fused.merge(monitor)  # type: ignore[arg-type]
    every = Fused(model, Categorical(), parameters="all").fit([samples(50, 2)], progress=False)
    with pytest.raises(MergeError, match="other parameters"):
        fused.merge(every)
    # one that keeps fewer features has dropped those with larger keys
    large, small = FeatureBank(1, 100), FeatureBank(1, 10)
    keys = torch.arange(80)
    for bank, own in ((large, keys[::2]), (small, keys[1::2])):
        bank.add(own[:, None].double() - 40.5, torch.zeros_like(own), own)
    assert FeatureBank.merged([large, small]).keys.tolist() == list(range(10))


def changed(monitor: Monitor, what: str) -> None:
    if what == "prior_scale":
        monitor.prior_scale = 10.0
    elif what == "rank":
        monitor.rank = 3
    elif what == "update":
        monitor.update([samples(50, 8)], progress=False)
    else:
        monitor.compress()


@pytest.mark.parametrize("what", ["prior_scale", "rank", "update", "compress"])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()])
def test_a_monitor_that_was_changed_needs_a_calibration(likelihood: Any, what: str) -> None:
    fused, x = made(network(), likelihood), samples(5, 4)
    changed(fused.monitor, what)
    for act in (fused, fused.score, fused.p_value, fused.flag, fused.explain):
        with pytest.raises(NotFittedError, match=r"fused\.calibrate"):
            act(x)
    fused.calibrate([samples(200, 3)], progress=False)
    assert bool(fused.score(x).isfinite().all())


def test_a_recording_is_of_one_fit_and_of_what_is_no_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = network()

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return self.inside(scale * x)

    def recorded(run: Any, example: Any, *, fuse: bool) -> Captured:
        return Captured(lambda tensors, count: run(tensors)[:count], example)

    monkeypatch.setattr(parts_module, "capture", recorded)
    fused = Fused(Scaled(), Categorical(), inputs=lambda batch: batch)
    x = samples(5, 4)
    fused.fit([{"x": samples(100, 1), "scale": 1.0}], progress=False)
    fused.calibrate([{"x": samples(100, 2), "scale": 1.0}], progress=False)
    other = fused.parts({"x": x, "scale": 0.5})
    fused.compile({"x": x, "scale": 1.0})
    for name, part in fused.parts({"x": x, "scale": 0.5}).items():
        torch.testing.assert_close(part, other[name])
    fused.monitor.prior_scale = 10.0
    with pytest.warns(CaptureWarning, match="monitor changed"):
        found = fused.parts({"x": x, "scale": 1.0})["standardised logit"]
    again = Fused(fused.model, Categorical(), inputs=lambda b: b, prior_scale=10.0)
    again.fit([{"x": samples(100, 1), "scale": 1.0}], progress=False)
    torch.testing.assert_close(found, again.parts({"x": x, "scale": 1.0})["standardised logit"])


def test_calibrations_of_the_monitor_are_its_own(tmp_path: Path) -> None:
    fused, x = made(network(), Categorical()), samples(5, 4)
    fused.monitor.calibrate([samples(200, 5)], by=predicted_class, progress=False)
    fused.calibrate([samples(200, 3)], progress=False)
    assert fused.monitor(x).p_value is not None
    fused.save(tmp_path / "plain.scod")
    assert torch.equal(
        Fused.load(tmp_path / "plain.scod", fused.model).p_value(x), fused.p_value(x)
    )
    fused.calibrate([samples(200, 3)], by=predicted_class, progress=False)
    fused.monitor.calibrate([samples(200, 5)], progress=False)
    fused.save(tmp_path / "by.scod")
    loaded = Fused.load(tmp_path / "by.scod", fused.model, by=predicted_class)
    assert torch.equal(loaded.p_value(x), fused.p_value(x))


@pytest.mark.parametrize("parameters", [None, ["0.*", "2.bias"]])
def test_a_loaded_one_fits_again_what_it_was_made_for(tmp_path: Path, parameters: Any) -> None:
    fused = made(network(), Categorical(), parameters=parameters, rank=4)
    fused.save(tmp_path / "fused.scod")
    loaded = Fused.load(tmp_path / "fused.scod", fused.model)
    expected, x = fused.parts(samples(5, 4)), [samples(100, 1), samples(60, 2)]
    for name, part in loaded.fit(x, progress=False).parts(samples(5, 4)).items():
        torch.testing.assert_close(part, expected[name])
    assert loaded.monitor.rank == 4


def test_a_fit_in_inference_mode_goes_on_outside_of_it() -> None:
    with torch.inference_mode():
        fused = made(network(), Categorical())
    fused.update([samples(50, 7)], progress=False)
    assert fused.monitor.basis.num_data == 210


# --- Processes -----------------------------------------------------------------------------


def fit_together(rank: int, count: int, folder: Path) -> None:
    bad = torch.full((5, WIDTH), torch.nan).double()
    first = {"nothing": [], "bad": [bad], "some": [samples(40, 2)]}
    for kind, own in first.items():
        batches = own if rank else [samples(60, 1)]
        for likelihood in (Categorical(), Gaussian()):
            budget = Budget(milliseconds=1.0)
            fused = Fused(network(), likelihood, budget=budget)
            fused.fit(batches, progress=False, on_bad="skip")
            fused.update([] if rank else [samples(30, 4)], progress=False)
            parts = fused.parts(samples(5, 9))
            name = f"{kind}.{type(likelihood).__name__}.{rank}"
            torch.save(torch.stack(list(parts.values())), folder / name)
    nonsense: list[Any] = ["nonsense"] if rank else [samples(60, 1)]
    with pytest.raises(Exception, match="tuple, list or dict"):
        Fused(network(), Categorical()).fit(nonsense, progress=False)


@pytest.mark.slow
def test_processes_get_one_detector_whatever_data_they_have(tmp_path: Path) -> None:
    run(2, fit_together, tmp_path)
    for kind in ("nothing", "bad", "some"):
        for name in ("Categorical", "Gaussian"):
            one, other = (torch.load(tmp_path / f"{kind}.{name}.{rank}") for rank in (0, 1))
            assert torch.equal(one, other)
        alone = Fused(network(), Categorical(), budget=Budget(milliseconds=1.0))
        alone.fit([samples(60, 1), *([samples(40, 2)] if kind == "some" else [])])
        alone.update([samples(30, 4)])
        expected = torch.stack(list(alone.parts(samples(5, 9)).values()))
        torch.testing.assert_close(torch.load(tmp_path / f"{kind}.Categorical.0"), expected)
