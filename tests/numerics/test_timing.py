"""Functions timed in turns, by a clock that is set by hand."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import pytest
import torch

from scodkit.numerics import timing

CPU = torch.device("cpu")


@dataclass
class Clock:
    """A clock that is set by hand."""

    now: float = 0.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: found.now)
    return found


@pytest.mark.parametrize(
    ("took", "wanted"),
    [(1e-7, 3000), (0.002, 100), (0.01, 30), (0.04, 30), (0.1, 15), (1.0, 3), (10.0, 3)],
)
def test_thirty_times_and_a_fifth_of_a_second_but_slow_ones_less_often(
    took: float, wanted: int
) -> None:
    seconds: list[float] = []
    while not timing._enough(seconds):
        seconds.append(took)
    assert len(seconds) == pytest.approx(wanted, abs=1)  # sums are rounded


def test_runs_take_turns_and_the_first_do_not_count(clock: Clock) -> None:
    calls: list[str] = []

    def run(name: str, seconds: float) -> None:
        clock.now += 0.5 if calls.count(name) < 3 else seconds
        calls.append(name)

    runs = {"a": lambda: run("a", 0.01), "b": lambda: run("b", 0.005)}
    found = timing.in_turns(runs, CPU)
    assert calls[:6] == ["a"] * 3 + ["b"] * 3
    assert calls[6:66] == ["a", "b"] * 30
    assert set(calls[66:]) == {"b"}  # until it was timed for long enough
    assert calls.count("b") == pytest.approx(43, abs=1)
    assert found == pytest.approx({"a": 0.01, "b": 0.005})


def test_the_fastest_run_is_not_slowed_by_others(clock: Clock) -> None:
    took = itertools.cycle([0.9, 0.01, 0.7])

    def run() -> None:
        clock.now += next(took)

    assert timing.in_turns({"a": run}, CPU, min) == pytest.approx({"a": 0.01})
    assert timing.in_turns({"a": run}, CPU) == pytest.approx({"a": 0.7})


def test_a_slow_run_is_warmed_up_once(clock: Clock) -> None:
    calls: list[int] = []

    def run() -> None:
        clock.now += 2.0
        calls.append(1)

    timing._warm_up(run, CPU)
    assert len(calls) == 1
