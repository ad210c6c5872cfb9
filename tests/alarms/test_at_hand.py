"""Alarms take monitors and scored batches as they are, and say how they stand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import scodkit
from scodkit import (
    Calibration,
    Categorical,
    DriftAlarm,
    Fused,
    Monitor,
    OnlineDiscoveries,
    RolloutAlarm,
    discoveries,
)
from scodkit.errors import CalibrationError


def inputs(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=[Monitor, Fused])
def monitor(request: pytest.FixtureRequest) -> Monitor | Fused:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    own: Monitor | Fused = request.param(net, Categorical(), rank=8)
    own.fit(inputs(200, 0), progress=False)
    return own.calibrate(inputs(200, 1), progress=False)


def test_public_names_are_those_of_the_alarms() -> None:
    assert scodkit.DriftAlarm is scodkit.alarms.DriftAlarm
    assert scodkit.discoveries is scodkit.alarms.discoveries


def test_a_drift_alarm_takes_the_monitor_and_what_it_returns(monitor: Monitor | Fused) -> None:
    x = torch.cat([inputs(40, 2), 4 * inputs(40, 3)])
    assert monitor.calibration is not None
    ours = DriftAlarm(monitor, 0.05, seed=0)
    theirs = DriftAlarm(Calibration(monitor.calibration.scores), 0.05, seed=0)
    scores = monitor.score(x)
    found = [ours.push(monitor(x[i : i + 1])) for i in range(len(x))]
    assert found == [theirs.push(float(monitor.score(x[i : i + 1]))) for i in range(len(x))]
    assert ours.log_wealth == theirs.log_wealth
    for given in (monitor(x), scores.numpy(), scores):
        again = DriftAlarm(monitor, 0.05, seed=0)
        assert again.push_many(given).tolist() == found


def test_rollouts_and_discoveries_take_scored_batches(monitor: Monitor | Fused) -> None:
    good = [inputs(9, seed) for seed in range(20)]
    ours = RolloutAlarm([monitor(x) for x in good], 0.1, window=3)
    theirs = RolloutAlarm([monitor.score(x) for x in good], 0.1, window=3)
    assert ours.threshold == theirs.threshold
    assert ours.judge(monitor(4 * good[0])) == theirs.judge(monitor.score(4 * good[0]))
    x = torch.cat([inputs(5, 4), 4 * inputs(5, 5)])
    scored = monitor(x)
    assert scored.p_value is not None
    assert torch.equal(discoveries(scored), discoveries(scored.p_value))
    stream, other = OnlineDiscoveries(), OnlineDiscoveries()
    for i in range(len(x)):
        assert stream.push(monitor(x[i : i + 1])) == other.push(float(scored.p_value[i]))


def test_what_cannot_be_pushed_is_refused(monitor: Monitor | Fused) -> None:
    alarm = DriftAlarm(monitor)
    with pytest.raises(CalibrationError, match="one number at a time"):
        alarm.push(monitor(inputs(2, 0)))
    assert alarm.num_seen == 0
    bare = Monitor(monitor.model, Categorical(), rank=8).fit(inputs(50, 0), progress=False)
    with pytest.raises(CalibrationError, match=r"monitor\.calibrate"):
        DriftAlarm(bare)
    with pytest.raises(CalibrationError, match=r"monitor\.calibrate"):
        discoveries(bare(inputs(2, 0)))


def test_alarms_say_how_they_stand() -> None:
    drift = DriftAlarm(Calibration(torch.arange(20.0)), 0.05)
    assert repr(drift) == "DriftAlarm(false_alarm=0.05, 0 seen, wealth 1, quiet)"
    drift.push_many(torch.full((30,), 99.0))
    assert f"alarmed at {drift.alarmed_at}" in repr(drift)
    rollout = RolloutAlarm([torch.ones(3)] * 9, 0.1)
    assert "0 frames, quiet" in repr(rollout)
    rollout.push(2.0)
    assert "1 frames, alarmed" in repr(rollout)
    assert repr(OnlineDiscoveries()) == "OnlineDiscoveries(fdr=0.1, 0 of 0 found)"


def test_slid_scores_follow_data_that_moved_and_keep_their_rate() -> None:
    rng = np.random.default_rng(0)
    rates = []
    for seed in range(100):
        held = Calibration(torch.from_numpy(rng.normal(size=200)))
        for step in range(20):  # data has moved by one, then stays
            held = held.slid(torch.from_numpy(rng.normal(size=50) + 1), seed=20 * seed + step)
        assert held.num_data == 200
        new = torch.from_numpy(rng.normal(size=500) + 1)
        rates.append(float(held.flag(new, 0.1).double().mean()))
    assert float(np.mean(rates)) == pytest.approx(0.1, abs=0.012)  # four standard errors


def test_slid_scores_keep_groups_and_take_more_than_there_are() -> None:
    held = Calibration(torch.arange(6.0), torch.tensor([0, 0, 0, 1, 1, 1]))
    slid = held.slid(torch.tensor([9.0, 8.0]), torch.tensor([1, 0]), seed=0)
    assert slid.num_data == 6
    assert slid.groups is not None
    for score, group in ((8.0, 0), (9.0, 1)):
        assert score in slid.scores[slid.groups == group]
    assert Calibration(torch.zeros(3)).slid(torch.ones(5)).scores.tolist() == [1.0] * 5
    with pytest.raises(CalibrationError, match="groups of the new"):
        held.slid(torch.zeros(2))


def test_what_has_no_calibration_is_named_without_its_numbers() -> None:
    for wrong in (torch.rand(500), np.random.default_rng(0).random(500)):
        with pytest.raises(CalibrationError, match=r"of shape \(500,\); type monitor") as error:
            DriftAlarm(wrong)  # type: ignore[arg-type]
        assert len(str(error.value)) < 250


def test_a_rollout_alarm_asks_for_rollouts(monitor: Monitor | Fused) -> None:
    with pytest.raises(CalibrationError, match=r"type RolloutAlarm\(\[monitor\(frames\), "):
        RolloutAlarm(monitor)  # type: ignore[arg-type]
