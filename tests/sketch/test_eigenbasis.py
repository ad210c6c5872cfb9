"""The eigenbasis: what truncating it keeps true."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts import (
    CERTIFIED,
    MODEST,
    TALL,
    Tight,
    dense,
    fit,
    power,
    residual,
    rows_with,
    streams,
)
from oracles import dense_fisher
from scodkit.sketch import Exact, TwoSided
from scodkit.sketch.eigenbasis import Eigenbasis


@pytest.fixture
def basis() -> Eigenbasis:
    return fit(Exact(), rows_with(power(1.0), TALL))


@st.composite
def with_residuals(draw: st.DrawFn) -> tuple[Eigenbasis, torch.Tensor]:
    """A basis and ``F``, some of which is missing from it in directions of its own."""
    size, rank = draw(st.integers(1, 20)), draw(st.integers(0, 8))
    rank = min(rank, size)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    missing = draw(st.integers(0, size))
    turn = torch.randn(size, size, generator=generator, dtype=torch.float64)
    vectors = torch.linalg.qr(turn).Q[:, :rank]
    values = torch.rand(rank, generator=generator, dtype=torch.float64).sort(descending=True)
    spread = torch.randn(size, missing, generator=generator, dtype=torch.float64)
    rest = draw(st.sampled_from([0.0, 1e-3, 1.0])) * spread @ spread.mT
    fisher = vectors * values.values @ vectors.mT + rest
    basis = Eigenbasis(
        values=values.values,
        vectors=vectors,
        num_data=10,
        trace=float(fisher.trace()),
        certified=True,
        residual_norm=float(torch.linalg.matrix_norm(rest, 2)),
        residual_rank=missing,
    )
    return basis, fisher


class TestTruncate:
    def test_keeps_the_largest(self, basis):
        shorter = basis.truncate(3)
        assert shorter.rank == 3
        assert torch.equal(shorter.values, basis.values[:3])
        assert torch.equal(shorter.vectors, basis.vectors[:, :3])
        assert (shorter.num_data, shorter.trace) == (basis.num_data, basis.trace)
        assert (shorter.slack, shorter.clamped) == (basis.slack, basis.clamped)

    def test_has_memory_of_its_own(self, basis):
        shorter = basis.truncate(3)
        basis.values.zero_()
        basis.vectors.zero_()
        assert shorter.values.all()
        assert shorter.vectors.any(0).all()

    @pytest.mark.parametrize("extra", [0, 1, 100])
    def test_to_more_than_there_is_changes_nothing(self, basis, extra):
        assert basis.truncate(basis.rank + extra) is basis

    def test_to_nothing(self, basis):
        nothing = basis.truncate(0)
        assert nothing.vectors.shape == (basis.vectors.shape[0], 0)
        assert nothing.captured == 0.0
        assert nothing.residual_trace == basis.trace
        assert nothing.residual_norm == pytest.approx(float(basis.values[0]), rel=1e-12)

    @given(drawn=with_residuals(), data=st.data())
    @MODEST
    def test_bounds_hold_at_every_rank(self, drawn, data):
        basis, fisher = drawn
        tiny = 1e-12 * max(1.0, basis.trace)
        for _ in range(2):  # also when truncated again
            basis = basis.truncate(data.draw(st.integers(0, basis.rank)))
            missing = torch.linalg.eigvalsh(fisher - dense(basis))
            assert basis.certified
            assert float(missing[-1]) <= basis.residual_norm + tiny
            assert basis.residual_norm <= basis.residual_trace + tiny
            assert basis.residual_trace == pytest.approx(float(missing.sum()), abs=tiny)
            assert int((missing > 1e-9).sum()) <= basis.residual_rank <= fisher.shape[0]

    @pytest.mark.parametrize("case", CERTIFIED, ids=str)
    @given(rows=streams(), data=st.data())
    @MODEST
    def test_bounds_hold_after_a_sketch(self, case, rows, data):
        basis = fit(case.make(10, 1), rows)
        shorter = basis.truncate(data.draw(st.integers(0, basis.rank)))
        _, highest, norm = residual(shorter, rows)
        assert shorter.certified
        assert highest <= shorter.residual_norm + 1e-12 * norm
        rest = torch.linalg.eigvalsh(dense_fisher(rows) - dense(shorter))
        assert int((rest > 1e-9 * norm).sum()) <= shorter.residual_rank

    def test_of_the_exact_basis_leaves_the_next_eigenvalue(self, basis):
        for rank in (1, 5, 20):
            shorter = basis.truncate(rank)
            assert shorter.residual_norm == pytest.approx(float(basis.values[rank]), rel=1e-9)
            assert shorter.residual_rank == basis.rank - rank

    def test_without_a_certificate_gives_none(self):
        shorter = fit(TwoSided(22), rows_with(power(1.0), TALL)).truncate(2)
        assert shorter.rank == 2
        assert not shorter.certified
        assert shorter.residual_norm == float("inf")


class TestCaptured:
    def test_is_the_share_of_the_trace(self, basis):
        shorter = basis.truncate(4)
        wanted = float(basis.values[:4].sum() / basis.values.sum())
        assert shorter.captured == pytest.approx(wanted, rel=1e-12)
        assert shorter.residual_trace == pytest.approx((1 - wanted) * basis.trace, rel=1e-12)

    def test_grows_with_the_rank(self, basis):
        shares = [basis.truncate(rank).captured for rank in range(basis.rank + 1)]
        assert shares == sorted(shares)
        assert shares[-1] == pytest.approx(1.0, rel=1e-12)

    def test_of_nothing_is_all(self, basis):
        assert replace(basis.truncate(0), trace=0.0).captured == 1.0

    def test_a_residual_is_never_negative(self, basis):
        assert replace(basis, trace=basis.trace * (1 - 1e-9)).residual_trace == 0.0

    def test_many_small_values_in_float32_are_all_counted(self):
        values = torch.cat([torch.ones(1), torch.full((100_000,), 1e-8)])
        basis = Eigenbasis(values, torch.zeros(1, len(values)), 1, 1.001, True, 0.0, 0)
        assert basis.captured == pytest.approx(1.0, rel=1e-8)


class TestBoundedByTrace:
    def test_never_loosens(self, basis):
        shorter = replace(basis.truncate(2), residual_norm=1e-6)
        assert shorter.bounded_by_trace().residual_norm == 1e-6
        unknown = replace(shorter, residual_norm=float("inf")).bounded_by_trace()
        assert unknown.residual_norm >= unknown.residual_trace

    @given(negative=st.integers(0, 4), slack=st.floats(1e-6, 0.1))
    @MODEST
    def test_counts_what_rounding_may_hide(self, negative, slack):
        # F - F_hat has one eigenvalue of 1 and `negative` ones of -slack inside the basis
        values = torch.full((4,), 2.0, dtype=torch.float64)
        trace = 8.0 + 1.0 - negative * slack
        vectors = torch.eye(6, dtype=torch.float64)[:, :4]
        inf = float("inf")
        basis = Eigenbasis(values, vectors, 1, trace, True, inf, 6, slack=slack)
        assert basis.bounded_by_trace().residual_norm >= 1.0 - 1e-12


class TestMoving:
    def test_to_where_it_is_is_itself(self, basis):
        assert basis.to("cpu") is basis
        assert basis.to(torch.device("cpu")) is basis

    def test_elsewhere_takes_everything_along(self, basis):
        moved = basis.to("meta")
        assert moved.values.device.type == moved.vectors.device.type == "meta"
        assert moved.values.shape == basis.values.shape
        assert moved.trace == basis.trace
        assert basis.values.device.type == "cpu"

    def test_is_frozen(self, basis):
        with pytest.raises(FrozenInstanceError):
            basis.trace = 1.0


def test_the_bound_of_frequent_directions_is_not_the_trace():
    rows = rows_with(power(0.2), TALL)
    basis = fit(Tight(10), rows)
    _, highest, norm = residual(basis, rows)
    assert highest <= basis.residual_norm + 1e-12 * norm
    assert basis.residual_norm < basis.residual_trace / 4
