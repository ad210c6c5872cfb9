"""The score against the dense posterior, and the bounds that are proven about it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contracts import (
    CERTIFIED,
    MODEST,
    TALL,
    WIDE,
    Blocks,
    dense,
    fit,
    power,
    rows_with,
    streams,
)
from oracles import dense_fisher, dense_score
from scodkit.errors import UncertifiedError
from scodkit.scoring.certificate import certificate
from scodkit.scoring.energies import Energies, energies
from scodkit.scoring.score import score
from scodkit.sketch import Exact, Nystrom, TwoSided
from scodkit.sketch.eigenbasis import Eigenbasis

PRIORS = st.sampled_from([0.01, 0.3, 1.0, 20.0])


def parts_of(rows: Tensor, basis: Eigenbasis) -> Energies:
    """The energies of inputs with rows ``(B, p, N)``."""
    return energies(Blocks(rows, []), basis)


def inputs(num_parameters: int, seed: int = 0, count: int = 6) -> Tensor:
    """Rows ``(B, 2, N)`` of inputs that have nothing to do with the data."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, num_parameters, generator=generator, dtype=torch.float64)


def budget(rows: Tensor, prior_scale: float) -> Tensor:
    """``eps^2 |L|_F^2``: the score before any data, and the size its parts have."""
    return prior_scale**2 * rows.double().square().sum((1, 2))


def regulariser(rows: Tensor, prior_scale: float) -> float:
    """``c``, what an eigenvalue of ``F`` is weighed against."""
    return 1 / (2 * len(rows) * prior_scale**2)


class TestScore:
    @pytest.mark.parametrize("prior_scale", [0.01, 0.3, 1.0, 20.0])
    @pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
    def test_equals_the_dense_posterior(self, shape, prior_scale):
        rows = rows_with(power(1.0), shape)
        new = torch.cat([inputs(shape[2]), rows[:5]])
        basis = fit(Exact(), rows)
        wanted = dense_score(dense_fisher(rows), len(rows), new, prior_scale)
        found = score(parts_of(new, basis), basis, prior_scale)
        assert found.shape == (len(new),)
        assert found.dtype == torch.float64
        assert torch.allclose(found, wanted, rtol=1e-10, atol=0)

    def test_before_any_data_is_the_prior(self):
        state = Exact().zero(8, 1, torch.float64, "cpu")
        basis, new = Exact().eigenbasis(state, 5), inputs(8)
        assert torch.allclose(score(parts_of(new, basis), basis, 0.5), budget(new, 0.5))

    def test_falls_as_the_rank_grows(self):
        basis = fit(Exact(), rows_with(power(1.0), TALL))
        new = inputs(TALL[2])
        scores = torch.stack(
            [
                score(parts_of(new, shorter), shorter, 1.0)
                for shorter in (basis.truncate(rank) for rank in range(0, 40, 5))
            ]
        )
        assert (scores.diff(dim=0) < 0).all()

    def test_the_state_of_the_stream_does_not_change_with_units(self):
        # L / a under a prior of a times the width: the same posterior
        rows, new = rows_with(power(1.0), TALL), inputs(TALL[2])
        basis, scaled = fit(Exact(), rows), fit(Exact(), rows / 8)
        wanted = score(parts_of(new, basis), basis, 0.5)
        found = score(parts_of(new / 8, scaled), scaled, 4.0)
        assert torch.allclose(found, wanted, rtol=1e-10)


class TestEnergies:
    def test_are_what_they_say(self):
        basis, new = fit(Nystrom(8), rows_with(power(1.0), TALL)), inputs(TALL[2])
        total, along = Blocks(new, []).project(basis.vectors)
        assert torch.allclose(total, new.square().sum((1, 2)), rtol=1e-12)
        assert torch.allclose(along, new @ basis.vectors, atol=1e-12)
        parts = parts_of(new, basis)
        assert torch.allclose(parts.along, (new @ basis.vectors).square().sum(1), rtol=1e-10)

    @given(cut=st.integers(1, 4), prior_scale=PRIORS)
    @MODEST
    def test_add_over_directions(self, cut, prior_scale):
        basis = fit(Exact(), rows_with(power(1.0), WIDE))
        new = inputs(WIDE[2]).repeat(1, 3, 1)[:, :5]
        added = parts_of(new[:, :cut], basis) + parts_of(new[:, cut:], basis)
        whole = parts_of(new, basis)
        assert torch.allclose(added.total, whole.total, rtol=1e-12)
        assert torch.allclose(added.along, whole.along, rtol=1e-10)
        apart = score(added, basis, prior_scale)
        assert torch.allclose(apart, score(whole, basis, prior_scale), rtol=1e-10)

    @given(cuts=st.lists(st.integers(0, TALL[2]), max_size=4))
    @MODEST
    def test_blocks_change_nothing(self, cuts):
        basis, new = fit(Exact(), rows_with(power(1.0), TALL)), inputs(TALL[2])
        cut, whole = energies(Blocks(new, sorted(cuts)), basis), parts_of(new, basis)
        assert torch.allclose(cut.total, whole.total, rtol=1e-12)
        assert torch.allclose(cut.along, whole.along, rtol=1e-9, atol=1e-12)


class TestFloat32:
    @pytest.mark.parametrize("prior_scale", [0.1, 1.0, 100.0])
    @pytest.mark.parametrize("exponent", [0.0, 1.0, 3.0])
    def test_close_to_float64_inside_the_span(self, exponent, prior_scale):
        rows = rows_with(power(exponent), (40, 1, 1000)).float()
        noise = inputs(1000, count=len(rows))[:, :1]
        size = rows.norm(dim=2, keepdim=True) / noise.norm(dim=2, keepdim=True)
        new = (rows + 1e-5 * size * noise).float()  # 1e-10 of the energy is outside
        single, double = fit(Exact(), rows), fit(Exact(), rows.double())
        found = score(parts_of(new, single), single, prior_scale)
        wanted = score(parts_of(new.double(), double), double, prior_scale)
        # the norm, the projection and the basis are each rounded once, to 2**-24 or so
        allowed = 8 * torch.finfo(torch.float32).eps * budget(new, prior_scale)
        assert ((found - wanted).abs() <= allowed).all()

    @pytest.mark.parametrize("case", CERTIFIED, ids=str)
    @given(rows=streams(), prior_scale=st.sampled_from([1e-3, 1.0, 1e4]))
    @MODEST
    def test_never_negative_and_never_nan(self, case, rows, prior_scale):
        rows = rows.float()
        basis = fit(case.make(8, 0), rows)
        found = score(parts_of(rows, basis), basis, prior_scale)
        assert (found >= 0).all()
        assert found.isfinite().all()

    # c from far above the rounding of F to well below it
    @pytest.mark.parametrize("c", [1e-3, 1e-6, 1e-8])
    @pytest.mark.parametrize("shape", [(40, 1, 60), (300, 1, 40)], ids=["wide", "tall"])
    @pytest.mark.parametrize("case", CERTIFIED, ids=str)
    def test_certificate_holds_for_a_rounded_basis(self, case, shape, c):
        rows = rows_with(torch.logspace(0, -12, 30), shape).float()
        prior_scale = (1 / (2 * c * len(rows))) ** 0.5
        basis = fit(case.make(24, 0), rows, batch=1)
        # the eigenvectors of F and of its error are the inputs that see rounding best; their
        # energies are taken in float64, to tell the basis from the arithmetic of scoring
        fisher = dense_fisher(rows.double())
        both = torch.stack([fisher, fisher - dense(basis)])
        new = torch.linalg.eigh(both).eigenvectors.mT.flatten(0, 1)[:, None]
        basis = replace(basis, values=basis.values.double(), vectors=basis.vectors.double())
        exact = dense_score(fisher, len(rows), new, prior_scale)
        found = certificate(parts_of(new, basis), basis, prior_scale)
        # U^T U = I to 2**-22 in float32; what is outside the span can be wrong by that
        tiny = 2.0**-22 * budget(new, prior_scale)
        assert (found.lower <= exact + tiny).all()
        assert (exact <= found.upper + tiny).all()


@pytest.mark.parametrize("case", CERTIFIED, ids=str)
class TestCertificate:
    @given(rows=streams(), rank=st.integers(0, 10), prior_scale=PRIORS, seed=st.integers(0, 9))
    @MODEST
    def test_holds_the_exact_score(self, case, rows, rank, prior_scale, seed):
        rows = rows / rows.norm()  # so that float64 resolves F against every prior here
        basis = fit(case.make(10, seed), rows).truncate(rank)
        new = torch.cat([inputs(rows.shape[2], seed)[:, :1], rows[:, :1]])
        exact = dense_score(dense_fisher(rows), len(rows), new, prior_scale)
        found = certificate(parts_of(new, basis), basis, prior_scale)
        tiny = 1e-10 * budget(new, prior_scale)
        rounding = 1 + basis.slack / regulariser(rows, prior_scale)  # F_hat <= F + slack
        assert (exact <= found.score * rounding + tiny).all()
        assert (found.lower <= exact + tiny).all()
        assert (exact <= found.upper + tiny).all()
        assert (exact >= found.score - found.paper_gap - tiny).all()
        assert (found.lower >= -tiny).all()

    @given(rows=streams(), rank=st.integers(0, 10), prior_scale=PRIORS)
    @MODEST
    def test_is_tighter_than_the_paper(self, case, rows, rank, prior_scale):
        rows = rows / rows.norm()
        basis = fit(case.make(10, 1), rows).truncate(rank)
        new = inputs(rows.shape[2])
        found = certificate(parts_of(new, basis), basis, prior_scale)
        # rounding is granted one slack for each pair kept, and one more in the certificate
        rounding = (basis.rank + 1) * basis.slack / regulariser(rows, prior_scale)
        tiny = (1e-10 + rounding) * budget(new, prior_scale)
        assert (found.score - found.lower <= found.paper_gap + tiny).all()

    def test_carries_the_score(self, case):
        basis, new = fit(case.make(10, 1), rows_with(power(1.0), TALL)), inputs(TALL[2])
        parts = parts_of(new, basis)
        found = certificate(parts, basis, 0.7)
        assert torch.equal(found.score, score(parts, basis, 0.7))
        assert (found.lower <= found.score).all()
        assert (found.score <= found.upper).all()
        assert (found.upper <= budget(new, 0.7) * (1 + 1e-12)).all()


class TestThePapersBound:
    @given(rows=streams(), prior_scale=PRIORS)
    @MODEST
    def test_is_never_looser_than_printed(self, rows, prior_scale):
        whole = fit(Exact(), rows)
        new = inputs(rows.shape[2])
        c = regulariser(rows, prior_scale)
        for rank in range(1, whole.rank):
            basis = whole.truncate(rank)
            found = certificate(parts_of(new, basis), basis, prior_scale)
            last = float(basis.values[-1])
            printed = budget(new, prior_scale) * (whole.rank - rank) * last / (last + c)
            assert (found.paper_gap <= printed * (1 + 1e-9)).all()

    @given(rows=streams(), rank=st.integers(0, 10), prior_scale=PRIORS)
    @MODEST
    def test_allows_for_every_spectrum_of_the_tail(self, rows, rank, prior_scale):
        whole, new = fit(Exact(), rows), inputs(rows.shape[2])
        basis = whole.truncate(rank)
        found = certificate(parts_of(new, basis), basis, prior_scale)
        tail = whole.values[rank:]
        true = float((tail / (tail + regulariser(rows, prior_scale))).sum())
        assert (found.paper_gap >= (true - 1e-9) * budget(new, prior_scale)).all()

    def test_is_attained_by_a_flat_tail(self):
        rows, new = rows_with(power(0.0), TALL), inputs(TALL[2])
        basis = fit(Exact(), rows).truncate(10)
        wanted = 30 / (1 + regulariser(rows, 0.2)) * budget(new, 0.2)
        found = certificate(parts_of(new, basis), basis, 0.2)
        assert torch.allclose(found.paper_gap, wanted, rtol=1e-9)

    def test_a_whole_basis_leaves_no_gap(self):
        basis, new = fit(Exact(), rows_with(power(1.0), TALL)), inputs(TALL[2])
        found = certificate(parts_of(new, basis), basis, 1.0)
        assert torch.allclose(found.lower, found.upper, rtol=1e-9)
        assert (found.paper_gap <= 1e-9 * budget(new, 1.0)).all()


def test_a_sketch_without_a_certificate_says_so():
    basis, new = fit(TwoSided(22), rows_with(power(1.0), TALL)), inputs(TALL[2])
    with pytest.raises(UncertifiedError, match=r"expected .* got .*sketch=Nystrom\(\)"):
        certificate(parts_of(new, basis), basis, 1.0)
    assert (score(parts_of(new, basis), basis, 1.0) >= 0).all()
