"""Inputs that scores alone do not give away: forgotten scaling, p-values that crowd at 1."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn

from draws import normal
from scodkit import Calibration, Categorical, Gaussian, Monitor, predicted_class
from scodkit.calibration import CrowdWatch
from scodkit.errors import SuspiciousInputWarning
from scodkit.sharded import ShardedMonitor


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def rows(count: int, seed: int) -> Tensor:
    return normal(3 * count, seed).view(count, 3)


def fitted(*batches: Tensor, **options) -> Monitor:
    return Monitor(net(), Gaussian(), rank=4).fit(batches, progress=False, **options)


def range_of(*batches: Tensor) -> dict[str, tuple[float, float]]:
    x = torch.cat(batches)
    return {"0": (float(x.min()), float(x.max()))}


@cache
def digits(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A small classifier of digits, and images in [0, 1]: trained on, held out, new."""
    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    torch.manual_seed(seed)
    order = torch.randperm(len(labels))
    x, y = pixels[order].float() / 16, labels[order]
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for start in list(range(0, 800, 100)) * 50:
        optimiser.zero_grad()
        some = slice(start, start + 100)
        nn.functional.cross_entropy(model(x[some]), y[some]).backward()
        optimiser.step()
    return model, (x[:800], x[800:1200], x[1200:])


def calibrated(seed: int, by=None) -> tuple[Monitor, Tensor]:
    model, (train, held, new) = digits(seed)
    monitor = Monitor(model, Categorical(), rank=30).fit(train.split(100), progress=False)
    return monitor.calibrate([held], by=by, progress=False), new


def told_by(use, batches) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in batches:
            use(batch)
    assert all(one.category is SuspiciousInputWarning for one in told)
    return [str(one.message) for one in told]


class TestDigits:
    @pytest.mark.parametrize("size", [1, 100])
    @pytest.mark.parametrize("scale", [16, 255])
    def test_a_forgotten_scale_is_named_once(self, scale, size):
        monitor, new = calibrated(0)
        batches = (scale * new[:100]).split(size)
        scored = []
        ranged, crowded = told_by(lambda batch: scored.append(monitor(batch)), batches)
        assert float(torch.cat([one.p_value for one in scored]).median()) == 1.0  # blind
        assert f"was from 0 to 1, got some from 0 to {scale}" in ranged
        assert "last 64 as low as" in crowded if size > 1 else "last 8 as low as" in crowded
        for one in (ranged, crowded):
            assert "forgot to divide by 255?" in one
        assert told_by(monitor.flag, batches) == []

    def test_flags_and_classes_notice_too(self):
        monitor, new = calibrated(0, by=predicted_class)
        assert len(told_by(monitor.flag, [255 * new])) == 2

    @pytest.mark.parametrize("seed", range(4))
    def test_honest_digits_are_none_of_it(self, seed):
        monitor, new = calibrated(seed)
        assert told_by(monitor, chain(new[:100].split(1), [new])) == []
        assert told_by(monitor.flag, [new]) == []


class TestRange:
    def test_is_that_of_all_data(self, tmp_path: Path):
        a, b, c = (rows(20, seed) * seed for seed in (1, 2, 3))
        assert fitted(a, b, c).fitted.input_range == range_of(a, b, c)
        assert fitted(a, b, products=True).fitted.input_range == range_of(a, b)
        monitor = fitted(a, b).update([c], progress=False)
        assert monitor.fitted.input_range == range_of(a, b, c)
        merged = fitted(a).merge(fitted(c))
        assert merged.fitted.input_range == range_of(a, c)
        monitor.save(tmp_path / "m.scod")
        again = Monitor.load(tmp_path / "m.scod", monitor.model)
        assert again.fitted.input_range == range_of(a, b, c)
        sharded = ShardedMonitor(net(), Gaussian(), rank=4).fit([a, b], progress=False)
        sharded.save(tmp_path / "s.scod")
        again = Monitor.load(tmp_path / "s.scod", net())
        assert again.fitted.input_range == range_of(a, b)

    def test_goes_on_with_a_checkpoint(self, tmp_path: Path):
        batches = [5 * rows(20, 1), rows(20, 2), rows(20, 3)]

        def breaks_off():
            yield from batches[:2]
            raise KeyError

        with pytest.raises(KeyError):
            fitted_on(breaks_off(), tmp_path / "c")
        found = fitted_on(iter(batches), tmp_path / "c").fitted.input_range
        assert found == range_of(*batches)

    def test_data_of_unknown_range_is_not_judged(self):
        known, other = fitted(rows(20, 1)), fitted(rows(20, 2))
        other._scorer.fitted = replace(other.fitted, input_range=None)
        assert known.merge(other).fitted.input_range is None
        known.score(1e3 * rows(2, 3))

    def test_values_that_are_not_finite_are_left_out(self):
        x = rows(20, 1)
        bad = x.clone()
        bad[3, 0], bad[4, 1], bad[5, 2] = math.nan, math.inf, -math.inf
        monitor = fitted(bad, on_bad="skip")
        assert monitor.fitted.input_range == range_of(bad[bad.isfinite()])
        assert told_by(monitor.score, [bad, torch.full((2, 3), math.nan).double()]) == []
        bad[:3] *= 1e3
        assert len(told_by(monitor.score, [bad])) == 1

    def test_three_widths_are_far(self):
        monitor = fitted(torch.rand(50, 3).double())
        (low, high) = monitor.fitted.input_range["0"]
        for end, sign in ((high, 1), (low, -1)):
            near, far = (end + sign * widths * (high - low) for widths in (2.99, 3.01))
            assert told_by(monitor.score, [torch.tensor([[0.5, near, 0.5]]).double()]) == []
            fresh = fitted(torch.rand(50, 3).double().clamp(low, high))
            fresh._scorer.watch = type(monitor._scorer.watch)(monitor.fitted.input_range)
            told = told_by(fresh.score, [torch.tensor([[0.5, far, 0.5]]).double()] * 2)
            assert len(told) == 1

    @pytest.mark.parametrize(
        "use", ["score", "certify", "features", "explain", "__call__", "summary"]
    )
    def test_whatever_is_asked(self, use):
        monitor = fitted(rows(50, 1))
        assert len(told_by(getattr(monitor, use), [1e3 * rows(4, 2)] * 2)) == 1

    def test_one_warning_for_a_monitor_not_for_a_prior(self):
        monitor = fitted(rows(50, 1))
        far = 1e3 * rows(4, 2)
        assert len(told_by(monitor.score, [far])) == 1
        monitor.prior_scale, monitor.rank = 2.0, 2
        assert told_by(monitor.score, [far]) == []
        monitor.fit([rows(50, 3)], progress=False)
        assert len(told_by(monitor.score, [far])) == 1

    @pytest.mark.slow
    @pytest.mark.filterwarnings(
        "ignore"
    )  # torch's compiler warns of itself; ours may be slower
    def test_compiled_monitors_look_too(self):
        monitor = fitted(rows(50, 1)).compile(rows(4, 2))
        assert len(told_by(monitor.score, [1e3 * rows(4, 3)])) == 1

    def test_several_inputs_by_name_and_tokens_not_at_all(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.layer = nn.Embedding(500, 3), nn.Linear(3, 2)

            def forward(self, token: Tensor, shift: Tensor, constant: Tensor) -> Tensor:
                return self.layer(torch.tanh(self.table(token) + shift)) * constant

        def batch(scale: float, most: int, constant: float) -> dict[str, Tensor]:
            token = torch.arange(20) % most
            return {
                "token": token,
                "shift": scale * rows(20, 1).float(),
                "constant": torch.full((20, 1), constant),
            }

        torch.manual_seed(0)
        monitor = Monitor(Two(), Gaussian(), rank=4)
        monitor.fit([batch(1, 5, 1.0)], progress=False)
        assert set(monitor.fitted.input_range) == {"shift", "constant"}
        # ids never seen; another constant: of one value there is no width to measure with
        assert told_by(monitor.score, [batch(1, 20, 9.0)]) == []
        reordered = dict(reversed(batch(30, 5, 1.0).items()))
        (told,) = told_by(monitor.score, [reordered])
        assert "input shift was from" in told

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_other_precisions(self, dtype):
        monitor = Monitor(net().to(dtype), Gaussian(), rank=2)
        monitor.fit([rows(20, 1).to(dtype)], progress=False)
        assert monitor.fitted.input_range == range_of(rows(20, 1).to(dtype))
        assert len(told_by(monitor.score, [100 * rows(4, 2).to(dtype)])) == 1


def fitted_on(loader, checkpoint: Path) -> Monitor:
    options = {"checkpoint": checkpoint, "every": 1, "progress": False}
    return Monitor(net(), Gaussian(), rank=4).fit(loader, **options)


class TestCrowd:
    @given(
        low=st.integers(1, 40),
        rest=st.integers(1, 60),
        count=st.integers(8, 64),
        data=st.data(),
    )
    @settings(max_examples=60, deadline=None)
    def test_the_chance_is_a_beta_binomial_tail(self, low, rest, count, data):
        watch = CrowdWatch(Calibration(torch.tensor([0.0] * low + list(range(1, rest + 1)))))
        k = data.draw(st.integers(0, count))
        wanted = scipy.stats.betabinom(count, low + 1, rest).sf(k - 1)
        assert watch._chance(k, count) == pytest.approx(wanted, rel=1e-6)

    @pytest.mark.parametrize("num_data", [5, 20, 60, 99, 400, 5000])
    @pytest.mark.parametrize("tied", [False, True])
    def test_new_ones_like_the_held_out_hardly_ever_crowd(self, num_data, tied):
        for seed in range(20):
            scores = normal(num_data + 500, seed)
            if tied:  # as those of a sure classifier: half of them 0
                scores = scores.clamp_min(0)
            watch = CrowdWatch(Calibration(scores[:num_data]))
            assert told_by(watch.look, scores[num_data:].split(1)) == []

    @pytest.mark.parametrize(("num_data", "after"), [(20, 9), (99, 8), (5000, 8)])
    @pytest.mark.parametrize("size", [1, 3, 64, 200])
    def test_scores_below_all_are_noticed_soon(self, num_data, after, size):
        held = normal(num_data, 0)
        watch = CrowdWatch(Calibration(held))
        calls = math.ceil(after / size)
        batch = torch.full((size,), float(held.min()) - 1)
        assert told_by(watch.look, [batch] * (calls - 1)) == []
        (told,) = told_by(watch.look, [batch, batch])
        count = min(calls * size, 64)
        assert f"got {count} of the last {count} as low as their lowest 1%" in told

    def test_ties_at_the_bottom_are_expected(self):
        held = normal(200, 0).clamp_min(0)  # half of them 0
        watch = CrowdWatch(Calibration(held))
        assert told_by(watch.look, [normal(500, 1).clamp_min(0)]) == []
        assert len(told_by(watch.look, [torch.zeros(64)])) == 1

    def test_scores_that_are_all_alike_tell_nothing(self):
        assert told_by(CrowdWatch(Calibration(torch.zeros(100))).look, [torch.zeros(100)]) == []

    def test_a_few_easy_ones_are_no_crowd(self):
        watch = CrowdWatch(Calibration(normal(1000, 0)))
        stream = normal(640, 1)
        stream[::3] = -10.0
        assert told_by(watch.look, stream.split(1)) == []
