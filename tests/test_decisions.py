"""The monitor's decisions: groups, confidence, ranks, warnings, summaries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from draws import noise
from engines import close, randomised
from scodkit import Calibration, Categorical, Gaussian, Monitor, predicted_class
from scodkit.alarms import discoveries
from scodkit.errors import (
    BatchError,
    CalibrationError,
    CalibrationWarning,
    MismatchError,
    NotFittedError,
    OptionError,
)
from scodkit.sketch import Exact, Nystrom, TwoSided

TRAIN, HELD, TEST = noise(60, 3, seed=1), noise(400, 3, seed=2), noise(50, 3, seed=3)


def net(outputs: int = 3) -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)))


def fitted(rank: int = 12, outputs: int = 3, **options) -> Monitor:
    monitor = Monitor(net(outputs), Categorical(), rank=rank, **options)
    return monitor.fit([TRAIN], progress=False)


class TestGroups:
    def test_each_class_is_judged_by_its_own(self):
        monitor = fitted().calibrate(HELD.split(90), by=predicted_class, progress=False)
        held, asked = monitor.model(HELD).argmax(1), monitor.model(TEST).argmax(1)
        scores, new = monitor.score(HELD), monitor.score(TEST)
        scored = monitor(TEST)
        for i in range(len(TEST)):
            own = scores[held == asked[i]]
            expected = (1 + int((own >= new[i]).sum())) / (1 + len(own))
            assert float(scored.p_value[i]) == pytest.approx(expected)
        assert torch.equal(monitor.flag(TEST, 0.1), scored.p_value <= 0.1)

    def test_saved_and_loaded_with_their_function(self, path):
        monitor = fitted().calibrate([HELD], by=predicted_class, progress=False)
        monitor.save(path)
        with pytest.raises(MismatchError, match="by="):
            Monitor.load(path, monitor.model)
        again = Monitor.load(path, monitor.model, by=predicted_class)
        assert torch.equal(again(TEST).p_value, monitor(TEST).p_value)

    def test_forgotten_with_the_calibration(self):
        monitor = fitted().calibrate([HELD], by=predicted_class, progress=False)
        monitor.prior_scale = 2.0
        assert monitor(TEST).p_value is None
        monitor.calibrate([HELD], progress=False)
        assert monitor(TEST).p_value is not None
        assert monitor.calibration.groups is None

    @pytest.mark.parametrize(
        "by",
        [
            lambda output: output.sum(1),
            lambda output: output.argmax(1)[:1],
            lambda output: 0,
            lambda output: output.argmax(1, keepdim=True),
        ],
        ids=["floats", "one", "a number", "a column"],
    )
    def test_bad_ones_are_refused_and_nothing_changes(self, by):
        monitor = fitted().calibrate([HELD], progress=False)
        before = monitor.calibration
        with pytest.raises(CalibrationError, match="one integer group per sample"):
            monitor.calibrate([HELD], by=by, progress=False)
        assert monitor.calibration is before
        monitor(TEST)

    def test_a_nan_is_flagged_whatever_was_held_out(self):
        # class 0, the one that argmax takes a NaN for, was never held out
        monitor = fitted()
        classes = monitor.model(HELD).argmax(1)
        monitor.calibrate([HELD[classes != 0]], by=predicted_class, progress=False)
        smallest = 1 / (monitor.calibration.num_data + 1)
        bad = torch.full((2, 3), float("nan")).double()
        assert monitor.model(bad).argmax(1).tolist() == [0, 0]
        assert monitor.flag(bad).all()
        assert monitor(bad).p_value.tolist() == [smallest] * 2
        assert discoveries(monitor(bad).p_value).all()

    def test_a_class_never_held_out_is_judged_against_all(self):
        monitor = fitted()
        classes, new = monitor.model(HELD).argmax(1), monitor.model(TEST).argmax(1)
        monitor.calibrate([HELD[classes != 0]], by=predicted_class, progress=False)
        with pytest.warns(CalibrationWarning, match="0 of group 0") as told:
            scored, flagged = monitor(TEST), monitor.flag(TEST, 0.1)
        assert len(told) == 1
        wanted = Calibration(monitor.calibration.scores).p_value(scored.score)
        assert torch.equal(scored.p_value[new == 0], wanted[new == 0])
        assert torch.equal(flagged, scored.p_value <= 0.1)
        assert 0 < scored.p_value[new == 0].min() < 0.5

    def test_a_single_logit_has_two_classes(self):
        assert predicted_class(torch.tensor([[0.5], [-0.5]])).tolist() == [1, 0]


class TestCalibrating:
    def test_a_confident_threshold_flags_less(self):
        monitor = fitted().calibrate([HELD], progress=False)
        sure, plain = (monitor.flag(TEST, 0.1, confidence=c) for c in (0.99, None))
        assert (sure <= plain).all()
        limit = monitor.calibration.threshold(0.1, confidence=0.99)
        assert torch.equal(sure, monitor.score(TEST) > limit)

    def test_nothing_is_lost_when_it_fails(self):
        monitor = fitted().calibrate([HELD], progress=False)
        before = monitor.calibration
        bad = HELD.clone()
        bad[3, 1] = float("nan")
        refused = [
            ([bad], CalibrationError, "expected finite held-out scores, got 1 of 400"),
            ([], BatchError, "expected at least one batch"),
            ([HELD[:0]], CalibrationError, "at least one held-out sample"),
        ]
        for loader, error, said in refused:
            with pytest.raises(error, match=said):
                monitor.calibrate(loader, progress=False)
            assert monitor.calibration is before
        with pytest.raises(NotFittedError, match=r"fit\(train_loader\)"):
            Monitor(net(), Categorical()).calibrate([HELD], progress=False)

    def test_inputs_of_another_dtype_are_explained(self):
        monitor = fitted()
        before = monitor.score(TEST)
        for use in (monitor.score, lambda x: monitor.calibrate([x], progress=False)):
            with pytest.raises(BatchError, match=r"expected inputs in torch.float64.*x\.to"):
                use(TEST.float())
        assert torch.equal(monitor.score(TEST), before)
        with pytest.raises(BatchError, match=r"torch.float64"):
            Monitor(net(), Categorical()).fit([TRAIN.float()], progress=False)


class TestRank:
    @pytest.mark.parametrize("sketch", [Nystrom(24), TwoSided(40), Exact()], ids=str)
    def test_lowered_after_the_fit_is_a_fit_of_that_rank(self, sketch):
        monitor, small = fitted(rank=12, sketch=sketch), fitted(rank=5, sketch=sketch)
        monitor.calibrate([HELD], progress=False)
        monitor.rank = 5
        assert monitor.rank == monitor.basis.rank == 5
        assert monitor.calibration is None
        close(monitor.score(TEST), small.score(TEST))
        monitor.update([HELD[:20]], progress=False)
        assert monitor.basis.rank == 5

    def test_certified_all_the_same(self):
        monitor = fitted(rank=12, sketch=Nystrom(24))
        exact = fitted(rank=200, sketch=Exact()).score(TEST)
        monitor.rank = 3
        certificate = monitor.certify(TEST)
        assert (certificate.lower <= exact + 1e-9).all()
        assert (exact <= certificate.upper + 1e-9).all()

    def test_not_raised(self):
        monitor = fitted(rank=5)
        before = monitor.score(TEST)
        with pytest.raises(OptionError, match=r"at most 5.*fit again"):
            monitor.rank = 6
        with pytest.raises(OptionError, match="rank >= 1"):
            monitor.rank = 0
        assert monitor.rank == 5
        assert torch.equal(monitor.score(TEST), before)

    def test_before_the_fit_any_will_do(self):
        monitor = Monitor(net(), Categorical(), rank=3)
        monitor.rank = 7
        assert monitor.fit([TRAIN], progress=False).basis.rank == 7


@pytest.mark.parametrize("sketch", [Nystrom(60), TwoSided(100)], ids=str)
def test_an_update_is_a_fit_on_the_union_in_float32(sketch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)
    ).eval()
    *batches, test = (torch.randn(size, 1, 8, 8) for size in (128, 100, 64, 50))
    whole = Monitor(model, Categorical(), rank=30, sketch=sketch).fit(batches, progress=False)
    grown = Monitor(model, Categorical(), rank=30, sketch=sketch)
    grown.fit(batches[:1], progress=False)
    for batch in batches[1:]:
        grown.update([batch], progress=False)
    torch.testing.assert_close(grown.score(test), whole.score(test), rtol=1e-5, atol=0)


class TestSummary:
    def test_says_what_is_known(self):
        monitor = fitted().calibrate([HELD], progress=False)
        summary = monitor.summary()
        assert summary.num_data == 60
        assert summary.captured == pytest.approx(monitor.basis.captured)
        shares = monitor.basis.values / monitor.basis.values.sum()
        entropy = -(shares * shares.log()).sum()
        assert summary.effective_rank == pytest.approx(float(entropy.exp()))
        assert torch.equal(summary.scores, monitor.calibration.scores)
        assert summary.explained is None
        assert "captured curvature" in str(summary)
        assert "45, by layer: 0 (24), 2 (21)" in str(summary)
        assert "upper bounds, comparable within one monitor, not across ranks" in str(summary)
        assert summary.plot().axes

    def test_says_how_wide_the_certificate_is(self):
        monitor = fitted(rank=2)
        summary, found = monitor.summary(TEST), monitor.certify(TEST)
        lower, upper = (float(side.quantile(0.5)) for side in (found.lower, found.upper))
        assert summary.bounds == pytest.approx((lower, upper), rel=0.1)
        apart = f"bounds {summary.bounds[1] / summary.bounds[0]:.2g} times apart"
        assert apart in str(summary)
        assert monitor.summary().bounds is None
        other = fitted(rank=2, sketch=TwoSided(9)).summary(TEST)
        assert other.bounds is None
        assert "upper bound" not in str(other)

    @pytest.mark.filterwarnings("ignore::scodkit.errors.SuspiciousInputWarning")
    @pytest.mark.parametrize("scale", [0.0, 255.0, 1e4, 1e30, float("nan"), float("inf")])
    def test_prints_no_long_numbers(self, scale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
        with torch.no_grad():
            model[2].weight *= 200  # sure of everything: L is too small for a float
        x = torch.randn(60, 3)
        monitor = Monitor(model, Categorical(), rank=12).fit([x], progress=False)
        summary = monitor.summary(scale * x)
        assert summary.explained is None or 0 <= summary.explained <= 1
        assert max(map(len, str(summary).split())) < 20
        assert "nan" not in str(summary)
        str(monitor.summary(x[:0]))

    def test_many_layers_are_not_all_named(self):
        layers = [nn.Linear(3, 3) for _ in range(20)]
        monitor = Monitor(randomised(nn.Sequential(*layers)), Gaussian(), rank=3)
        monitor.fit([TRAIN], progress=False)
        assert "5 (12), 14 more" in str(monitor.summary())
        bare = Monitor(randomised(nn.Linear(3, 2)), Gaussian(), rank=3)
        told = str(bare.fit([TRAIN], progress=False).summary())
        assert "8, by layer: the model itself (8)" in told

    def test_looks_at_new_samples(self):
        monitor = fitted()
        assert monitor.summary().scores is None
        summary = monitor.summary(TEST)
        close(summary.scores, monitor.score(TEST).sort().values)
        along = monitor.features(TEST).square().sum((1, 2))
        exact = fitted(rank=200, sketch=Exact())
        total = (exact.features(TEST).square().sum((1, 2))).mean()
        assert 0 < summary.explained < 1
        assert float(along.mean()) <= float(total) * 2
        assert "explained" in str(summary)

    def test_nothing_looks_wrong_where_nothing_is(self):
        summary = fitted(rank=40).calibrate([HELD], progress=False).summary()
        assert summary.notes == ()
        assert "nothing looks wrong" in str(summary)

    def test_a_small_rank_is_noticed(self):
        assert "rank is too small" in fitted(rank=1).summary().notes[0]

    def test_a_dominating_prior_is_noticed(self):
        assert "prior dominates" in fitted(prior_scale=1e-4).summary().notes[0]

    def test_constant_scores_are_noticed(self):
        model = net()
        monitor = Monitor(model, Gaussian(), rank=3, parameters=["2.bias"])
        monitor.fit([TRAIN], progress=False).calibrate([HELD], progress=False)
        assert any("constant" in note for note in monitor.summary().notes)
        assert any(
            "with Categorical() it cannot be" in note for note in monitor.summary().notes
        )

    def test_weights_without_a_part_in_the_output_are_noticed(self):
        class Idle(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.used(x) + 0 * self.idle(x)

        model = randomised(Idle())
        monitor = Monitor(model, Gaussian(), rank=3, parameters=["idle.weight"])
        monitor.fit([TRAIN], progress=False)
        assert "no output depends" in monitor.summary().notes[0]
