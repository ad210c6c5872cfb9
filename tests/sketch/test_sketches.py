"""The sketches: the contracts of `contracts`, then what is each one's own."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contracts import (
    ANY_WIDTH,
    BOTH_DTYPES,
    CERTIFIED,
    LINEAR,
    MODEST,
    SEEDED,
    SIZED,
    SKETCHES,
    TALL,
    WIDE,
    CertifiedContract,
    LinearContract,
    SizedContract,
    SketchContract,
    Tight,
    dense,
    feed,
    fit,
    power,
    relative,
    residual,
    rows_with,
    same,
    start,
    streams,
)
from oracles import dense_fisher
from scodkit.errors import MergeError, OptionError
from scodkit.numerics.matmul import tall_gram
from scodkit.sketch import (
    SRFT,
    Exact,
    Fold,
    FrequentDirections,
    Gaussian,
    Nystrom,
    Sketch,
    SketchState,
    SparseSign,
    TwoSided,
)


@pytest.mark.parametrize("case", SKETCHES, ids=str)
class TestEverySketch(SketchContract):
    pass


@pytest.mark.parametrize("case", SIZED, ids=str)
class TestSized(SizedContract):
    pass


@pytest.mark.parametrize("case", LINEAR, ids=str)
class TestLinear(LinearContract):
    pass


@pytest.mark.parametrize("case", CERTIFIED, ids=str)
class TestCertified(CertifiedContract):
    pass


@pytest.mark.parametrize("case", SEEDED, ids=str)
def test_another_seed_gives_another_sketch(case):
    rows = rows_with(power(1.0), TALL)
    assert (
        relative(dense(fit(case.make(12, 1), rows)), dense(fit(case.make(12, 2), rows))) > 1e-3
    )


@BOTH_DTYPES
@pytest.mark.parametrize("num_parameters", [1, 5])
@pytest.mark.parametrize("case", ANY_WIDTH, ids=str)
def test_fewer_parameters_than_columns(case, num_parameters, dtype):
    rows = rows_with(power(1.0), (50, 1, num_parameters)).to(dtype)
    sketch = case.make(24, 0)
    state = feed(start(sketch, rows), rows)
    basis = sketch.eigenbasis(state, 99)
    assert same(basis, sketch.eigenbasis(state, 99))
    assert basis.vectors.shape == (num_parameters, basis.rank)
    assert basis.rank <= num_parameters
    allowed = 1e-10 if dtype == torch.float64 else 1e-5
    assert relative(dense(basis), dense_fisher(rows.double())) < allowed


def test_the_slack_covers_an_ill_conditioned_test_matrix():
    # square Gaussian matrices: some of these have a condition number above a thousand
    rows = rows_with(power(0.0), (6, 1, 6))
    for seed in range(60):
        basis = fit(Nystrom(6, Gaussian(), seed), rows)
        lowest, _, norm = residual(basis, rows)
        assert lowest >= -basis.slack - 1e-12 * norm


def merge_tree(sketch: Sketch, states: list[SketchState], picks: st.DataObject) -> SketchState:
    """Merge states two by two, in any tree."""
    while len(states) > 1:
        one = states.pop(picks.draw(st.integers(0, len(states) - 1)))
        other = states.pop(picks.draw(st.integers(0, len(states) - 1)))
        states.append(sketch.merge(one, other))
    return states[0]


def naive_directions(rows: Tensor, size: int, shrink: bool) -> Tensor:
    """``F_hat`` of Frequent Directions with ``2 size`` rows, from its definition."""
    held = torch.zeros(0, rows.shape[2], dtype=rows.dtype)
    for row in rows.flatten(0, 1):
        if len(held) == 2 * size:
            _, singular, right = torch.linalg.svd(held, full_matrices=False)
            squared = singular.square() - (singular[size].square() if shrink else 0.0)
            held = squared[:size].clamp_min(0).sqrt()[:, None] * right[:size]
        held = torch.cat([held, row[None]])
    return held.mT @ held / len(rows)


@pytest.mark.parametrize("shrink", [True, False])
def test_frequent_directions_by_definition(shrink):
    rows = rows_with(power(1.0), TALL)
    found = dense(fit(Tight(5, shrink), rows))
    assert relative(found, naive_directions(rows, 5, shrink)) < 1e-10


def test_gram_matrices_of_rows_of_any_length():
    for length in (1, 1023, 1024, 1025, 3000, (1 << 16) + 1, (1 << 17) + 1500):
        rows = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
        wanted = rows.double() @ rows.double().mT
        torch.testing.assert_close(tall_gram(rows.mT), wanted, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("kind", [Tight, FrequentDirections])
class TestFrequentDirections:
    @given(rows=streams(), size=st.integers(1, 8), batch=st.integers(1, 25), data=st.data())
    @MODEST
    def test_bound_for_any_order_and_merge_tree(self, kind, rows, size, batch, data):
        order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
        sketch = kind(size)
        states = [feed(start(sketch, rows), p, batch) for p in rows[order].tensor_split(cuts)]
        self.check(sketch, merge_tree(sketch, states, data), rows)

    @pytest.mark.parametrize("exponent", [0.0, 1.0, 4.0])
    def test_bound_on_a_long_stream(self, kind, exponent):
        rows = rows_with(power(exponent), (700, 1, 50))
        for some in (rows, rows[rows.square().sum((1, 2)).argsort()]):
            self.check(kind(6), feed(start(kind(6), rows), some), rows)

    @staticmethod
    def check(sketch: FrequentDirections, state: SketchState, rows: Tensor) -> None:
        """Assert the bounds proven for every stream, before and after truncating."""
        values = torch.linalg.eigvalsh(dense_fisher(rows)).flip(0).clamp_min(0)
        size = sketch.size
        tails = [float(values[k:].sum()) / (size - k) for k in range(size)]
        for rank in (size, 10**6):
            basis = sketch.eigenbasis(state, rank)
            lowest, highest, norm = residual(basis, rows)
            assert highest <= min(tails) + 1e-12 * norm
            assert highest <= basis.residual_norm + 1e-12 * norm
            assert lowest >= -basis.slack - 1e-12 * norm

    @given(rows=streams(), size=st.integers(1, 8), data=st.data())
    @MODEST
    def test_dropping_keeps_its_own_bound_through_merges(self, kind, rows, size, data):
        sketch = kind(size, shrink=False)
        parts = rows.tensor_split(data.draw(st.integers(1, 5)))
        state = merge_tree(sketch, [feed(start(sketch, rows), p) for p in parts], data)
        basis = sketch.eigenbasis(state, 10**6)
        lowest, highest, norm = residual(basis, rows)
        assert highest <= basis.residual_norm + 1e-12 * norm
        assert lowest >= -basis.slack - 1e-12 * norm

    def test_the_batches_of_one_order_do_not_matter(self, kind):
        rows = rows_with(power(1.0), (200, 1, 40))
        assert same(fit(kind(5), rows, batch=1), fit(kind(5), rows, batch=200))

    def test_the_rank_is_the_default_size(self, kind):
        assert kind().columns(1_000_000, 7) == 14


def paper(rows: Tensor, sketch: TwoSided) -> tuple[Tensor, Tensor]:
    """Eigenpairs of the paper's ``F_hat``, descending, straight from its formulas."""
    num_parameters = rows.shape[2]
    # sketching the identity gives the test matrices themselves
    seen = feed(start(sketch, rows), torch.eye(num_parameters, dtype=rows.dtype)[:, None])
    omega, psi = seen.tensors["y"].numpy(), seen.tensors["w"].numpy().T
    assert sketch.size is not None
    r = (sketch.size - 1) // 3
    assert (omega.shape, psi.shape) == ((num_parameters, r), (sketch.size - r, num_parameters))
    fisher = dense_fisher(rows).numpy()
    q, _ = np.linalg.qr(fisher @ omega)
    x, *_ = np.linalg.lstsq(psi @ q, psi @ fisher, rcond=None)
    values, vectors = np.linalg.eigh((q @ x + x.T @ q.T) / 2)
    return torch.from_numpy(values).flip(0), torch.from_numpy(vectors).flip(1)


class TestTwoSided:
    @pytest.mark.parametrize("family", [SRFT(), Gaussian()], ids=["srft", "gaussian"])
    @pytest.mark.parametrize("base", [0.8, 0.1], ids=["slow", "fast"])
    @pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
    def test_equals_the_formulas(self, shape, base, family):
        rows = rows_with(base ** torch.arange(20.0), shape)
        sketch = TwoSided(size=22, map=family, seed=4)
        values, vectors = paper(rows, sketch)
        for rank in (3, 14):
            wanted = vectors[:, :rank] * values[:rank].clamp_min(0) @ vectors[:, :rank].mT
            found = fit(sketch, rows, rank=rank)
            assert relative(dense(found), wanted) < 1e-8

    @pytest.mark.parametrize("family", [SRFT(), Gaussian(), Fold(), SparseSign()], ids=repr)
    def test_its_two_matrices_are_unrelated(self, family):
        identity = torch.eye(400, dtype=torch.float64)[:, None]
        sketch = TwoSided(size=22, map=family)
        seen = feed(start(sketch, identity), identity).tensors
        assert (seen["y"].mT @ seen["w"]).abs().max() < 0.5  # 1 where they share a column

    def test_counts_what_it_clamps(self):
        rows = rows_with(power(1.0), TALL)
        values, _ = paper(rows, TwoSided(size=22))
        negative = int((values < -1e-10).sum())
        assert negative > 0
        assert fit(TwoSided(size=22), rows).clamped == negative

    def test_promises_nothing(self):
        basis = fit(TwoSided(size=22), rows_with(power(1.0), TALL))
        assert not basis.certified
        assert basis.residual_norm == float("inf")

    def test_nystrom_is_better_at_equal_memory(self):
        errors = {Nystrom: 0.0, TwoSided: 0.0}
        for seed in range(10):
            rows = rows_with(power(1.5), (150, 1, 150), seed)
            for kind in errors:
                basis = fit(kind(size=26, seed=seed), rows, rank=8)
                errors[kind] += relative(dense(basis), dense_fisher(rows))
        assert errors[Nystrom] < errors[TwoSided]


class TestExact:
    @pytest.mark.parametrize("shape", [WIDE, TALL, (20, 2, 40)], ids=["wide", "tall", "full"])
    def test_the_true_eigenpairs(self, shape):
        rows = rows_with(power(1.0), shape)
        values, vectors = torch.linalg.eigh(dense_fisher(rows))
        rank = min(shape[0] * shape[1], shape[2])
        basis = fit(Exact(), rows)
        assert basis.rank == rank
        assert torch.allclose(basis.values, values.flip(0)[:rank], rtol=1e-10, atol=0)
        cosines = (basis.vectors * vectors.flip(1)[:, :rank]).sum(0).abs()
        assert torch.allclose(cosines, torch.ones_like(cosines), rtol=1e-10)
        assert basis.residual_norm < 1e-12
        assert basis.captured == pytest.approx(1.0, rel=1e-12)

    def test_never_holds_more_than_a_square(self):
        rows = rows_with(power(1.0), (100, 1, 80))
        state = start(Exact(), rows)
        for row in rows.split(1):
            feed(state, row)
            (held,) = state.tensors.values()
            assert held.numel() <= 80 * 80

    @given(split=st.integers(0, 60))
    @MODEST
    def test_both_regimes_merge_either_way(self, split):
        rows = rows_with(power(1.0), TALL)
        for parts in (rows.tensor_split([split]), rows.tensor_split([split])[::-1]):
            one, other = (feed(start(Exact(), rows), part) for part in parts)
            merged = Exact().eigenbasis(Exact().merge(one, other), 99)
            assert relative(dense(merged), dense_fisher(rows)) < 1e-12


DIFFERENT = [
    (Nystrom(8, seed=0), Nystrom(8, seed=1), ["seed=0", "seed=1"]),
    (Nystrom(8, Fold()), Nystrom(8, Gaussian()), ["Fold()", "Gaussian()"]),
    (Nystrom(8, SparseSign(2)), Nystrom(8, SparseSign(3)), ["nonzeros=2", "nonzeros=3"]),
    (Nystrom(8), Nystrom(9), ["size=8", "size=9"]),
    (TwoSided(13, seed=0), TwoSided(13, seed=1), ["seed=0", "seed=1"]),
    (TwoSided(13), TwoSided(16), ["size=13", "size=16"]),
    (FrequentDirections(4), FrequentDirections(5), ["size=4", "size=5"]),
    (
        FrequentDirections(4),
        FrequentDirections(4, shrink=False),
        ["shrink=True", "shrink=False"],
    ),
    (Nystrom(8), FrequentDirections(4), ["Nystrom", "FrequentDirections"]),
]


class TestMergeRefuses:
    @pytest.mark.parametrize(("one", "other", "words"), DIFFERENT)
    def test_other_options(self, one, other, words):
        rows = rows_with(power(1.0), WIDE)
        state, second = (feed(start(sketch, rows), rows) for sketch in (one, other))
        before = state.copy()
        with pytest.raises(MergeError) as caught:
            one.merge(state, second)
        assert all(word in str(caught.value) for word in words)
        assert state.num_data == before.num_data
        assert all(torch.equal(state.tensors[n], t) for n, t in before.tensors.items())

    @pytest.mark.parametrize("case", SKETCHES, ids=str)
    def test_another_number_of_parameters(self, case):
        sketch = case.make(12, 0)
        one, other = (sketch.zero(n, 2, torch.float64, "cpu") for n in (30, 31))
        with pytest.raises(MergeError, match="number of parameters: 30 and 31"):
            sketch.merge(one, other)

    @pytest.mark.parametrize("sketch", [Nystrom(), TwoSided(), FrequentDirections()], ids=repr)
    def test_another_size_by_default(self, sketch):
        one, other = (sketch.zero(50, rank, torch.float64, "cpu") for rank in (2, 3))
        with pytest.raises(MergeError, match=r"(size|columns)[a-z ]*: \d+ and \d+"):
            sketch.merge(one, other)


class TestOptions:
    @pytest.mark.parametrize(
        "sketch", [Nystrom(size=3), TwoSided(size=6), FrequentDirections(size=3)], ids=repr
    )
    def test_a_size_too_small_is_refused_with_one_that_is_not(self, sketch):
        with pytest.raises(OptionError, match=r"expected .* got .*type ") as caught:
            sketch.zero(1000, 5, torch.float64, "cpu")
        advice = re.search(rf"{type(sketch).__name__}\(size=(\d+)\)", str(caught.value))
        assert advice is not None
        assert type(sketch)(size=int(advice[1])).columns(1000, 5) > 0

    def test_too_few_parameters_for_two_sides(self):
        with pytest.raises(OptionError, match=r"at least 17 parameters .*Exact\(\)"):
            TwoSided(size=24).columns(16, 2)
        assert TwoSided(size=24).columns(17, 2) == 24

    def test_a_map_needs_an_entry(self):
        with pytest.raises(OptionError, match="nonzeros >= 1, got 0"):
            SparseSign(nonzeros=0)
