"""The random test matrices: reproducible from positions alone, and isotropic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import scipy.fft
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scodkit.numerics.hashing import hashed
from scodkit.sketch import SRFT, Fold, Gaussian, Map, SparseSign
from scodkit.sketch import maps as module
from scodkit.sketch.maps import SeededMatrix

LIKE = torch.zeros((), dtype=torch.float64)
MAPS = [Fold(), Gaussian(), SRFT(), SparseSign(), SparseSign(nonzeros=3)]
SEEDS = st.integers(0, 2**63 - 1)
every_map = pytest.mark.parametrize("mapping", MAPS, ids=repr)


def whole(mapping: Map, shape: tuple[int, int], seed: int = 0) -> Tensor:
    """All of Omega, ``(N, T)`` in float64."""
    return mapping.rows(0, shape[0], shape, seed, LIKE)


@cache
def many(mapping: Map, shape: tuple[int, int]) -> Tensor:
    """Omega under many seeds, ``(S, N, T)``."""
    return torch.stack([whole(mapping, shape, seed) for seed in range(800)])


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@every_map
class TestEveryMap:
    @given(data=st.data(), seed=SEEDS)
    @settings(max_examples=30, deadline=None)
    def test_any_slice_is_the_slice_of_the_whole(self, mapping, data, seed):
        num_rows = data.draw(st.integers(1, 70))
        shape = num_rows, data.draw(st.integers(1, num_rows))
        start = data.draw(st.integers(0, num_rows))
        stop = data.draw(st.integers(start, num_rows))
        part = mapping.rows(start, stop, shape, seed, LIKE)
        assert part.shape == (stop - start, shape[1])
        assert torch.equal(part, whole(mapping, shape, seed)[start:stop])

    @given(seed=SEEDS, other=SEEDS)
    @settings(max_examples=30, deadline=None)
    def test_the_seed_decides(self, mapping, seed, other):
        first = whole(mapping, (40, 12), seed)
        assert torch.equal(first, whole(mapping, (40, 12), seed))
        assert torch.equal(first, whole(mapping, (40, 12), other)) == (seed == other)

    def test_neighbouring_seeds_are_unrelated(self, mapping):
        overlaps = [
            float((whole(mapping, (200, 8), seed) * whole(mapping, (200, 8), seed + 1)).sum())
            for seed in range(100)
        ]
        # each has mean zero over seeds: 100 of them average to zero
        assert abs(np.mean(overlaps)) < 5 * np.std(overlaps) / 10
        assert max(overlaps) < 4  # of the 8 that equal matrices would have

    def test_the_global_generator_is_not_touched(self, mapping):
        before = torch.get_rng_state()
        whole(mapping, (40, 12))
        assert torch.equal(before, torch.get_rng_state())

    def test_the_default_dtype_does_not_matter(self, mapping, double_by_default):
        wide = whole(mapping, (60, 12), 3)
        torch.set_default_dtype(torch.float32)
        assert torch.equal(wide, whole(mapping, (60, 12), 3))

    def test_float32_is_float64_rounded(self, mapping):
        single = mapping.rows(0, 60, (60, 12), 3, LIKE.float())
        assert single.dtype == torch.float32
        wide = whole(mapping, (60, 12), 3)
        # a conversion and a division: a few roundings of 2**-24 each
        assert ((single.double() - wide).abs() <= 2.0**-22 * wide.abs()).all()

    @pytest.mark.parametrize("shape", [(60, 12), (9000, 5)], ids=["small", "chunked"])
    def test_project_is_the_product(self, mapping, shape):
        rows = torch.randn(3, shape[0], dtype=torch.float64, generator=torch.Generator())
        wanted = rows @ whole(mapping, shape, 7)
        found = SeededMatrix(mapping, shape, 7, rows.device).project(rows, 0)
        assert (found - wanted).abs().max() < 1e-12 * rows.norm()

    @given(cuts=st.lists(st.integers(0, 60), max_size=4))
    @settings(max_examples=20, deadline=None)
    def test_project_adds_over_blocks(self, mapping, cuts):
        rows = torch.randn(3, 60, dtype=torch.float64, generator=torch.Generator())
        edges = [0, *sorted(cuts), 60]
        matrix = SeededMatrix(mapping, (60, 12), 7, rows.device)
        parts = [matrix.project(rows[:, a:b], a) for a, b in pairwise(edges)]
        wanted = matrix.project(rows, 0)
        assert (sum(parts) - wanted).abs().max() < 1e-13 * rows.norm()

    def test_rows_are_the_pattern_with_scaled_columns(self, mapping):
        shape = (50, 13)
        pattern = mapping.pattern(0, 50, shape, 3, LIKE)
        scale = mapping.scale(shape)
        assert scale.shape == (13,)
        assert (scale > 0).all()
        assert torch.equal(whole(mapping, shape, 3), pattern * scale)

    @given(num_rows=st.integers(1, 60), data=st.data(), seed=SEEDS)
    @settings(max_examples=20, deadline=None)
    def test_patterns_of_signs_are_signs_in_any_dtype(self, mapping, num_rows, data, seed):
        shape = num_rows, data.draw(st.integers(1, num_rows))
        exact = mapping.pattern(0, num_rows, shape, seed, LIKE)
        signs = set(exact.unique().tolist()) <= {-1.0, 0.0, 1.0}
        assert signs or not mapping.signs
        if mapping.signs:
            for dtype in (torch.int8, torch.bfloat16, torch.float32):
                narrow = mapping.pattern(0, num_rows, shape, seed, LIKE.to(dtype))
                assert narrow.dtype == dtype
                assert torch.equal(narrow.double(), exact)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    @given(cuts=st.lists(st.integers(0, 300), max_size=3))
    @settings(max_examples=8, deadline=None)
    def test_kept_signs_and_remade_ones_give_the_same_products(self, mapping, dtype, cuts):
        rows = torch.randn(3, 300, generator=torch.Generator()).to(dtype)
        kept = SeededMatrix(mapping, (300, 24), 7, rows.device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_CACHED_AS_FLOATS", 0)
            as_bytes = SeededMatrix(mapping, (300, 24), 7, rows.device)
            patch.setattr(module, "_CACHED", 0)
            patch.setattr(module, "_CHUNK", 24 * 70)
            remade = SeededMatrix(mapping, (300, 24), 7, rows.device)
        assert (kept._signs is not None) == mapping.signs
        assert remade._signs is None
        assert not mapping.signs or as_bytes._signs.dtype == torch.int8
        wanted = rows.double() @ whole(mapping, (300, 24), 7)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        for matrix in (kept, as_bytes, remade):
            edges = [0, *sorted(cuts), 300]
            found = sum(matrix.project(rows[:, a:b], a) for a, b in pairwise(edges))
            assert found.dtype == sums
            error = (found.double() - wanted).abs().max()
            assert error < 4 * torch.finfo(sums).eps * rows.double().norm()
            same = torch.cat([matrix.rows(slice(a, b), found) for a, b in pairwise(edges)])
            assert same.dtype == torch.float64
            error = (rows.double() @ same - wanted).abs().max()
            assert error < 4 * torch.finfo(sums).eps * rows.double().norm()

    # 16 columns split evenly into the entries of a sparse row; 13 do not
    @pytest.mark.parametrize("shape", [(40, 16), (30, 13)], ids=str)
    @pytest.mark.parametrize("side", ["rows", "columns"])
    def test_isotropic_in_expectation(self, mapping, shape, side):
        num_rows, size = shape
        samples = many(mapping, shape)
        if side == "rows":
            grams = samples @ samples.mT
            wanted = torch.eye(num_rows, dtype=torch.float64) * size / num_rows
        else:
            grams = samples.mT @ samples
            wanted = torch.eye(size, dtype=torch.float64)
        error = (grams.mean(0) - wanted).abs()
        # five standard errors; 1e-9 for entries that are the same under every seed
        assert (error <= 5 * grams.std(0) / len(grams) ** 0.5 + 1e-9).all()


@dataclass(frozen=True)
class Recording(Map):
    """Zeros, and a note of every slice that was asked for."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def pattern(self, start, stop, shape, seed, like):
        self.asked.append((start, stop))
        return like.new_zeros(stop - start, shape[1])


def test_project_never_asks_for_more_than_a_chunk():
    mapping = Recording()
    matrix = SeededMatrix(mapping, (200_017, 200), 0, torch.device("cpu"))
    matrix.project(torch.zeros(3, 200_000), 17)
    assert max(stop - start for start, stop in mapping.asked) <= 4096
    assert mapping.asked[0][0] == 17
    assert mapping.asked[-1][1] == 200_017
    assert all(a[1] == b[0] for a, b in pairwise(mapping.asked))


class TestFold:
    @given(num_rows=st.integers(1, 90), data=st.data(), seed=SEEDS)
    @settings(max_examples=30, deadline=None)
    def test_one_entry_a_row_and_orthogonal_columns(self, num_rows, data, seed):
        size = data.draw(st.integers(1, num_rows))
        omega = whole(Fold(), (num_rows, size), seed)
        assert ((omega != 0).sum(1) == 1).all()
        assert torch.equal(omega[omega != 0].abs().unique(), omega[0].abs().max()[None])
        gram = omega.mT @ omega
        assert torch.equal(gram, gram.diag().diag())
        # a chunk of `size` rows meets every column once
        for chunk in omega[: num_rows // size * size].split(size):
            assert ((chunk != 0).sum(0) == 1).all()

    def test_a_square_one_is_orthogonal(self):
        omega = whole(Fold(), (11, 11))
        assert torch.allclose(omega @ omega.mT, torch.eye(11, dtype=torch.float64), atol=1e-15)


class TestSparseSign:
    @given(nonzeros=st.integers(1, 12), size=st.integers(1, 30), seed=SEEDS)
    @settings(max_examples=30, deadline=None)
    def test_so_many_entries_a_row(self, nonzeros, size, seed):
        omega = whole(SparseSign(nonzeros), (40, size), seed)
        assert ((omega != 0).sum(1) == min(nonzeros, size)).all()

    def test_every_column_and_both_signs_are_met(self):
        omega = whole(SparseSign(nonzeros=3), (400, 20))
        assert ((omega > 0).sum(0) > 0).all()
        assert ((omega < 0).sum(0) > 0).all()


class TestSRFT:
    # all frequencies ranked where most are taken, drawn one by one where few are; 53 is odd,
    # so that no two of them have the same magnitudes
    @pytest.mark.parametrize("shape", [(53, 53), (53, 30), (53, 7)], ids=str)
    @pytest.mark.parametrize("seed", range(5))
    def test_signed_rows_of_the_cosine_transform(self, shape, seed):
        num_rows, _ = shape
        omega = whole(SRFT(), shape, seed).numpy()
        transform = scipy.fft.dct(np.eye(num_rows), type=2, norm="ortho", axis=0)
        misfit = np.abs(np.abs(omega.T)[:, None] - np.abs(transform)[None]).max(2)
        frequencies = misfit.argmin(1)
        assert misfit.min(1).max() < 1e-12
        assert len(set(frequencies.tolist())) == shape[1]
        # one sign a position, shared by all columns
        product = omega * transform[frequencies].T
        signs = np.sign(product[np.arange(num_rows), np.abs(product).argmax(1)])
        assert np.abs(omega - signs[:, None] * transform[frequencies].T).max() < 1e-12
        assert set(signs) == {-1.0, 1.0}

    @pytest.mark.parametrize("shape", [(60, 60), (60, 25), (20_000, 64)], ids=str)
    def test_orthonormal_columns(self, shape):
        omega = whole(SRFT(), shape, 3)
        identity = torch.eye(shape[1], dtype=torch.float64)
        assert (omega.mT @ omega - identity).abs().max() < 1e-12


class TestGaussian:
    def test_normal(self):
        entries = whole(Gaussian(), (1000, 40), 5).flatten().numpy() * 1000**0.5
        count = len(entries)
        assert abs(entries.mean()) < 5 / count**0.5
        assert abs(entries.var() - 1) < 5 * (2 / count) ** 0.5
        assert abs(scipy.stats.skew(entries)) < 5 * (6 / count) ** 0.5
        assert abs(scipy.stats.kurtosis(entries)) < 5 * (24 / count) ** 0.5
        assert scipy.stats.kstest(entries, "norm").pvalue > 1e-3

    def test_neighbours_are_uncorrelated(self):
        omega = whole(Gaussian(), (1000, 40), 5) * 1000**0.5
        for one, other in ((omega[1:], omega[:-1]), (omega[:, 1:], omega[:, :-1])):
            assert abs(float((one * other).mean())) < 5 / one.numel() ** 0.5
            assert abs(float((one**2 * other**2).mean()) - 1) < 5 * (8 / one.numel()) ** 0.5


class TestHash:
    """32 bits from a seed, a stream and a counter."""

    counters = torch.arange(1 << 16)

    @staticmethod
    def bits(values: Tensor) -> Tensor:
        return (values[:, None] >> torch.arange(32)) & 1

    def test_stays_what_it_is(self):
        # saved sketches hold a seed, not a matrix: these numbers may never change
        assert hashed(0, 0, torch.arange(3)).tolist() == [362357424, 2874702446, 1658414191]
        assert hashed(12345, 6, torch.tensor([2**32 + 7, 2**40])).tolist() == [
            3734782654,
            717054995,
        ]

    @pytest.mark.parametrize("first", [0, 2**32 - 1000, 2**40], ids=str)
    def test_bits_are_balanced_and_unpaired(self, first):
        bits = self.bits(hashed(1, 2, first + self.counters)).double() * 2 - 1
        bound = 5 / len(bits) ** 0.5
        assert bits.mean(0).abs().max() < bound
        correlations = bits.mT @ bits / len(bits) - torch.eye(32, dtype=torch.float64)
        assert correlations.abs().max() < bound
        assert (bits[1:] * bits[:-1]).mean(0).abs().max() < bound

    def test_one_bit_in_flips_half_the_bits_out(self):
        for bit in range(32):
            flipped = hashed(1, 2, self.counters) ^ hashed(1, 2, self.counters ^ (1 << bit))
            shares = self.bits(flipped).double().mean(0)
            assert (shares - 0.5).abs().max() < 0.02

    def test_no_collisions_and_no_short_cycles(self):
        values = hashed(3, 1, torch.arange(1 << 20))
        assert values.min() >= 0
        assert values.max() < 2**32
        assert len(values.unique()) == 1 << 20
        state = first = torch.arange(64)
        for _ in range(1000):
            state = hashed(3, 1, state)
            assert (state != first).all()

    def test_uniform_modulo_a_size(self):
        counts = torch.bincount(hashed(3, 1, self.counters) % 37, minlength=37)
        assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-3

    def test_streams_and_seeds_are_unrelated(self):
        base = self.bits(hashed(0, 0, self.counters))
        for seed, stream in ((0, 1), (1, 0), (2**40, 0), (0, 101)):
            other = self.bits(hashed(seed, stream, self.counters))
            assert ((base == other).double().mean(0) - 0.5).abs().max() < 0.02
