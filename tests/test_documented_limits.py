"""Limits of the method that README and the pages tell, with the figures they tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scodkit import Gaussian, Monitor
from scodkit.cli import demo
from scodkit.metrics import separation
from scodkit.sketch import Exact

ROOT = Path(__file__).parents[1]
README, OVERVIEW = (
    " ".join((ROOT / page).read_text(encoding="utf-8").split())
    for page in ("README.md", "docs/guides/overview.md")
)
FAILURES = (ROOT / "docs" / "guides" / "failures.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def told(inputs: str) -> list[float]:
    """Return the figures of a line of the table on a classifier's blind spot."""
    (line,) = re.findall(rf"^\| {inputs} \|(.*)\|$", FAILURES, re.MULTILINE)
    return [float(cell.strip().rstrip(" %")) for cell in line.split("|")]


def trained_on(net: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int) -> nn.Module:
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(epochs):
        for a, b in DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(net(a), b))
            optimizer.step()
    return net.eval()


# the warnings about such inputs have tests of their own
@pytest.mark.filterwarnings("ignore")
def test_a_saturated_classifier_takes_wrong_scaling_for_known() -> None:
    digits = demo.load_digits()
    net = demo.train(digits.train_x, digits.train_y)
    methods = {name: demo.methods_for(net)[name] for name in ("SCOD", "Mahalanobis")}
    for method in methods.values():
        method.fit(DataLoader(TensorDataset(digits.train_x, digits.train_y), 100))
    monitor = methods["SCOD"]
    assert isinstance(monitor, Monitor)
    monitor.calibrate([digits.heldout_x])
    known, novel = digits.test_x, digits.novel_x
    sets = {f"known digits x {n}": n * known for n in (2, 16, 255)}
    sets |= {"known digits": known, "unseen digits": novel, "unseen digits x 16": 16 * novel}
    for name, x in sets.items():
        flagged, p_value, *_ = told(name)
        found = monitor(x).p_value
        assert found is not None
        assert 100 * float((found <= 0.05).double().mean()) == pytest.approx(flagged, abs=3)
        assert float(found.median()) == pytest.approx(p_value, abs=0.05)
    flagged = told("known digits x 255")[0]
    assert f"it flags {flagged} % of them at 5 % false alarms" in README
    assert float(monitor.certify(255 * known).upper.median()) == 0
    far, near = (methods["Mahalanobis"].score(x) for x in (2 * known, digits.heldout_x))
    assert float(far.min()) > float(near.max())


@pytest.mark.filterwarnings("ignore")
def test_a_regression_network_has_no_such_blind_spot() -> None:
    digits = demo.load_digits()
    torch.manual_seed(0)
    net = demo.train(digits.train_x[:1], digits.train_y[:1])  # for its layers
    assert isinstance(net, nn.Sequential)
    net = nn.Sequential(*net[:-1], nn.Linear(128, 1))
    numbers = digits.train_y.float()[:, None]
    trained_on(net, digits.train_x, numbers, epochs=15, batch=32)
    monitor = Monitor(net, Gaussian(variance=0.1), rank=50).fit([digits.train_x])
    monitor.calibrate([digits.heldout_x])
    for factor in (2, 16, 255):
        assert told(f"known digits x {factor}")[-1] == 100
        assert monitor.flag(factor * digits.test_x).double().mean() > 0.99


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scores_fall_with_the_rank_and_tell_inputs_apart_all_the_same() -> None:
    torch.manual_seed(0)
    gain, x = torch.randn(6, 2), torch.randn(1500, 6)
    y = torch.tanh(x @ gain) + 0.3 * torch.sin(2 * x[:, :2]) + 0.1 * torch.randn(1500, 2)
    heldout, far = torch.randn(200, 6), 3 * torch.randn(400, 6)
    layers = (nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    net = trained_on(nn.Sequential(*layers), x, y, epochs=60, batch=64)
    said = re.search(
        r"has (\S+) nats at rank 50, (\S+) at rank 200, (\S+) at rank 500 and (\S+) exactly",
        OVERVIEW,
    )
    assert said is not None
    noise = Gaussian(variance=0.01)
    monitors = [Monitor(net, noise, rank) for rank in (50, 200, 500)]
    monitors.append(Monitor(net, noise, rank=10**6, sketch=Exact()))
    before = torch.full((200,), torch.inf)
    for nats, monitor in zip(said.groups(), monitors, strict=True):
        scores = monitor.fit(DataLoader(TensorDataset(x), 100)).score(heldout)
        assert (scores <= before * 1.01).all()  # of each input: the sketch grows
        # networks differ by processor: the size of the number is what is told
        assert float(nats) / 2 < float(scores.median()) < 2 * float(nats)
        found = separation(scores, monitor.score(far), resamples=10)
        assert found.auroc == pytest.approx(0.994, abs=0.005)
        before = scores
