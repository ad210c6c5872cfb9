"""What a run does, and what it does not: in this process, on a domain that takes no time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scodbench import identity, jobs, methods, runner
from scodbench import rows as result_rows
from scodbench.data.errors import MissingDataError
from scodbench.domain import SketchSize, Splits
from scodbench.identity import network_id, settings_id
from scodbench.jobs import Job, Where
from scodbench.sweeps import ENSEMBLE_SWEEPS, SWEEPS
from scodbench.training import Recipe
from scodkit import Gaussian, baselines
from scodkit.errors import InsufficientMemoryError, MissingPeerError, OptionError
from toy_bench import TOY, build


class Fails(baselines.Naive):
    """A method whose fit goes wrong, in a way of its own."""

    learns = True
    error: Exception

    def fit(self, loader: Any, *, progress: bool = True) -> Any:
        raise self.error


def fails(error: Exception) -> methods.Make:
    kind = type("Fails", (Fails,), {"error": error})
    return lambda case: kind(case.networks[0], case.domain.likelihood)


@pytest.fixture(autouse=True)
def toy(monkeypatch) -> Iterator[None]:
    monkeypatch.setitem(jobs.ALL_DOMAINS, "toy", TOY)
    jobs.splits_of.cache_clear()
    yield
    jobs.splits_of.cache_clear()


@pytest.fixture
def where(tmp_path: Path) -> Where:
    return Where(tmp_path / "rows.jsonl", None, tmp_path / "nets")


def run(where: Where, *names: str, seeds: int = 1, **options: Any) -> list[dict[str, Any]]:
    return runner.run(["toy"], names, seeds, where, progress=False, **options)


def test_what_is_there_is_not_done_again(where: Where) -> None:
    first = run(where, "naive", "energy")
    before = where.rows.read_bytes()
    assert run(where, "naive", "energy") == first
    assert where.rows.read_bytes() == before
    more = run(where, "naive", "knn", seeds=2)[len(first) :]
    assert {(row["method"], row["seed"]) for row in more} == {
        ("knn", 0),
        ("naive", 1),
        ("knn", 1),
    }


@pytest.mark.parametrize(
    "change",
    [
        {"fit_on": 30},
        {"likelihood": Gaussian(variance=2.0)},
        {"all_layers": SketchSize(12, 3)},
        {"recipe": Recipe(torch.optim.Adam, rate=0.01, batch=20, epochs=3)},
        {"build": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))},
    ],
)
def test_other_settings_give_rows_of_their_own(
    change: dict[str, Any], where: Where, monkeypatch
) -> None:
    old = run(where, "naive")
    monkeypatch.setitem(jobs.ALL_DOMAINS, "toy", replace(TOY, **change))
    both = run(where, "naive")
    assert both[: len(old)] == old
    new = both[len(old) :]
    assert [row["ood"] for row in new] == [row["ood"] for row in old]
    assert {row["settings"] for row in new}.isdisjoint(row["settings"] for row in old)
    assert result_rows.latest(both) == new


def test_methods_can_be_made_without_weights_for_their_settings() -> None:
    """Or their settings would be an error's words, whatever their options."""
    assert identity._options(TOY, "scod").startswith("Monitor(Sequential, Gaussian")
    assert identity._options(TOY, "kfac_laplace").startswith("KFACLaplace(")


def test_options_of_a_method_are_settings(monkeypatch) -> None:
    monkeypatch.setitem(methods.METHODS, "one", methods.METHODS["kfac_laplace"])
    monkeypatch.setitem(methods.METHODS, "other", methods.METHODS["kfac_laplace_glm"])
    found = {name: settings_id(replace(TOY, title=name), name) for name in ("one", "other")}
    monkeypatch.setitem(methods.METHODS, "one", methods.METHODS["kfac_laplace_glm"])
    again = settings_id(replace(TOY, title="again"), "one")
    assert len({*found.values(), again}) == 3
    assert settings_id(replace(TOY, title="and again"), "one") == again


def test_rows_of_earlier_versions_or_another_device_are_not_enough(where: Where) -> None:
    (one, two) = run(where, "naive")
    old = [{k: v for k, v in row.items() if k != "settings"} for row in (one, two)]
    other = [{**row, "device": "NVIDIA H200"} for row in (one, two)]
    where.rows.unlink()
    result_rows.append(where.rows, old)
    result_rows.append(where.rows, other)
    assert len(run(where, "naive")) == 6


def test_one_failure_does_not_end_the_run_and_is_tried_again(where: Where, monkeypatch) -> None:
    error = RuntimeError("out of luck\nand more")
    monkeypatch.setitem(methods.METHODS, "broken", fails(error))
    found = run(where, "broken", "naive", seeds=2)
    (broken, _) = result_rows.select(found, method="broken")
    assert broken["auroc"] is None
    assert broken["why"] == "RuntimeError: out of luck"
    assert broken["id"] == f"toy/pooled/broken/0/cpu/{broken['settings']}"
    assert len(list(result_rows.select(found, method="naive"))) == 4
    assert runner.left_out(found) == [
        "toy, broken failed (seed 0, 1): RuntimeError: out of luck"
    ]
    monkeypatch.setitem(methods.METHODS, "broken", methods.METHODS["naive"])
    mended = run(where, "broken", seeds=2)
    assert len(mended) == len(found) + 4
    assert runner.left_out(mended) == []
    assert len(result_rows.latest(mended)) == 8


def test_what_is_refused_on_purpose_is_settled(where: Where, monkeypatch) -> None:
    monkeypatch.setitem(methods.METHODS, "refused", fails(OptionError("expected more")))
    found = run(where, "refused")
    assert runner.left_out(found) == [
        "toy, refused left out (seed 0): OptionError: expected more"
    ]
    assert run(where, "refused") == found


def test_lack_of_memory_is_not_settled(where: Where, monkeypatch) -> None:
    error = InsufficientMemoryError("expected more")
    monkeypatch.setitem(methods.METHODS, "large", fails(error))
    (row,) = run(where, "large")
    assert (row["why"], row["failed"]) == ("InsufficientMemoryError: expected more", True)
    assert len(run(where, "large")) == 2


def test_a_missing_library_ends_the_run(where: Where, monkeypatch) -> None:
    missing = MissingPeerError("expected the module; type pip install")
    monkeypatch.setitem(methods.METHODS, "peer", fails(missing))
    with pytest.raises(MissingPeerError, match="pip install"):
        run(where, "peer")


def test_a_missing_library_is_noticed_before_any_work(where: Where, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "laplace.curvature", None)
    with pytest.raises(MissingPeerError, match="pip install"):
        run(where, "naive", "kfac_laplace")
    assert not where.rows.exists()
    assert not (where.rows.parent / "nets").exists()


def test_missing_data_of_any_domain_is_noticed_before_any_work(
    where: Where, monkeypatch
) -> None:
    def missing(folder: Path | None) -> Splits:
        raise MissingDataError("expected files; type: scodbench data get")

    later = replace(TOY, name="later", splits=missing)
    monkeypatch.setitem(jobs.ALL_DOMAINS, "later", later)
    with pytest.raises(MissingDataError, match="scodbench data get"):
        runner.run(["toy", "later"], ["naive"], 1, where, progress=False)
    assert not where.rows.exists()


def test_a_network_that_cannot_be_trained_costs_its_own_rows_only(
    where: Where, monkeypatch
) -> None:
    wild = replace(TOY, name="wild", recipe=replace(TOY.recipe, rate=1e30))
    monkeypatch.setitem(jobs.ALL_DOMAINS, "wild", wild)
    found = runner.run(["wild", "toy"], ["naive"], 1, where, progress=False)
    (row,) = result_rows.select(found, domain="wild")
    assert row["why"].startswith("training from seed 0: NonFiniteError: expected an epoch")
    assert len(list(result_rows.select(found, domain="toy"))) == 2


def test_ensembles_have_no_network_in_common() -> None:
    where = Where(Path("rows"))
    several = [Job("toy", seed, "deep_ensemble", False, where).seeds for seed in range(20)]
    assert several[0] == [0, 1000, 1001, 1002, 1003]
    everyone = [seed for seeds in several for seed in seeds]
    assert len(set(everyone)) == len(everyone) == 100
    assert [seeds[0] for seeds in several] == list(range(20))
    for name in SWEEPS:
        wanted = 5 if name in ENSEMBLE_SWEEPS else 1
        assert len(Job("toy", 0, name, True, where).seeds) == wanted
    assert Job("toy", 3, "naive", False, where).seeds == [3]
    assert Job("cifar10", 0, "errors", True, where).seeds == [0]  # comes with the data


def test_an_ensembles_networks_are_trained_and_told(where: Where) -> None:
    found = run(where, "deep_ensemble", "naive")
    names = sorted(path.name for path in (where.rows.parent / "nets").iterdir())
    assert [name.split("_")[1] for name in names] == ["0", "1000", "1001", "1002", "1003"]
    networks = {row["method"]: row["network"] for row in found}
    assert networks["deep_ensemble"] != networks["naive"]
    one, other = build(), build()
    assert network_id([one, other]) != network_id([other, one]) != network_id([one])


def test_one_domain_comes_after_the_other_and_long_jobs_first(
    where: Where, monkeypatch
) -> None:
    monkeypatch.setitem(jobs.ALL_DOMAINS, "second", replace(TOY, name="second"))
    names = ["naive", "knn", "local_ensemble"]
    found = runner.run(["second", "toy"], names, 2, where, progress=False)
    order = list(dict.fromkeys((row["domain"], row["method"], row["seed"]) for row in found))
    assert order == [
        (domain, method, seed)
        for domain in ("second", "toy")
        for method in ("local_ensemble", "naive", "knn")
        for seed in (0, 1)
    ]


def test_rows_of_sweeps_are_told_from_those_of_other_settings(
    where: Where, monkeypatch
) -> None:
    found = run(where, "prior", sweep=True)
    assert {row["sweep"] for row in found} == {"prior"}
    assert len({row["id"] for row in found}) == len(found)
    for row in found:
        assert row["id"].endswith(f"/0/cpu/{row['settings']}")
    assert run(where, "prior", sweep=True) == found
    monkeypatch.setitem(jobs.ALL_DOMAINS, "toy", replace(TOY, fit_on=30))
    both = run(where, "prior", sweep=True)
    assert result_rows.latest(both) == both[len(found) :]


def test_a_sweep_that_fails_says_so(where: Where, monkeypatch) -> None:
    def broken(setup: Any) -> Iterator[Any]:
        yield {"id": "prior/toy/far/1/0"}
        raise ValueError("no more")

    monkeypatch.setitem(SWEEPS, "prior", broken)
    (row,) = run(where, "prior", sweep=True)
    assert (row["sweep"], row["why"], row["failed"]) == ("prior", "ValueError: no more", True)
    assert runner.left_out([row]) == ["toy, prior failed (seed 0): ValueError: no more"]
