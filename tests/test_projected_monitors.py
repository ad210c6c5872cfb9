"""Monitors of projected weights: what they score, certify, merge and save."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles import dense_factors, dense_fisher, dense_score
from scodkit import Categorical, Fused, LastLayers, Monitor, Projected
from scodkit.baselines import LocalEnsemble
from scodkit.errors import (
    CorruptArtifactError,
    MergeError,
    MismatchError,
    OptionError,
    ParameterSelectionError,
    ScodError,
    UncertifiedError,
)
from scodkit.model.inputs import Inputs
from scodkit.model.projected import ProjectedSet
from scodkit.numerics import artifact
from scodkit.scoring.certificate import certificate
from scodkit.sharded import ShardedMonitor
from scodkit.sketch import Exact, FrequentDirections, Nystrom

LIKELIHOOD = Categorical()


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 18), nn.Tanh(), nn.Linear(18, 4)]
    return nn.Sequential(*layers).to(dtype)


def data(size: int = 80, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(2.0, 0.1, 12, dtype=dtype)
    return torch.randn(size, 12, generator=generator, dtype=dtype) * scale


def fitted(x: Any = None, rank: int = 8, **options: Any) -> Monitor:
    projected = options.pop("parameters", Projected(rank=4))
    monitor = Monitor(network(), LIKELIHOOD, rank, parameters=projected, **options)
    return monitor.fit([data()] if x is None else x, progress=False)


def projection(monitor: Monitor) -> Tensor:
    parameters = monitor.fitted.parameters
    assert isinstance(parameters, ProjectedSet)
    return parameters.spread(torch.eye(parameters.num_parameters, dtype=torch.float64)).T


def rows(x: Tensor) -> Tensor:
    return dense_factors(network(), Inputs((x,), {}), LIKELIHOOD)


def test_the_score_is_its_formula() -> None:
    eps, new = 0.7, 2 * data(9, seed=1)
    monitor = fitted(sketch=Exact(), prior_scale=eps, rank=30)
    p, train, own = projection(monitor), rows(data()), rows(new)
    values, vectors = torch.linalg.eigh(p.T @ dense_fisher(train) @ p)
    values, vectors = values[-30:], vectors[:, -30:]
    c = 1 / (2 * len(data()) * eps**2)
    along = (own @ p @ vectors).square().sum(1)
    expected = eps**2 * (own.square().sum((1, 2)) - along @ (values / (values + c)))
    torch.testing.assert_close(monitor.score(new), expected, rtol=1e-9, atol=0)


def test_trace_is_that_of_all_weights_and_inside_its_share() -> None:
    monitor = fitted()
    fisher, p = dense_fisher(rows(data())), projection(monitor)
    trace = float(fisher.trace())
    assert monitor.basis.trace == pytest.approx(trace, rel=1e-9)
    assert monitor.basis.inside == pytest.approx(float((p.T @ fisher @ p).trace()) / trace)
    assert 0 < monitor.basis.captured <= monitor.basis.inside < 1
    assert fitted(rank=200).basis.captured == pytest.approx(monitor.basis.inside, rel=1e-6)


def test_whole_weights_if_the_rank_is_as_long_as_all_sides() -> None:
    whole = Monitor(network(), LIKELIHOOD, rank=8).fit([data()], progress=False)
    for rank in (20, 64):
        monitor = fitted(parameters=Projected(rank=rank))
        assert monitor.basis.inside == 1.0
        torch.testing.assert_close(monitor.score(data(9, 1)), whole.score(data(9, 1)))
        assert monitor.summary().certified
        found, expected = (m.certify(data(9, 1)) for m in (monitor, whole))
        torch.testing.assert_close(found.upper, expected.upper)
        torch.testing.assert_close(found.lower, expected.lower)


def test_nothing_is_lost_if_gradients_are_in_the_projected_space() -> None:
    """Four of twelve inputs vary, and there are four outputs."""
    model = nn.Sequential(nn.Linear(12, 4)).double()
    x = data() * (torch.arange(12) < 4)
    monitors = [
        Monitor(model, LIKELIHOOD, 8, parameters=parameters).fit([x], progress=False)
        for parameters in ("all", Projected(rank=4, layers="all"))
    ]
    # 48 weights are few enough to be whole with that rank
    assert monitors[1].basis.inside == 1.0
    wide = nn.Sequential(nn.Linear(100, 4)).double()
    x = torch.randn(80, 100).double() * (torch.arange(100) < 4)
    whole, few = (
        Monitor(wide, LIKELIHOOD, 8, parameters=parameters).fit([x], progress=False)
        for parameters in ("all", Projected(rank=4))
    )
    assert few.fitted.parameters.num_parameters == 4 * 4 + 4
    assert few.basis.inside == pytest.approx(1.0)
    new = torch.randn(9, 100).double()
    torch.testing.assert_close(few.score(new), whole.score(new), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sketch", [Exact(), Nystrom(size=16), FrequentDirections(size=16)])
@pytest.mark.parametrize("eps", [0.1, 1.0, 10.0])
def test_certificates_hold(sketch: Any, eps: float) -> None:
    monitor = fitted(sketch=sketch, prior_scale=eps)
    for new in (data(20, seed=1), 3 * data(20, seed=2), data()):
        found, own = monitor.certify(new), rows(new)
        exact = dense_score(dense_fisher(rows(data())), len(data()), own, eps)
        rounding = 1e-9 * found.upper
        assert (found.lower <= exact + rounding).all()
        assert (exact <= found.upper + rounding).all()
        torch.testing.assert_close(found.upper, eps**2 * own.square().sum((1, 2)))
        torch.testing.assert_close(found.score, monitor.score(new))
        assert (found.lower > 0).all()  # swapped, or of other energies, this would fail
        p = projection(monitor)
        inside = dense_score(p.T @ dense_fisher(rows(data())) @ p, len(data()), own @ p, eps)
        assert (found.lower <= inside + rounding).all()
        if isinstance(sketch, Exact) and eps == 1.0:
            widest = fitted(sketch=sketch, prior_scale=eps, rank=200).certify(new)
            torch.testing.assert_close(widest.lower, inside, rtol=1e-6, atol=0)


def test_the_score_itself_is_no_bound() -> None:
    """What `certify` must not claim: here scores are below the exact ones, there above."""
    monitor = fitted(sketch=Exact(), rank=200)
    new = torch.cat([data(300, seed=3), 5 * data(300, seed=4)])
    exact = dense_score(dense_fisher(rows(data())), len(data()), rows(new), 1.0)
    assert not monitor.summary().certified
    assert ((monitor.score(new) - exact) / exact).max() > 0.01


def test_no_samples_have_no_bounds() -> None:
    assert fitted().certify(data(3)[:0]).lower.shape == (0,)


def test_totals_alone_give_no_certificate() -> None:
    monitor = fitted()
    scored = monitor._ready()(data(3), None, parts=True)
    assert scored.parts is not None
    with pytest.raises(UncertifiedError, match=r"monitor\.certify"):
        certificate(scored.parts, monitor.basis, 1.0)


def test_scores_do_not_depend_on_the_batch() -> None:
    monitor, new = fitted(), data(23, seed=1)
    one_by_one = torch.cat([monitor.score(x[None]) for x in new])
    torch.testing.assert_close(monitor.score(new), one_by_one, rtol=1e-12, atol=0)
    monitor.memory_budget = 1
    torch.testing.assert_close(monitor.score(new), one_by_one, rtol=1e-12, atol=0)
    assert monitor.selftest(new).ok


@pytest.mark.parametrize("sketch", [Exact(), Nystrom(), FrequentDirections(size=40)])
def test_parts_merge_if_they_share_projections(sketch: Any) -> None:
    first = fitted(data()[:40], sketch=sketch)
    given = Projected(given=first.projections)
    other = fitted(data()[40:], sketch=sketch, parameters=given)
    whole = fitted(data(), sketch=sketch, parameters=given)
    assert other.projections == first.projections
    merged = first.merge(other)
    assert merged.basis.trace == pytest.approx(whole.basis.trace, rel=1e-12)
    assert merged.basis.inside == pytest.approx(whole.basis.inside, rel=1e-12)
    new = data(9, seed=1)
    if not isinstance(sketch, FrequentDirections):
        torch.testing.assert_close(merged.score(new), whole.score(new), rtol=1e-7, atol=0)


def test_parts_with_projections_of_their_own_are_refused() -> None:
    first, other = fitted(data()[:40]), fitted(data()[40:])
    with pytest.raises(MergeError, match=r"given=first\.projections"):
        first.merge(other)
    whole = Monitor(network(), LIKELIHOOD, 8).fit(data()[40:], progress=False)
    with pytest.raises(MergeError, match="other parameters"):
        first.merge(whole)


def test_updates_keep_the_projections() -> None:
    monitor = fitted(data()[:40])
    given = Projected(given=monitor.projections)
    monitor.update(data()[40:], progress=False)
    whole = fitted(data(), parameters=given)
    torch.testing.assert_close(
        monitor.score(data(9, 1)), whole.score(data(9, 1)), rtol=1e-7, atol=0
    )


def test_saved_and_loaded(tmp_path: Path) -> None:
    monitor, path, new = fitted(), tmp_path / "monitor.scod", data(9, seed=1)
    monitor.calibrate(data(50, seed=5), progress=False).save(path)
    model = copy.deepcopy(monitor.model)
    loaded = Monitor.load(path, model)
    torch.testing.assert_close(loaded.score(new), monitor.score(new), rtol=0, atol=1e-12)
    assert loaded.projections == monitor.projections
    assert loaded.basis == loaded.basis
    assert loaded.basis.inside == monitor.basis.inside
    torch.testing.assert_close(loaded.certify(new).lower, monitor.certify(new).lower)
    more = data(30, seed=6)
    monitor.update(more, progress=False)
    loaded.update(more, progress=False)
    torch.testing.assert_close(loaded.score(new), monitor.score(new), rtol=0, atol=1e-12)
    assert loaded.basis.trace == monitor.basis.trace
    # a new fit learns its own
    loaded.renew(data(40, seed=7))
    assert loaded.projections != monitor.projections
    assert loaded.projections.options.rank == 4


@pytest.mark.parametrize("change", ["other", "missing", "not orthonormal", "longer"])
def test_altered_projections_are_refused(change: str, tmp_path: Path) -> None:
    monitor, path = fitted(), tmp_path / "monitor.scod"
    monitor.save(path)
    header, tensors = artifact.read(path, "monitor", lambda *_: None)
    name = next(name for name in tensors if name.startswith("projection."))
    if change == "other":
        tensors[name] = tensors[name].roll(1, 0)
    elif change == "missing":
        del tensors[name]
    elif change == "not orthonormal":
        tensors[name] = 2 * tensors[name]
    else:
        tensors[name] = torch.cat([tensors[name], tensors[name][:, :1]], dim=1)
    artifact.write(path, "monitor", header, tensors)
    with pytest.raises(CorruptArtifactError):
        Monitor.load(path, monitor.model)


@pytest.mark.parametrize("change", ["order", "beyond", "fewer", "floats"])
def test_altered_places_of_entries_are_refused(change: str, tmp_path: Path) -> None:
    monitor, path = fitted(), tmp_path / "monitor.scod"
    monitor.save(path)
    header, tensors = artifact.read(path, "monitor", lambda *_: None)
    name = next(name for name in tensors if name.endswith(".kept"))
    if change == "order":
        tensors[name] = tensors[name].flip(0)
    elif change == "beyond":
        tensors[name][-1] = 10_000
    elif change == "fewer":
        tensors[name] = tensors[name][1:]
    else:
        tensors[name] = tensors[name].double()
    artifact.write(path, "monitor", header, tensors)
    with pytest.raises(CorruptArtifactError):
        Monitor.load(path, monitor.model)


def test_a_checkpoint_goes_on_with_the_same_projections_only(tmp_path: Path) -> None:
    path, batches = tmp_path / "fit", list(data().split(10))
    whole = Monitor(network(), LIKELIHOOD, 8, parameters=Projected(rank=4, samples=20))
    whole.fit(batches, progress=False, checkpoint=path, every=1)
    resumed = Monitor(network(), LIKELIHOOD, 8, parameters=Projected(rank=4, samples=20))
    resumed.fit(batches, progress=False, checkpoint=path, every=1)
    assert resumed.basis.trace == whole.basis.trace
    torch.testing.assert_close(resumed.score(data(9, 1)), whole.score(data(9, 1)))
    other = Monitor(network(), LIKELIHOOD, 8, parameters=Projected(rank=4, samples=30))
    with pytest.raises(MismatchError, match="projections"):
        other.fit(batches, progress=False, checkpoint=path, every=1)


def test_explanations_are_of_all_weights() -> None:
    monitor, new = fitted(sketch=Exact(), rank=30), data(5, seed=1)
    shares = monitor.explain(new).parameters
    torch.testing.assert_close(shares.values.sum(1), monitor.score(new))
    p, own = projection(monitor), rows(new)
    basis = monitor.basis
    determined = basis.values / (basis.values + 1 / (2 * len(data())))
    along = own @ p @ basis.vectors
    for i, block in enumerate(monitor.fitted.parameters.in_full().blocks):
        mine = own[:, :, block.columns]
        part = mine @ p[block.columns] @ basis.vectors
        expected = mine.square().sum((1, 2)) - (along * part * determined).sum((1, 2))
        torch.testing.assert_close(shares.values[:, i], expected, rtol=1e-7, atol=1e-9)


def test_slopes_are_of_the_same_score() -> None:
    monitor, new = fitted(), data(3, seed=1)
    slopes = monitor.explain(new, saliency=True).saliency
    assert slopes is not None
    step = 1e-5 * torch.eye(12, dtype=torch.float64)[4]
    by_steps = (monitor.score(new + step) - monitor.score(new - step)) / 2e-5
    torch.testing.assert_close(slopes.gradient[:, 4], by_steps, rtol=1e-5, atol=1e-8)


def test_features_variances_and_other_precisions() -> None:
    monitor, new = fitted(), data(6, seed=1)
    assert monitor.features(new).shape == (6, 4, 8)
    assert (monitor.output_variance(new) > 0).all()
    assert monitor.evidence(new).score.shape == (6,)
    half = network(torch.bfloat16)
    few = Monitor(half, LIKELIHOOD, 8, parameters=Projected(rank=4))
    few.fit([data(dtype=torch.bfloat16)], progress=False)
    assert few.basis.vectors.dtype == torch.float32
    assert few.selftest(new.bfloat16()).ok
    single = Monitor(network(torch.float32), LIKELIHOOD, 8, parameters=Projected(rank=4))
    single.fit([data().float()], progress=False)
    torch.testing.assert_close(
        single.score(new.float()).double(), monitor.score(new), rtol=1e-3, atol=0
    )


def test_layers_of_any_selection_are_projected() -> None:
    named = fitted(parameters=Projected(rank=4, layers=["2.*"]))
    assert named.fitted.parameters.names == ("2.weight", "2.bias")
    last = fitted(parameters=Projected(rank=4, layers=LastLayers(count=1)))
    assert last.fitted.parameters.names == ("4.weight", "4.bias")
    assert last.score(data(3)).isfinite().all()


def test_fused_takes_them(tmp_path: Path) -> None:
    fused = Fused(network(), LIKELIHOOD, parameters=Projected(rank=4))
    fused.fit([data()], progress=False).calibrate([data(60, seed=5)], progress=False)
    assert isinstance(fused.monitor.fitted.parameters, ProjectedSet)
    path, new = tmp_path / "fused.scod", data(5, seed=1)
    fused.save(path)
    loaded = Fused.load(path, fused.model)
    torch.testing.assert_close(loaded.score(new), fused.score(new))
    assert loaded.fit([data()], progress=False).monitor.projections == fused.monitor.projections


def test_what_cannot_be_is_refused_in_words() -> None:
    whole = Monitor(network(), LIKELIHOOD, 8).fit([data()], progress=False)
    with pytest.raises(OptionError, match=r"parameters=Projected\(rank=16\)"):
        _ = whole.projections
    with pytest.raises(OptionError, match="projected"):
        Monitor(network(), LIKELIHOOD, 8, parameters=Projected(rank=4)).fit(
            [data()], progress=False, products=True
        )
    with pytest.raises(ScodError):
        LocalEnsemble(
            network(),
            LIKELIHOOD,
            rank=3,
            parameters=Projected(),  # type: ignore[arg-type]
        ).fit([data()])
    with pytest.raises(ParameterSelectionError, match="divided"):
        fitted().fitted.parameters.divided(0, 2)
    with pytest.raises(ParameterSelectionError, match="divided"):
        ShardedMonitor(network(), LIKELIHOOD, 8, parameters=Projected())  # type: ignore[arg-type]
