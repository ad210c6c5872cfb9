"""Sequences of any length are scored, also where the fit has seen another first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scodkit import Categorical, Gaussian, Monitor
from scodkit.likelihoods import Likelihood


@pytest.mark.parametrize("likelihood", [Gaussian(), Categorical(class_dim=-1)], ids=str)
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (1, 6), (6, 1)], ids=str)
def test_scores_of_other_lengths_are_those_of_plain_autograd(
    likelihood: Likelihood, lengths: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(6, length, 4, dtype=torch.float64) for length in lengths]
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    monitor = Monitor(model, likelihood, rank=8).fit(batches, progress=False)
    for batch in [*batches, batches[0], batches[1][:1]]:
        found = monitor.selftest(batch)
        torch.testing.assert_close(found.score, found.alone, rtol=1e-9, atol=1e-12)
