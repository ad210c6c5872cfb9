"""Sketches whose weights several parties divide: together they are the whole one."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scodkit.errors import MergeError, OptionError
from scodkit.factors.engine import FactorsOf, SharedFactors
from scodkit.scoring.energies import energies
from scodkit.sketch import Exact, FrequentDirections, Nystrom, Sketch, SketchState, TwoSided
from scodkit.sketch.base import FlatFactors
from scodkit.sketch.eigenbasis import Eigenbasis
from scodkit.sketch.maps import Fold, Gaussian, SparseSign

SKETCHES = {
    "nystrom": Nystrom(size=12),
    "gaussian map": Nystrom(size=12, map=Gaussian()),
    "square": Nystrom(size=60, map=Fold()),
    "two sided": TwoSided(size=31),
    "two sided, signs": TwoSided(size=31, map=SparseSign()),
}


class Parties:
    """Threads that add up tensors, each with its own."""

    def __init__(self, count: int) -> None:
        self._given: list[Tensor] = [torch.empty(0)] * count
        self._barrier = threading.Barrier(count, timeout=60)

    def add_up(self, rank: int):
        def add(sums: Tensor) -> Tensor:
            self._given[rank] = sums
            self._barrier.wait()
            total = torch.stack(self._given).sum(0)
            self._barrier.wait()
            return total

        return add

    def run(self, work, arguments) -> list:
        with ThreadPoolExecutor(len(arguments)) as pool:
            return list(pool.map(lambda pair: work(*pair), enumerate(arguments)))


def whole_state(sketch: Sketch, parts: list[Tensor]) -> SketchState:
    state = sketch.zero(parts[0].shape[1], 5, parts[0].dtype, "cpu")
    for rows in parts:
        factors = FlatFactors(rows)
        sketch.update(state, factors, factors.squared_norms().sum(), len(rows))
    return state


def divided(
    sketch: Sketch, parts: list[Tensor], edges: list[int]
) -> list[tuple[SketchState, Eigenbasis]]:
    ranges = [range(a, b) for a, b in itertools.pairwise(edges)]
    parties = Parties(len(ranges))

    def work(rank: int, weights: range) -> tuple[SketchState, Eigenbasis]:
        state = sketch.zero(parts[0].shape[1], 5, parts[0].dtype, "cpu", weights)
        state.add_up = parties.add_up(rank)
        for rows in parts:
            own = FlatFactors(rows[:, weights.start : weights.stop])
            factors = SharedFactors(own, state.add_up)
            norms = factors.squared_norms()
            kept = FactorsOf(factors, torch.ones(len(rows), dtype=torch.bool))
            sketch.update(state, kept, norms.sum(), len(rows))
        return state, sketch.eigenbasis(state, 5)

    return parties.run(work, ranges)


def rows_of(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -2, 60, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))[0]
    rows = torch.randn(40, 60, generator=generator, dtype=torch.float64) * scale @ turn
    return list(rows.to(dtype).split([13, 20, 7]))


@pytest.mark.parametrize("name", SKETCHES)
@settings(max_examples=10, deadline=None)
@given(cuts=st.sets(st.integers(1, 59), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_divided_by_weights_it_is_the_whole_sketch(name: str, cuts, seed: int) -> None:
    sketch, parts = SKETCHES[name], rows_of(seed, torch.float64)
    whole = whole_state(sketch, parts)
    expected = sketch.eigenbasis(whole, 5)
    found = divided(sketch, parts, [0, *sorted(cuts), 60])
    for tensor in whole.tensors:
        joined = torch.cat([state.tensors[tensor] for state, _ in found])
        assert torch.allclose(joined, whole.tensors[tensor], rtol=0, atol=1e-12)
    for state, basis in found:
        assert state.num_data == whole.num_data
        assert torch.allclose(basis.values, expected.values, rtol=1e-7)
        assert basis.trace == pytest.approx(expected.trace, rel=1e-12)
        assert basis.certified == expected.certified
    vectors = torch.cat([basis.vectors for _, basis in found])
    identity = torch.eye(vectors.shape[1], dtype=torch.float64)
    assert torch.allclose(vectors.mT @ vectors, identity, atol=1e-7)
    same = (vectors * expected.vectors).sum(0).abs()  # up to their signs
    assert torch.allclose(same, torch.ones(5, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("name", SKETCHES)
def test_in_single_precision_the_certificate_still_holds(name: str) -> None:
    sketch, parts = SKETCHES[name], rows_of(3, torch.float32)
    expected = sketch.eigenbasis(whole_state(sketch, parts), 5)
    for _, basis in divided(sketch, parts, [0, 9, 41, 60]):
        assert torch.allclose(basis.values, expected.values, rtol=1e-4)
        assert basis.slack == pytest.approx(expected.slack, rel=0.5)


def test_energies_are_those_of_all_weights() -> None:
    parts = rows_of(1, torch.float64)
    basis = Exact().eigenbasis(whole_state(Exact(), parts), 5)
    edges = [range(25), range(25, 60)]
    parties = Parties(2)
    rows = parts[0]

    def work(rank: int, weights: range):
        own = FlatFactors(rows[:, weights.start : weights.stop])
        shared = SharedFactors(own, parties.add_up(rank))
        return energies(shared.hold(), replace_vectors(basis, weights))

    whole = energies(FlatFactors(rows), basis)
    for found in parties.run(work, edges):
        assert torch.allclose(found.total, whole.total)
        assert torch.allclose(found.along, whole.along)


def replace_vectors(basis: Eigenbasis, weights: range) -> Eigenbasis:
    return replace(basis, vectors=basis.vectors[weights.start : weights.stop])


@pytest.mark.parametrize("sketch", [Exact(), FrequentDirections(size=6)])
def test_sketches_of_whole_rows_are_not_divided(sketch: Sketch) -> None:
    with pytest.raises(OptionError, match="type sketch=Nystrom"):
        sketch.zero(60, 5, torch.float64, "cpu", range(30))


def test_other_weights_are_not_merged() -> None:
    sketch = Nystrom(size=12)
    one, other = (
        sketch.zero(60, 5, torch.float64, "cpu", weights)
        for weights in (range(30), range(30, 60))
    )
    with pytest.raises(MergeError, match="weights: range"):
        sketch.merge(one, other)
