"""Scores of what matters downstream, against the dense posterior of an outcome."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from draws import noise
from engines import close, randomised
from oracles import dense_factors, dense_fisher, dense_jacobian
from scodkit import Bernoulli, Categorical, Gaussian, LastLayers, Monitor, MonteCarlo, Task
from scodkit.errors import BatchError, MismatchError, OptionError
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs

TRAIN, TEST = noise(40, 3, seed=1), noise(6, 3, seed=2)


def net() -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)))


def cost(output: Tensor) -> Tensor:
    return (output[:, 0] ** 2 + output[:, 1].exp()) * output[:, 2].sin()


OUTCOMES = {
    "one output": (lambda output: output[:, 1:2], Gaussian(0.25)),
    "a cost": (cost, Gaussian()),
    "two": (lambda output: torch.stack([output.sum(1), output.prod(1)], 1), Gaussian((1.0, 4))),
    "a map": (lambda output: output[:, :2].view(-1, 2, 1) * output[:, 2].view(-1, 1, 1), None),
    "a decision": (lambda output: output[:, :1] - output[:, 1:2], Bernoulli()),
    "classes": (lambda output: 3 * output, Categorical()),
}


@pytest.mark.parametrize("prior_scale", [1.0, 0.1])
@pytest.mark.parametrize("name", OUTCOMES)
def test_a_task_scores_change_of_its_outcome(name: str, prior_scale: float) -> None:
    outcome, metric = OUTCOMES[name]
    model = net()
    task = Task(outcome) if metric is None else Task(outcome, metric)
    monitor = Monitor(model, Gaussian(0.5), rank=60, prior_scale=prior_scale, task=task)
    found = monitor.fit([TRAIN], progress=False).score(TEST)

    fisher = dense_fisher(dense_factors(model, Inputs((TRAIN,), {}), Gaussian(0.5)))
    precision = 2 * len(TRAIN) * fisher + torch.eye(len(fisher)) / prior_scale**2
    posterior = torch.linalg.inv(precision)
    jacobian = dense_jacobian(model, Inputs((TEST,), {}))
    expected = []
    for x, weights in zip(TEST, jacobian, strict=True):
        theta = model(x[None]).detach()
        slope = torch.autograd.functional.jacobian(outcome, theta)
        slope = slope.reshape(-1, theta.numel()) @ weights
        rows = (metric or Gaussian()).factor(outcome(theta).reshape(1, -1))[0] @ slope
        expected.append(torch.trace(rows @ posterior @ rows.T))
    close(found, torch.stack(expected), atol=1e-12)


def test_the_whole_output_in_the_likelihoods_metric_is_no_task() -> None:
    model = net()
    plain = Monitor(model, Gaussian(0.5), rank=20).fit([TRAIN], progress=False)
    whole = Monitor(
        model, Gaussian(0.5), rank=20, task=Task(lambda output: output, Gaussian(0.5))
    )
    whole.fit([TRAIN], progress=False)
    close(whole.score(TEST), plain.score(TEST))
    assert torch.equal(whole.basis.vectors, plain.basis.vectors)


def test_a_task_can_be_set_and_dropped_without_a_fit() -> None:
    monitor = Monitor(net(), Gaussian(), rank=20).fit([TRAIN], progress=False)
    before = monitor.score(TEST)
    monitor.calibrate([TEST], progress=False)
    monitor.task = Task(lambda output: output[:, :1])
    assert monitor.calibration is None
    steering = monitor.score(TEST)
    assert (steering < before).all()
    assert monitor.features(TEST).shape == (6, 1, 20)
    certificate = monitor.certify(TEST)
    assert (certificate.lower <= certificate.upper).all()
    monitor.task = None
    assert torch.equal(monitor.score(TEST), before)
    parts = []
    for i in range(3):
        monitor.task = Task(lambda output, i=i: output[:, i : i + 1])
        parts.append(monitor.score(TEST))
    close(sum(parts), before)


def test_saved_and_loaded_with_its_task(path) -> None:
    model, task = net(), Task(cost, Gaussian(2.0))
    monitor = Monitor(model, Gaussian(), rank=10, task=task).fit([TRAIN], progress=False)
    monitor.save(path)
    with pytest.raises(MismatchError, match="task="):
        Monitor.load(path, model)
    again = Monitor.load(path, model, task=task)
    assert torch.equal(again.score(TEST), monitor.score(TEST))


def test_in_small_pieces_and_compiled() -> None:
    task = Task(lambda output: output[:, :2].tanh())
    monitor = Monitor(net(), Gaussian(), rank=10, task=task).fit([TRAIN], progress=False)
    expected = monitor.score(TEST)
    monitor.memory_budget = 1
    close(monitor.score(TEST), expected)
    with torch.inference_mode():
        close(monitor.score(TEST), expected)
    assert monitor.score(TEST[:0]).shape == (0,)


def test_of_the_last_layers_only() -> None:
    task = Task(lambda output: output[:, :1])
    monitor = Monitor(net(), Gaussian(), rank=4, task=task, parameters=LastLayers(count=1))
    assert (monitor.fit([TRAIN], progress=False).score(TEST) > 0).all()


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (lambda output: output.sum(), r"\(6, \.\.\.\), one row per sample, got \(\)"),
        (lambda output: output[:2], r"got \(2, 3\)"),
        (lambda output: [output], "got list"),
    ],
    ids=["a scalar", "fewer", "a list"],
)
def test_outcomes_of_the_wrong_form_are_refused(outcome, said: str) -> None:
    monitor = Monitor(net(), Gaussian(), rank=4).fit([TRAIN], progress=False)
    before = monitor.score(TEST)
    with pytest.raises(BatchError, match=said):
        Task(outcome).factor(torch.zeros(6, 3))
    assert torch.equal(monitor.score(TEST), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Task("steering"),
        lambda: Task(cost, metric=1.0),
        lambda: Task(cost, MonteCarlo(torch.distributions.Poisson)),
        lambda: Monitor(net(), Gaussian(), task=cost),
    ],
    ids=["a name", "a number", "draws", "a function"],
)
def test_what_is_no_task_is_refused(make) -> None:
    with pytest.raises(OptionError, match="expected a"):
        make()


def test_what_is_no_task_leaves_a_monitor_as_it_was() -> None:
    monitor = Monitor(net(), Gaussian(), rank=4).fit([TRAIN], progress=False)
    with pytest.raises(OptionError):
        monitor.task = cost
    assert monitor.task is None
    monitor.score(TEST)


def test_it_is_a_likelihood_that_can_be_differentiated() -> None:
    task = Task(cost)
    assert isinstance(task, Likelihood)
    assert torch.autograd.gradcheck(task.factor, noise(2, 3).requires_grad_())
