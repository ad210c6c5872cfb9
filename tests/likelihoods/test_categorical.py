"""Rows of classes: as few as there can be for scores, one each for explanations."""

from __future__ import annotations

import pytest
import torch

from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.likelihoods.categorical import _eigenrows
from scodkit.numerics.secular import leading_rows


@pytest.mark.parametrize("shape", [(1,), (2,), (5,)], ids=str)
def test_classes_need_one_row_less_and_have_one_each_by_name(shape: tuple[int, ...]) -> None:
    output = 3 * torch.randn(4, *shape, dtype=torch.float64)
    likelihood, named = Categorical(), Categorical().named()
    rows, by_class = likelihood.factor(output), named.factor(output)
    assert rows.shape[1] == likelihood.num_directions(shape) == max(1, shape[0] - 1)
    assert by_class.shape[1] == named.num_directions(shape) == shape[0]
    torch.testing.assert_close(rows.mT @ rows, by_class.mT @ by_class, rtol=0, atol=1e-14)
    q = output.softmax(1)  # the row of a class is its logit against the average one
    expected = q.sqrt()[..., None] * (torch.eye(shape[0], dtype=q.dtype) - q[:, None])
    torch.testing.assert_close(by_class, expected, rtol=0, atol=1e-14)


def test_what_has_no_names_stays_as_it_is() -> None:
    for likelihood in (Gaussian(), Bernoulli(), Categorical(directions=2)):
        assert likelihood.named() == likelihood


@pytest.mark.parametrize("directions", [1, 4])
def test_few_classes_have_the_same_directions_by_either_way(directions: int) -> None:
    q = (3 * torch.randn(20, 9, dtype=torch.float64)).softmax(-1)
    one, other = (way(q, directions) for way in (_eigenrows, leading_rows))
    torch.testing.assert_close(one.mT @ one, other.mT @ other, rtol=0, atol=1e-13)
    signs = torch.linalg.vecdot(one, other).sign()[..., None]  # in the same order, too
    torch.testing.assert_close(signs * one, other, rtol=0, atol=1e-6)


def test_classes_that_are_ruled_out_have_no_part() -> None:
    logits = torch.tensor([[-torch.inf, 0.3, -torch.inf, -1.2, -torch.inf]], requires_grad=True)
    rows = Categorical().factor(logits.double())[0]
    few = Categorical().factor(torch.tensor([[0.3, -1.2]]).double())[0]
    expected = torch.zeros(5, 5, dtype=torch.float64)
    expected[1::2, 1::2] = few.mT @ few
    torch.testing.assert_close(rows.mT @ rows, expected, rtol=0, atol=1e-7)
    rows.square().sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
