"""Sketched Lanczos against dense projections, and what its sketch may cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baseline_contracts import (
    LIKELIHOODS,
    OUTPUTS,
    BaselineContract,
    cases,
    network,
    parametrised,
    some,
    training_data,
)
from oracles import dense_factors, dense_fisher
from scodkit import Categorical, Gaussian, LastLayers
from scodkit.baselines import sketched_lanczos
from scodkit.baselines.sketched_lanczos import (
    SketchedLanczos,
    _orthonormal,
    _Sketch,
    lanczos_vectors,
)
from scodkit.errors import NondeterministicError, NonFiniteError, OptionError
from scodkit.likelihoods import MonteCarlo
from scodkit.model.inputs import Inputs
from scodkit.sketch import SRFT, Fold, Map, SparseSign
from scodkit.sketch import Gaussian as GaussianMap
from scodkit.sketch.base import FlatFactors

EVERY = tuple(OUTPUTS)
MAPS = [SparseSign(), SparseSign(nonzeros=3), Fold(), GaussianMap(), SRFT()]
EPS = torch.finfo(torch.float64).eps


def made(**options: Any) -> Any:
    return lambda model, family: SketchedLanczos(model, family, rank=4, **options)


def fitted(kind: str, **options: Any) -> SketchedLanczos:
    method = SketchedLanczos(network(kind), LIKELIHOODS[kind], **options)
    return method.fit(training_data(kind), progress=False)


def dense_krylov(matrix: Tensor, start: Tensor, steps: int) -> Tensor:
    """Orthonormal basis of the Krylov space, every vector against all before it: (N, steps)."""
    basis = (start / start.norm())[:, None]
    while basis.shape[1] < steps:
        image = matrix @ basis[:, -1]
        for _ in range(3):
            image = image - basis @ (basis.mT @ image)
        basis = torch.cat([basis, image[:, None] / image.norm()], dim=1)
    return basis


def dense_parts(kind: str, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The Lanczos vectors (N, rank) of the training data, and rows (6, p, N) to score."""
    model, family = network(kind), LIKELIHOODS[kind]
    x = torch.cat([x for x, _ in training_data(kind)])
    fisher = dense_fisher(dense_factors(model, Inputs((x,), {}), family))
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(len(fisher), dtype=torch.float64, generator=generator)
    rows = dense_factors(model, Inputs((some(),), {}), family)
    return dense_krylov(fisher, fisher @ start, rank), rows


def dense_map(mapping: Map, shape: tuple[int, int], seed: int = 0) -> Tensor:
    """S (s, N), with columns of unit length on average."""
    like = torch.empty(0, dtype=torch.float64)
    return mapping.rows(0, shape[0], shape, seed, like).mT * math.sqrt(shape[0] / shape[1])


def squares(rows: Tensor) -> Tensor:
    return rows.square().sum((1, 2))


@parametrised(
    cases(made(size=60), *EVERY),
    cases(made(size=10_000), "categorical"),
    cases(made(size=60, sketched_length=True, map=Fold()), "scaled"),
)
class TestContract(BaselineContract):
    pass


@pytest.mark.parametrize("kind", EVERY)
def test_without_a_sketch_the_krylov_space_is_projected_out(kind: str) -> None:
    vectors, rows = dense_parts(kind, 4)
    wanted = squares(rows - rows @ vectors @ vectors.mT)
    for options in ({}, {"sketched_length": True}):
        found = fitted(kind, rank=4, size=len(vectors), **options).score(some())
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("mapping", MAPS, ids=str)
def test_sketched_scores_are_those_of_the_dense_map(mapping: Map) -> None:
    vectors, rows = dense_parts("categorical", 4, seed=5)
    s = dense_map(mapping, (len(vectors), 50), seed=5)
    inside = squares(rows @ s.mT @ torch.linalg.qr(s @ vectors).Q)
    options = {"rank": 4, "size": 50, "map": mapping, "seed": 5}
    found = fitted("categorical", **options).score(some())
    wanted = (squares(rows) - inside).clamp_min(0)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)
    found = fitted("categorical", sketched_length=True, **options).score(some())
    torch.testing.assert_close(found, squares(rows @ s.mT) - inside, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("mapping", MAPS, ids=str)
def test_a_sketch_changes_scores_by_its_distortion_at_most(mapping: Map) -> None:
    """With squared lengths off by a factor 1 +- e in the span of vectors and rows."""
    vectors, rows = dense_parts("categorical", 4)
    exact, total = squares(rows - rows @ vectors @ vectors.mT), squares(rows)
    for seed in range(5):
        shape = (len(vectors), 80)
        s = dense_map(mapping, shape, seed)
        sketch, basis = _Sketch(mapping, shape, seed), _orthonormal(s @ vectors, 1e-8)
        for i, row in enumerate(rows):
            span = torch.linalg.qr(torch.cat([vectors, row.mT], dim=1)).Q
            e = float((torch.linalg.svdvals(s @ span).square() - 1).abs().max())
            # all of a sample's rows at once
            parts = sketch.lengths(FlatFactors(row), basis)
            length, sketched, inside = (float(part.sum()) for part in parts)
            assert length == pytest.approx(float(total[i]), rel=1e-12)
            assert abs(length - inside - float(exact[i])) <= 2 * e * length
            assert abs(sketched - inside - float(exact[i])) <= e * float(exact[i]) * (1 + 1e-9)


def test_the_mean_over_maps_is_a_known_share_of_the_exact_score() -> None:
    size, rank, runs = 24, 3, 400
    generator = torch.Generator().manual_seed(1)
    tall = torch.randn(60, rank, dtype=torch.float64, generator=generator)
    vectors = torch.linalg.qr(tall).Q
    row = torch.randn(1, 60, dtype=torch.float64, generator=generator)
    exact = float((row - row @ vectors @ vectors.mT).square().sum())
    plain, within = [], []
    for seed in range(runs):
        sketch = _Sketch(GaussianMap(), (60, size), seed)
        basis = _orthonormal(sketch.of(vectors.mT, 0).mT, 1e-8)
        total, sketched, inside = sketch.lengths(FlatFactors(row), basis)
        plain.append(float(total - inside))
        within.append(float(sketched - inside))
    for found in (torch.tensor(plain), torch.tensor(within)):
        error = float(found.std()) / math.sqrt(runs)
        assert abs(float(found.mean()) - (1 - rank / size) * exact) <= 4 * error


@pytest.mark.parametrize("mapping", MAPS, ids=str)
def test_maps_keep_squared_lengths_on_average_and_better_when_larger(mapping: Map) -> None:
    row = torch.randn(1, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    off = []
    for size in (20, 80):
        kept = [_Sketch(mapping, (400, size), seed).of(row, 0) for seed in range(200)]
        ratios = torch.cat(kept).square().sum(1) / row.square().sum()
        error = float(ratios.std()) / math.sqrt(len(ratios))
        assert abs(float(ratios.mean()) - 1) <= 5 * error
        off.append(float(ratios.std()))
        assert off[-1] <= 1.3 * math.sqrt(2 / size)
    assert 1.6 <= off[0] / off[1] <= 2.7  # the root of four, or more for orthogonal columns


def test_a_sketch_of_pieces_is_the_sketch_of_the_whole(monkeypatch) -> None:
    rows = torch.randn(3, 70, dtype=torch.float64)
    sketch = _Sketch(SparseSign(), (70, 20), 4)
    wanted = rows @ dense_map(SparseSign(), (70, 20), 4).mT
    torch.testing.assert_close(sketch.of(rows, 0), wanted, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(sketched_lanczos, "_CHUNK", 130)  # six columns at a time
    torch.testing.assert_close(sketch.of(rows, 0), wanted, rtol=1e-12, atol=1e-12)
    halves = sketch.of(rows[:, :33], 0) + sketch.of(rows[:, 33:], 33)
    torch.testing.assert_close(halves, wanted, rtol=1e-12, atol=1e-12)


def well_conditioned(size: int) -> tuple[Tensor, Tensor]:
    tall = torch.randn(
        size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    values = torch.linspace(1.0, 2.0, size, dtype=torch.float64)
    turn = torch.linalg.qr(tall).Q
    return turn * values @ turn.mT, tall[0]


def test_lanczos_vectors_are_those_of_full_orthogonalisation() -> None:
    matrix, start = well_conditioned(12)
    asked = []

    def times(vector: Tensor) -> Tensor:
        asked.append(vector)
        return matrix @ vector

    found = torch.stack(list(lanczos_vectors(times, start, 6, EPS)), dim=1)
    wanted = dense_krylov(matrix, start, 6)
    torch.testing.assert_close(
        found, wanted * (found * wanted).sum(0).sign(), rtol=0, atol=1e-10
    )
    assert len(asked) == 5


def test_lanczos_stops_where_there_is_nothing_more() -> None:
    values = torch.tensor([3.0, 2.0, 2.0, 0.0, 0.0], dtype=torch.float64)

    def vectors(start: Tensor) -> list[Tensor]:
        return list(lanczos_vectors(lambda v: values * v, start, 5, EPS))

    one = torch.ones(5, dtype=torch.float64)
    assert len(vectors(one)) == 3  # three different eigenvalues
    assert len(vectors(values * one)) == 2
    assert len(vectors(one[:1].expand(5) * (values == 3))) == 1
    assert vectors(0 * one) == []


def test_repeated_directions_are_dropped_and_the_leading_ones_kept() -> None:
    """A spectrum on which the recurrence is known to find its first vectors again."""
    values = torch.logspace(0, -10, 60, dtype=torch.float64)
    start = torch.ones(60, dtype=torch.float64)
    found = torch.stack(list(lanczos_vectors(lambda v: values * v, start, 40, EPS)), dim=1)
    assert (found.mT @ found - torch.eye(found.shape[1])).abs().max() > 0.5  # repeats
    basis = _orthonormal(found, math.sqrt(EPS))
    assert basis.shape[1] < found.shape[1]
    torch.testing.assert_close(
        basis.mT @ basis, torch.eye(basis.shape[1], dtype=torch.float64), rtol=0, atol=1e-12
    )
    # the first eigenvectors (those of the unit vectors) lie within
    assert (1 - basis[:10].square().sum(1)).abs().max() < 1e-8


def test_what_depends_on_others_is_no_direction_of_its_own() -> None:
    a = torch.eye(6, 2, dtype=torch.float64)
    many = torch.cat([a, a @ torch.tensor([[1.0], [1.0]]).double() + 1e-12, 0 * a], dim=1)
    basis = _orthonormal(many, 1e-8)
    assert basis.shape == (6, 2)
    torch.testing.assert_close(basis @ basis.mT, torch.diag(a.sum(1)), rtol=0, atol=1e-10)
    assert _orthonormal(0 * a, 1e-8).shape == (6, 0)


def test_all_of_a_small_data_set_is_known() -> None:
    """Two samples have two directions: a third pass finds that there are no more."""
    model = network("gaussian")
    x = training_data("gaussian")[0][0][:2]
    method = in_passes(SketchedLanczos(model, Gaussian(), rank=9)).fit([x], progress=False)
    assert passes(method) == 3
    assert method._ready()["basis"].shape == (161, 2)
    assert method.score(x).max() < 1e-12
    rows = dense_factors(model, Inputs((x,), {}), Gaussian())[:, 0]
    other = dense_factors(model, Inputs((some(),), {}), Gaussian())[:, 0]
    inside = torch.linalg.lstsq(rows.mT, other.mT).solution.mT @ rows
    wanted = (other - inside).square().sum(1)
    torch.testing.assert_close(method.score(some()), wanted, rtol=1e-8, atol=1e-12)


def test_data_without_curvature_leaves_the_whole_length() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        model[0].bias.fill_(-1.0)
        model[0].weight.fill_(1.0)
    method = SketchedLanczos(model, Gaussian(), rank=2, parameters=["0.*"])
    method.fit([torch.zeros(4, 3, dtype=torch.float64)], progress=False)
    x = torch.ones(1, 3, dtype=torch.float64)
    wanted = 4 * model[2].weight.detach().square().sum()  # three inputs and a bias
    torch.testing.assert_close(method.score(x), wanted[None])


def test_only_the_chosen_weights_count() -> None:
    names = ["5.weight", "5.bias"]
    rows = dense_factors(network("scaled"), Inputs((some(),), {}), LIKELIHOODS["scaled"], names)
    method = fitted("scaled", rank=2, parameters=LastLayers(count=1))
    assert method._ready()["basis"].shape == (12, 2)
    assert (method.score(some()) < squares(rows)).all()


def test_drawn_factors_are_the_same_in_every_pass() -> None:
    family = MonteCarlo(lambda out: torch.distributions.Normal(out, 1.0), samples=3)
    method = SketchedLanczos(network("gaussian"), family, rank=3, size=40)
    found = method.fit(training_data("gaussian"), progress=False).score(some())
    torch.testing.assert_close(method.score(some()[:1]), found[:1])


def test_float32_gives_about_the_same_scores() -> None:
    data = [x.float() for x, _ in training_data("categorical")]
    method = SketchedLanczos(network("categorical").float(), Categorical(), rank=4, size=60)
    found = method.fit(data, progress=False).score(some().float())
    wanted = fitted("categorical", rank=4, size=60).score(some())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-4)


def test_directions_may_come_one_by_one() -> None:
    for size in (60, 10_000):
        method = SketchedLanczos(network("categorical"), Categorical(), rank=4, size=size)
        method.memory_budget = 1
        method.fit(training_data("categorical"), progress=False)
        wanted = fitted("categorical", rank=4, size=size).score(some())
        torch.testing.assert_close(method.score(some()), wanted, rtol=1e-9, atol=1e-12)


def passes(method: SketchedLanczos) -> int:
    """How often the fit has read the data."""
    return int(method._ready()["passes"])


def in_passes(method: SketchedLanczos) -> SketchedLanczos:
    """The same, without room to keep anything."""
    method.memory_budget = 1
    return method


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_factors_that_fit_are_read_once(likelihood: str) -> None:
    kept = fitted(likelihood, rank=4, size=200)
    data = training_data(likelihood)
    again = in_passes(fitted(likelihood, rank=4, size=200)).fit(data, progress=False)
    assert (passes(kept), passes(again)) == (1, 4)
    torch.testing.assert_close(again.score(some()), kept.score(some()), rtol=1e-8, atol=1e-10)
    rows = sum(len(x) for x, _ in data) * kept.likelihood.num_directions((3,))
    if likelihood == "categorical":  # room for all but one number
        again.memory_budget = 8 * rows * 173 - 1
        assert passes(again.fit(data, progress=False)) > 1
        again.memory_budget += 1
        assert passes(again.fit(data, progress=False)) == 1


@pytest.mark.parametrize("why", ["draws", "no way through", None])
def test_without_room_factors_are_formed_again_only_where_products_are_not(
    why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = MonteCarlo(lambda out: torch.distributions.Normal(out, 1.0), samples=3)
    if why == "no way through":
        monkeypatch.setattr(sketched_lanczos, "choose_jacobian", lambda *_: (None, ""))
    formed, scores = [], []
    rows = sketched_lanczos._Fisher._add_rows
    monkeypatch.setattr(
        sketched_lanczos._Fisher, "_add_rows", lambda *a: (formed.append(1), rows(*a))[1]
    )
    for budget in (2**30, 1):
        method = SketchedLanczos(network("gaussian"), family if why == "draws" else Gaussian())
        method.rank, method.memory_budget = 3, budget
        formed.clear()
        method.fit(training_data("gaussian"), progress=False)
        scores.append(method.score(some()))
    torch.testing.assert_close(*scores, rtol=1e-8, atol=1e-10)
    rows_a_sample = 3 if why == "draws" else 1
    assert len(formed) == (8 if why is None else 3 * 40 * rows_a_sample)


def test_what_is_kept_is_the_sketch_of_the_vectors() -> None:
    method = in_passes(fitted("categorical", rank=4, size=50))
    method.fit(training_data("categorical"), progress=False)
    assert method._ready()["basis"].shape == (50, 4)  # nothing as long as the weights
    assert SketchedLanczos(network("gaussian"), Gaussian(), rank=3).size == 60


@pytest.mark.parametrize("offset", [0.0, 5000.0])
def test_data_that_changes_between_passes_is_refused(offset: float) -> None:
    class Changing:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([x * (1 + 0.1 * self.passes) for x, _ in training_data("gaussian")])

    model = network("gaussian")
    with torch.no_grad():
        model[-1].bias += offset
    method = in_passes(SketchedLanczos(model, Gaussian(), rank=3))
    with pytest.raises(NondeterministicError, match="same data in every pass"):
        method.fit(Changing(), progress=False)


def test_what_cannot_be_fitted_is_refused() -> None:
    model, data = network("gaussian"), [x for x, _ in training_data("gaussian")]
    with pytest.raises(OptionError, match="more than once"):
        SketchedLanczos(model, Gaussian(), rank=3).fit(iter(data), progress=False)
    with pytest.raises(OptionError, match="rank < 6, the number of weights"):
        SketchedLanczos(model, Gaussian(), rank=6, parameters=["5.*"]).fit(data, progress=False)
    unseen = nn.Sequential(nn.AvgPool1d(2, stride=3), nn.Linear(1, 1)).double()
    ignored = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, torch.nan]], dtype=torch.float64)
    assert unseen(ignored).isfinite().all()
    with pytest.raises(NonFiniteError, match="finite training data"):
        SketchedLanczos(unseen, Gaussian(), rank=1).fit([ignored], progress=False)
    data[1][2, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="finite training data"):
        SketchedLanczos(model, Gaussian(), rank=3).fit(data, progress=False)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"rank": 0}, "1 <= rank <= size"),
        ({"rank": 5, "size": 4}, "size=100"),
        ({"map": "fold"}, "map from scodkit.sketch"),
        ({"seed": 0.5}, "integer seed"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(OptionError, match=wanted):
        SketchedLanczos(network("gaussian"), Gaussian(), **options)
