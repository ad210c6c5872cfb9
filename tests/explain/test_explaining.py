"""Explanations as users ask for them: of a monitor, on a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scodkit import Categorical, Gaussian, LastLayers, Monitor, Task
from scodkit.errors import BatchError, NotFittedError
from scodkit.explain import differentiable_score
from scodkit.model.inputs import Inputs


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def fitted(**options) -> Monitor:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    ).append(nn.Linear(54, 4))
    return Monitor(model.eval(), Categorical(), rank=15, **options).fit(
        [images(100, seed=1)], progress=False
    )


TASK = Task(lambda output: output[:, :1] - output[:, 1:2], Gaussian(0.5))


@pytest.mark.parametrize(
    "options",
    [{}, {"task": TASK}, {"parameters": LastLayers(count=1)}, {"prior_scale": 0.03}],
    ids=["plain", "task", "last layer", "prior"],
)
def test_shares_sum_to_the_score(options) -> None:
    monitor, test = fitted(**options), images(9)
    explanation = monitor.explain(test)
    torch.testing.assert_close(explanation.score, monitor.score(test), rtol=1e-6, atol=0)
    score = explanation.score.double()
    for shares in (explanation.parameters, explanation.layers, explanation.directions):
        torch.testing.assert_close(shares.values.sum(1), score, rtol=1e-6, atol=0)
    assert explanation.directions.values.shape[1] == (1 if "task" in options else 4)
    assert explanation.saliency is None
    assert explanation.nearest is None
    assert explanation.plot(3).axes


def test_everything_at_once() -> None:
    monitor, test = fitted(), images(3)
    references = monitor.references(images(100, seed=1).split(40), progress=False)
    explanation = monitor.explain(test, saliency=True, references=references)
    assert explanation.saliency.gradient.shape == test.shape
    known = monitor.features(images(100, seed=1)).flatten(1)
    distances = torch.cdist(monitor.features(test).flatten(1).double(), known.double())
    assert torch.equal(explanation.nearest.index[:, 0], distances.argmin(1))
    assert explanation.plot(1).axes
    assert all(p.grad is None for p in monitor.model.parameters())


@pytest.mark.parametrize("task", [None, TASK], ids=["plain", "task"])
def test_slopes_are_those_of_the_score(task) -> None:
    monitor, test = fitted(task=task), images(4)
    monitor.model.double()
    monitor = Monitor(monitor.model, Categorical(), rank=15, task=task)
    monitor.fit([images(100, seed=1).double()], progress=False)
    test = test.double()
    slope = monitor.explain(test, saliency=True).saliency.gradient
    step = 1e-6 * torch.randn(test.shape, generator=torch.Generator().manual_seed(5)).double()
    change = (monitor.score(test + step) - monitor.score(test - step)) / 2
    torch.testing.assert_close(change, (slope * step).flatten(1).sum(1), rtol=1e-5, atol=0)


def test_a_differentiable_score_for_those_who_plan_with_it() -> None:
    monitor, test = fitted(), images(4).requires_grad_()
    fit = monitor._ready().fitted
    score = differentiable_score(
        monitor._network, fit.parameters, Categorical(), monitor.basis, 1.0, Inputs((test,), {})
    )
    torch.testing.assert_close(score.float(), monitor.score(test), rtol=1e-4, atol=0)
    assert torch.autograd.grad(score.sum(), test)[0].abs().sum() > 0


def test_what_cannot_be_explained_is_refused() -> None:
    monitor = fitted()
    with pytest.raises(BatchError, match="samples for an explanation"):
        monitor.explain(images(0))
    with pytest.raises(NotFittedError):
        Monitor(monitor.model, Categorical()).explain(images(1))
