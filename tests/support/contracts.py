"""What every sketch must do, whatever its method.

Cases are data: a new sketch adds one row to `SKETCHES`. Contracts are classes: a test module
inherits them and parametrises ``case``. Rows are ``(M, p, N)``, as in `oracles`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles import dense_fisher
from scodkit.factors.engine import Factors
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
from scodkit.sketch.base import FlatFactors
from scodkit.sketch.eigenbasis import Eigenbasis

BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
MODEST = settings(max_examples=15, deadline=None)


@dataclass(frozen=True)
class Case:
    """A sketch that holds about ``size`` vectors, from a size and a seed."""

    name: str
    make: Callable[[int, int], Sketch]

    def __str__(self) -> str:
        return self.name

    @property
    def kind(self) -> Sketch:
        return self.make(12, 0)


@dataclass(frozen=True)
class Tight(FrequentDirections):
    """Frequent Directions without the room it takes where rows are short: it must shrink."""

    def columns(self, num_parameters: int, rank: int, num_rows: int | None = None) -> int:
        super().columns(num_parameters, rank, num_rows)
        return 2 * (self.size or rank)


SKETCHES = [
    Case("nystrom-fold", lambda size, seed: Nystrom(size, Fold(), seed)),
    Case("nystrom-gaussian", lambda size, seed: Nystrom(size, Gaussian(), seed)),
    Case("nystrom-srft", lambda size, seed: Nystrom(size, SRFT(), seed)),
    Case("nystrom-sparse", lambda size, seed: Nystrom(size, SparseSign(), seed)),
    Case("two-sided", lambda size, seed: TwoSided(size, seed=seed)),
    Case("frequent", lambda size, seed: Tight(size // 2)),
    Case("frequent-drop", lambda size, seed: Tight(size // 2, shrink=False)),
    Case("frequent-roomy", lambda size, seed: FrequentDirections(size // 2)),
    Case("exact", lambda size, seed: Exact()),
]
CERTIFIED = [case for case in SKETCHES if case.kind.certified]
LINEAR = [case for case in SKETCHES if case.kind.linear]
SIZED = [case for case in SKETCHES if case.name not in ("frequent-roomy", "exact")]
SEEDED = [case for case in SKETCHES if isinstance(case.kind, Nystrom | TwoSided)]
# the two-sided sketch refuses fewer parameters than it takes of the co-range
ANY_WIDTH = [case for case in SKETCHES if not isinstance(case.kind, TwoSided)]

# fewer rows than columns and the reverse: the two regimes of Exact
WIDE, TALL = (10, 2, 60), (60, 2, 40)


def rows_with(spectrum: Tensor, shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    """Rows ``(M, p, N)`` in float64 whose Fisher has exactly these eigenvalues (the first)."""
    num_data, directions, num_parameters = shape
    generator = torch.Generator().manual_seed(seed)
    rank = min(len(spectrum), num_data * directions, num_parameters)

    def orthonormal(length: int) -> Tensor:
        values = torch.randn(length, rank, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(values).Q

    scale = (num_data * spectrum[:rank].double()).sqrt()
    rows = orthonormal(num_data * directions) * scale @ orthonormal(num_parameters).mT
    return rows.reshape(shape)


def power(exponent: float, count: int = 100) -> Tensor:
    """Eigenvalues ``1, 2^-exponent, 3^-exponent ...``."""
    return torch.arange(1, count + 1, dtype=torch.float64) ** -exponent


class Blocks(Factors):
    """Rows ``(b, q, N)`` cut along the parameters at the given places."""

    def __init__(self, rows: Tensor, cuts: list[int]) -> None:
        self.rows, self.cuts = rows, [0, *cuts, rows.shape[2]]
        self.num_rows = rows.shape[0] * rows.shape[1]

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        for start, stop in pairwise(self.cuts):
            yield slice(start, stop), self.rows[:, :, start:stop]


def feed(state: SketchState, rows: Tensor, batch: int = 7) -> SketchState:
    """Let rows ``(M, p, N)`` stream past a state, some samples at a time."""
    for part in rows.split(batch):
        total = part.double().square().sum()
        state.sketch.update(state, FlatFactors(part.flatten(0, 1)), total, len(part))
    return state


def start(sketch: Sketch, rows: Tensor) -> SketchState:
    """The state that has seen nothing, for rows like these."""
    return sketch.zero(rows.shape[2], 1, rows.dtype, "cpu")


def fit(sketch: Sketch, rows: Tensor, batch: int = 7, rank: int = 10**6) -> Eigenbasis:
    """One pass over rows ``(M, p, N)``; every eigenpair there is, unless told."""
    return sketch.eigenbasis(feed(start(sketch, rows), rows, batch), rank)


def dense(basis: Eigenbasis) -> Tensor:
    """``F_hat`` in float64."""
    vectors = basis.vectors.double()
    return vectors * basis.values.double() @ vectors.mT


def relative(found: Tensor, wanted: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((found - wanted).norm() / wanted.norm())


def residual(basis: Eigenbasis, rows: Tensor) -> tuple[float, float, float]:
    """Smallest and largest eigenvalue of ``F - F_hat``, and the largest of ``F``."""
    fisher = dense_fisher(rows.double())
    values = torch.linalg.eigvalsh(fisher - dense(basis))
    return float(values[0]), float(values[-1]), float(torch.linalg.matrix_norm(fisher, 2))


def same(one: Eigenbasis, two: Eigenbasis) -> bool:
    """Whether two bases agree bit for bit."""
    return torch.equal(one.values, two.values) and torch.equal(one.vectors, two.vectors)


class SketchContract:
    """For every sketch."""

    @pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
    def test_exact_when_the_rank_fits(self, case: Case, shape: tuple[int, int, int]):
        rows = rows_with(torch.logspace(0, -7.5, 5), shape)
        basis = fit(case.make(24, 0), rows, rank=5)
        assert relative(dense(basis), dense_fisher(rows)) < 1e-10

    @pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
    def test_float32_is_as_good_as_its_data(self, case: Case, shape: tuple[int, int, int]):
        rows = rows_with(torch.logspace(0, -3, 5), shape).float()
        basis = fit(case.make(24, 0), rows, rank=5)
        assert basis.vectors.dtype == basis.values.dtype == torch.float32
        # losing half the digits somewhere would show as sqrt(eps), above 3e-4
        assert relative(dense(basis), dense_fisher(rows.double())) < 1e-5
        overlap = basis.vectors.double().mT @ basis.vectors.double()
        assert (overlap - torch.eye(5, dtype=torch.float64)).abs().max() < 1e-6

    @pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
    def test_form_of_the_result(self, case: Case, shape: tuple[int, int, int]):
        rows = rows_with(power(1.0), shape)
        basis = fit(case.make(24, 0), rows, rank=4)
        assert basis.vectors.shape == (shape[2], 4)
        identity = torch.eye(4, dtype=torch.float64)
        assert (basis.vectors.mT @ basis.vectors - identity).abs().max() < 1e-12
        assert (basis.values >= 0).all()
        assert (basis.values.diff() <= 0).all()
        assert basis.num_data == shape[0]
        assert basis.trace == pytest.approx(float(dense_fisher(rows).trace()), rel=1e-12)
        assert basis.certified == case.kind.certified

    def test_same_seed_same_bits(self, case: Case):
        rows = rows_with(power(1.0), TALL)
        assert same(fit(case.make(12, 5), rows), fit(case.make(12, 5), rows))

    def test_holds_what_it_says(self, case: Case):
        rows = rows_with(power(1.0), TALL)
        sketch = case.make(12, 0)
        state = feed(start(sketch, rows), rows)
        held = sum(tensor.numel() for tensor in state.tensors.values())
        assert held == sketch.columns(TALL[2], 1, TALL[0] * TALL[1]) * TALL[2]

    def test_blocks_and_directions_change_nothing(self, case: Case):
        rows = rows_with(power(1.0), WIDE)
        sketch = case.make(12, 0)
        state = start(sketch, rows)
        sketch.update(state, Blocks(rows, [1, 17, 40]), rows.square().sum(), len(rows))
        assert state.num_rows == rows.shape[0] * rows.shape[1]
        whole = fit(sketch, rows, batch=len(rows))
        assert relative(dense(sketch.eigenbasis(state, 99)), dense(whole)) < 1e-10

    @BOTH_DTYPES
    @pytest.mark.parametrize("exponent", [-20, 20])
    def test_units_do_not_matter(self, case: Case, exponent: int, dtype):
        rows, unit = rows_with(power(1.0), TALL).to(dtype), 2.0**exponent
        found, wanted = (dense(fit(case.make(12, 0), some)) for some in (rows * unit, rows))
        allowed = 1e-10 if dtype == torch.float64 else 1e-5
        assert relative(found / unit**2, wanted) < allowed

    def test_no_data(self, case: Case):
        sketch = case.make(12, 0)
        basis = sketch.eigenbasis(sketch.zero(20, 2, torch.float64, "cpu"), 2)
        assert basis.vectors.shape == (20, basis.rank)
        assert basis.num_data == 0
        assert not basis.values.any()
        assert basis.captured == 1.0

    def test_nothing_but_zeros(self, case: Case):
        basis = fit(case.make(12, 0), torch.zeros(50, 2, 20, dtype=torch.float64))
        assert basis.num_data == 50
        assert not basis.values.any()
        assert basis.vectors.isfinite().all()
        assert (basis.captured, basis.residual_trace) == (1.0, 0.0)

    def test_an_empty_batch_changes_nothing(self, case: Case):
        rows = rows_with(power(1.0), TALL)
        sketch = case.make(12, 0)
        state = feed(start(sketch, rows), rows)
        before = sketch.eigenbasis(state, 9)
        sketch.update(state, FlatFactors(rows[:0].flatten(0, 1)), rows[:0].sum(), 0)
        assert same(before, sketch.eigenbasis(state, 9))
        assert state.num_data == len(rows)

    @BOTH_DTYPES
    @pytest.mark.parametrize("num_data", [1, 3, 60])
    def test_looking_leaves_the_state_alone(self, case: Case, num_data: int, dtype):
        rows = rows_with(power(1.0), (num_data, 1, 40)).to(dtype)
        sketch = case.make(12, 0)
        state = feed(start(sketch, rows), rows)
        untouched = state.copy()
        first, second = sketch.eigenbasis(state, 9), sketch.eigenbasis(state, 9)
        assert same(first, second)
        for name, tensor in untouched.tensors.items():
            assert torch.equal(state.tensors[name], tensor)
        kept = first.vectors.clone()
        feed(state, 2 * rows)
        assert torch.equal(first.vectors, kept)
        feed(untouched, 2 * rows)
        assert same(sketch.eigenbasis(state, 9), sketch.eigenbasis(untouched, 9))

    def test_merging_leaves_the_other_alone(self, case: Case):
        rows = rows_with(power(1.0), TALL)
        sketch = case.make(12, 0)
        one, other = (feed(start(sketch, rows), half) for half in rows.chunk(2))
        untouched = other.copy()
        merged = sketch.merge(one, other)
        feed(merged, rows)
        for name, tensor in untouched.tensors.items():
            assert torch.equal(other.tensors[name], tensor)
        assert (other.num_data, other.numbers) == (untouched.num_data, untouched.numbers)
        assert merged.num_data == 2 * len(rows)
        assert merged.num_rows == 2 * rows.shape[0] * rows.shape[1]


class SizedContract:
    """For sketches that get better with memory."""

    def test_error_falls_with_size(self, case: Case):
        means = []
        for size in (12, 24, 48, 96):
            errors = []
            for seed in range(6):
                rows = rows_with(power(1.5), (120, 1, 130), seed)
                basis = fit(case.make(size, seed), rows)
                errors.append(relative(dense(basis), dense_fisher(rows)))
            means.append(sum(errors) / len(errors))
        assert means == sorted(means, reverse=True)
        assert means[-1] < means[0] / 4


class LinearContract:
    """For sketches that add: order, batches and machines do not matter."""

    @pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
    @given(data=st.data())
    @MODEST
    def test_any_order_batch_and_split(self, case: Case, shape, data: st.DataObject):
        rows = rows_with(power(1.0), shape)
        sketch = case.make(12, 3)
        order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
        parts = rows[order].tensor_split(cuts)
        batch = data.draw(st.integers(1, len(rows)))
        states = [feed(start(sketch, rows), part, batch) for part in parts]
        merged = sketch.eigenbasis(reduce(sketch.merge, states), 99)
        whole = fit(sketch, rows, batch=len(rows))
        assert merged.num_data == whole.num_data
        assert merged.trace == pytest.approx(whole.trace, rel=1e-12)
        assert relative(dense(merged), dense(whole)) < 1e-10


@st.composite
def streams(draw: st.DrawFn) -> Tensor:
    """Rows of many shapes, spectra and scales."""
    shape = draw(st.tuples(st.integers(1, 25), st.integers(1, 3), st.integers(1, 40)))
    exponent = draw(st.sampled_from([0.0, 0.5, 2.0, 8.0]))
    scale = 10.0 ** draw(st.integers(-6, 6))
    return rows_with(scale * power(exponent), shape, draw(st.integers(0, 99)))


class CertifiedContract:
    """For sketches that promise ``F_hat <= F`` and say how far below."""

    @given(rows=streams(), size=st.integers(2, 16), batch=st.integers(1, 25), data=st.data())
    @settings(max_examples=40, deadline=None)
    def test_never_above_and_never_too_far_below(self, case: Case, rows, size, batch, data):
        basis = fit(case.make(size, data.draw(st.integers(0, 99))), rows, batch)
        for shorter in (basis, basis.truncate(data.draw(st.integers(0, basis.rank)))):
            lowest, highest, norm = residual(shorter, rows)
            assert lowest >= -shorter.slack - 1e-12 * norm
            assert highest <= shorter.residual_norm + 1e-12 * norm
            nuclear = float(dense_fisher(rows).trace() - dense(shorter).trace())
            wanted = pytest.approx(max(0.0, nuclear), abs=1e-12 * shorter.trace)
            assert shorter.residual_trace == wanted

    # low rank and a long stream: rounding has many places to go and nothing to hide behind
    @pytest.mark.parametrize("spectrum", [[1.0], [1.0, 0.1, 1e-3]], ids=["one", "three"])
    @pytest.mark.parametrize("shape", [(40, 1, 500), (1500, 1, 40)], ids=["short", "long"])
    def test_float32_stays_within_its_slack(self, case: Case, shape, spectrum):
        rows = rows_with(torch.tensor(spectrum), shape).float()
        basis = fit(case.make(12, 0), rows, batch=1)
        lowest, highest, norm = residual(basis, rows)
        assert lowest >= -basis.slack
        assert highest <= basis.residual_norm + basis.slack
        assert basis.slack < 1e-2 * norm
