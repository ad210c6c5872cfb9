"""Leading eigenpairs of ``diag(q) - q q^T`` against the whole matrix in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from scodkit.numerics import secular
from scodkit.numerics.secular import leading_rows

DOUBLE = torch.float64


def check(q: Tensor, count: int) -> None:
    """Values, residuals and right angles, to 1e-9 of the largest probability there is."""
    fisher = torch.diag_embed(q) - q[..., :, None] * q[..., None, :]
    values = torch.linalg.eigvalsh(fisher)[..., -count:]
    rows = leading_rows(q, count)
    near = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(rows @ rows.mT, torch.diag_embed(values), **near)
    torch.testing.assert_close(fisher @ rows.mT, rows.mT * values[..., None, :], **near)
    # those next to nothing, too, are orthogonal
    unit = rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    eye = torch.eye(count, dtype=DOUBLE).expand(*q.shape[:-1], -1, -1)
    torch.testing.assert_close(unit @ unit.mT, eye, **near)


def logits_of(kind: str, classes: int) -> Tensor:
    draw = torch.Generator().manual_seed(classes)
    logits = torch.randn(4, classes, dtype=DOUBLE, generator=draw)
    if kind == "uniform":
        return torch.zeros_like(logits)
    if kind == "tied":
        return logits.round()
    if kind == "near-tied":
        powers = torch.tensor([1e-15, 1e-13, 1e-9, 1e-5], dtype=DOUBLE)[:, None]
        return logits.round() + powers * torch.randn(4, classes, dtype=DOUBLE, generator=draw)
    if kind == "saturated":
        logits[:, 0] += torch.tensor([10.0, 40.0, 300.0, 3000.0], dtype=DOUBLE)
    if kind == "saturated in two":
        logits[:, :2] = torch.tensor([10.0, 40.0, 300.0, 3000.0], dtype=DOUBLE)[:, None]
    if kind == "one-hot":
        logits[:] = -torch.inf
        logits[:, 1] = 0.0
    if kind == "heavy-tailed":
        return -2 * torch.arange(1, classes + 1, dtype=DOUBLE).log().expand(4, -1)
    return logits * 5 if kind == "peaked" else logits


KINDS = [
    *("random", "peaked", "uniform", "tied", "near-tied", "saturated", "saturated in two"),
    *("one-hot", "heavy-tailed"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("classes", "count"), [(3, 1), (4, 2), (17, 1), (30, 28), (200, 5), (2000, 3)]
)
def test_eigenpairs_are_those_of_the_whole_matrix(kind: str, classes: int, count: int) -> None:
    few = 1 if classes == 2000 else 4
    check(logits_of(kind, classes)[:few].softmax(-1), count)


@st.composite
def near_ties(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Classes at a few levels, set apart by next to nothing."""
    classes = draw(st.integers(3, 40))
    levels = draw(st.lists(st.floats(-700, 0), min_size=1, max_size=4))
    which = draw(st.lists(st.sampled_from(levels), min_size=classes, max_size=classes))
    apart = draw(st.sampled_from([0.0, 1e-16, 1e-14, 1e-10, 1e-4, 1.0]))
    moved = torch.tensor(draw(st.lists(st.floats(-1, 1), min_size=classes, max_size=classes)))
    logits = torch.tensor(which, dtype=DOUBLE) + apart * moved.double()
    return logits.softmax(-1), draw(st.integers(1, classes - 2))


@settings(deadline=None, max_examples=200)
@given(near_ties())
def test_eigenpairs_of_near_ties(drawn: tuple[Tensor, int]) -> None:
    check(*drawn)


@settings(deadline=None, max_examples=100)
@given(near_ties())
def test_rows_never_exceed_the_whole_matrix(drawn: tuple[Tensor, int]) -> None:
    q, rows = drawn[0], leading_rows(*drawn)
    left = q.diag() - q.outer(q) - rows.mT @ rows
    assert rows.isfinite().all()
    rounding = 2 * len(q) * torch.finfo(DOUBLE).eps  # of products of this size, of order one
    assert float(torch.linalg.eigvalsh(left).min()) >= -rounding


@pytest.mark.parametrize("classes", [3, 20, 500])
@pytest.mark.parametrize("margin", [0.5, 5.0, 40.0, 100.0, 200.0])
def test_values_of_confident_predictions_keep_their_digits(classes: int, margin: float) -> None:
    """One class ahead of equal ones: the largest value is ``p rest (1 + 1 / others)``."""
    logits = torch.zeros(classes, dtype=DOUBLE)
    logits[1] = margin
    q = logits.softmax(-1)
    others = classes - 1
    expected = q[1] * (others * q[0]) * (1 + 1 / others)
    size = leading_rows(q, 1).square().sum()
    torch.testing.assert_close(size, expected, rtol=1e-13, atol=0)


@settings(deadline=None, max_examples=100)
@given(near_ties())
def test_no_root_needs_all_steps(drawn: tuple[Tensor, int]) -> None:
    rows = leading_rows(*drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secular, "_STEPS", secular._STEPS - 2)
        # a relative error of a distance is one of the vector
        torch.testing.assert_close(leading_rows(*drawn), rows, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_can_be_differentiated(count: int) -> None:
    logits = torch.linspace(-1, 2, 12, dtype=DOUBLE).view(2, 6).sin().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: leading_rows(z.softmax(-1), count), logits)


def test_slopes_are_finite_where_probabilities_tie() -> None:
    logits = torch.zeros(1, 6, dtype=DOUBLE, requires_grad=True)
    (slope,) = torch.autograd.grad(leading_rows(logits.softmax(-1), 2).sum(), logits)
    assert slope.isfinite().all()


def test_a_batch_has_the_rows_of_its_samples() -> None:
    q = logits_of("random", 50).softmax(-1)
    each = torch.cat([leading_rows(one[None], 2) for one in q])
    torch.testing.assert_close(leading_rows(q, 2), each, rtol=0, atol=1e-14)


def test_rows_have_a_fixed_sign_and_rise() -> None:
    q = logits_of("random", 50).softmax(-1)
    rows = leading_rows(q, 3)
    sizes = rows.square().sum(-1)
    assert (sizes.diff(dim=-1) > 0).all()
    assert (rows.gather(-1, q.argmax(-1)[:, None, None].expand(-1, 3, 1)) > 0).all()


def test_it_reads_no_value_and_can_be_recorded() -> None:
    traced = make_fx(lambda q: leading_rows(q, 3))(logits_of("random", 50).softmax(-1))
    for kind in KINDS:
        q = logits_of(kind, 50).softmax(-1)
        torch.testing.assert_close(traced(q), leading_rows(q, 3), rtol=0, atol=0)
