"""Scores of single positions, and of a sample's worst one, beside dense algebra."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles import dense_factors, dense_fisher, dense_score
from scodkit import Categorical, Gaussian, Heads, Monitor, Projected, Task
from scodkit.adapters.monitored_model import ClosedForm
from scodkit.errors import CaptureError, OptionError, UncertifiedError
from scodkit.model.inputs import Inputs
from scodkit.sharded import ShardedMonitor
from scodkit.sketch import Exact

TOKENS, CLASSES = 5, 4


def decoder() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Embedding(20, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def sequences(count: int, seed: int = 0, length: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, (count, length), generator=generator)


TRAIN, HELD_OUT, NEW = sequences(30), sequences(40, 1), sequences(7, 2)


def fitted(pool: str, directions: int | None = None, **options: Any) -> Monitor:
    likelihood = Categorical(directions, -1, pool=pool)
    monitor = Monitor(decoder(), likelihood, rank=400, sketch=Exact(), **options)
    return monitor.fit(list(TRAIN.split(8)), progress=False)


def of_each_token(pool: str, directions: int | None, x: Tensor) -> Tensor:
    """By whole gradients of each token's own rows and the whole Fisher matrix."""
    likelihood = Categorical(directions, -1)
    per_token = CLASSES - 1 if directions is None else directions
    known = dense_factors(decoder(), Inputs((TRAIN,), {}), likelihood)
    share = 1 / TOKENS if pool == "mean" else 1.0
    fisher = share * dense_fisher(known)
    rows = dense_factors(decoder(), Inputs((x,), {}), likelihood)
    each = [dense_score(fisher, len(TRAIN), own, 1.0) for own in rows.split(per_token, dim=1)]
    return torch.stack(each, 1)


@pytest.mark.parametrize("directions", [None, 1, 2])
@pytest.mark.parametrize("pool", ["sum", "mean", "max"])
def test_each_token_has_the_score_of_its_own_rows(pool: str, directions: int | None) -> None:
    monitor = fitted(pool, directions)
    expected = of_each_token(pool, directions, NEW)
    for budget in (2**30, 1):  # all rows at once, and one at a time
        monitor.memory_budget = budget
        found = monitor.positions(NEW)
        torch.testing.assert_close(found.score, expected, rtol=1e-9, atol=1e-12)
        pooled = {"sum": expected.sum, "mean": expected.mean, "max": expected.amax}[pool](1)
        torch.testing.assert_close(monitor.score(NEW), pooled, rtol=1e-9, atol=1e-12)
        assert found.worst.tolist() == expected.argmax(1).tolist()
        assert found.output.shape == (7, TOKENS, CLASSES)


def test_max_fits_what_the_sum_fits() -> None:
    one, other = fitted("max").basis, fitted("sum").basis
    assert one.trace == other.trace
    torch.testing.assert_close(one.values, other.values)


def test_projected_positions_count_what_is_left_out() -> None:
    projected = Projected(rank=2, samples=20)
    monitor = fitted("max", 1, parameters=projected)
    assert 0 < monitor.basis.inside < 1
    found = monitor.positions(NEW).score
    torch.testing.assert_close(monitor.score(NEW), found.amax(1))
    per_token = Categorical(1, -1)
    apart = [
        Monitor(decoder(), per_token, 400, sketch=Exact(), parameters=projected).fit(
            list(TRAIN.split(8)), progress=False
        )
    ][0]
    for place in range(TOKENS):
        apart.task = Task(lambda out, t=place: out[:, t : t + 1], per_token)
        torch.testing.assert_close(apart.score(NEW), found[:, place], rtol=1e-9, atol=1e-12)


def test_p_values_hold_for_the_worst_token_of_a_sequence(tmp_path: Path) -> None:
    monitor = fitted("max", 1).calibrate([HELD_OUT], progress=False)
    held_out = monitor.score(HELD_OUT)
    found = monitor(NEW), monitor.positions(NEW)
    for scores, p_value in (
        (found[0].score, found[0].p_value),
        (found[1].score, found[1].p_value),
    ):
        assert p_value is not None
        above = (held_out >= scores[..., None]).sum(-1)
        torch.testing.assert_close(
            p_value, (1 + above) / (1 + len(held_out)), check_dtype=False
        )
    p_value = found[1].p_value
    assert p_value is not None
    assert torch.equal(p_value.amin(1), found[0].p_value)
    monitor.save(tmp_path / "max.scod")
    loaded = Monitor.load(tmp_path / "max.scod", decoder())
    assert loaded.likelihood == Categorical(1, -1, pool="max")
    again = loaded.positions(NEW)
    torch.testing.assert_close(again.score, found[1].score)
    assert torch.equal(again.p_value, p_value)  # type: ignore[arg-type]
    joined = loaded.positions(iter([NEW[:3], NEW[3:]]), progress=False)
    torch.testing.assert_close(joined.score, found[1].score)
    # of other pools the calibration is of sums, which say nothing of one token
    assert fitted("sum").calibrate([HELD_OUT], progress=False).positions(NEW).p_value is None


def test_groups_of_samples_are_those_of_their_tokens() -> None:
    def by(output: Tensor) -> Tensor:
        return (output[:, 0, 0] > 0).long()

    monitor = fitted("max", 1).calibrate([HELD_OUT], by=by, progress=False)
    found, scored = monitor.positions(NEW), monitor(NEW)
    assert found.p_value is not None
    assert torch.equal(found.p_value.amin(1), scored.p_value)


def test_other_lengths_maps_and_bad_samples() -> None:
    monitor = fitted("max", 1)
    longer = sequences(3, 5, 2 * TOKENS)
    assert monitor.positions(longer).score.shape == (3, 2 * TOKENS)
    torch.testing.assert_close(monitor.score(longer), monitor.positions(longer).score.amax(1))
    torch.manual_seed(0)
    maps = Monitor(nn.Conv2d(2, 3, 1).double(), Categorical(class_dim=1, pool="max"), 6)
    x = torch.randn(9, 2, 4, 2, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        maps.fit([x], progress=False)
    bad = x.clone()
    bad[1, 0, 0, 0] = torch.nan
    found = maps.positions(bad).score
    assert found.shape == (9, 8)
    assert bool(found[1].isinf().all())
    assert torch.equal(maps.score(bad).isinf(), torch.arange(9) == 1)
    torch.testing.assert_close(found[2:], maps.positions(x).score[2:])


def test_a_task_may_be_of_the_worst_of_some_tokens() -> None:
    monitor = fitted("sum", 1)
    each = monitor.positions(NEW).score
    monitor.task = Task(lambda out: out[:, 2:], Categorical(1, -1, pool="max"))
    torch.testing.assert_close(monitor.score(NEW), each[:, 2:].amax(1))
    torch.testing.assert_close(monitor.positions(NEW).score, each[:, 2:])
    assert monitor.selftest(NEW).ok


@pytest.mark.parametrize(
    "likelihood",
    [
        Gaussian(),
        Categorical(),
        Categorical(class_dim=-1, samples=3),
        Categorical(class_dim=-1, directions=1, pool="last"),
    ],
)
def test_what_has_no_single_positions_is_refused(likelihood: Any) -> None:
    model = decoder()
    if likelihood == Categorical():
        model.append(nn.Flatten())
    monitor = Monitor(model, likelihood, 3).fit([TRAIN], progress=False)
    with pytest.raises(OptionError, match=r"expected.*got.*type"):
        monitor.positions(NEW)


def test_what_asks_for_a_sum_is_refused() -> None:
    monitor = fitted("max", 1)
    with pytest.raises(OptionError, match=r"positions\(batch\)\.worst.*Task"):
        monitor.explain(NEW)
    with pytest.raises(UncertifiedError, match="pool='max'"):
        monitor.certify(NEW)
    with pytest.raises(CaptureError, match="pool='max'"):
        monitor.compile(NEW)
    with pytest.raises(OptionError, match="pool='max'"):
        Heads({"token": monitor.likelihood})
    with pytest.raises(OptionError, match="pool"):
        ShardedMonitor(decoder(), monitor.likelihood)
    closed = fitted("max").calibrate([HELD_OUT], progress=False)
    closed.model.eval()
    with pytest.raises(OptionError, match="closed form"):
        ClosedForm(closed, Inputs((NEW,), {}))
    assert replace(monitor.likelihood, pool="sum").worst is False  # type: ignore[type-var]
