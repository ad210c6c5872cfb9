"""Rows are checked on the batches that are scored, not on three samples once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draws import noise
from engines import Uses, everything, randomised
from scodkit import Gaussian, Monitor
from scodkit.errors import BatchError, EngineFallbackWarning, OptionError
from scodkit.factors.alone import FunctionalEngine, LoopEngine
from scodkit.factors.engine import Factors, HeldFactors, Linearization
from scodkit.factors.hooks import Checksum, HookEngine
from scodkit.factors.pieces import distinct
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network

slower = pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
far = pytest.mark.filterwarnings("ignore::scodkit.errors.SuspiciousInputWarning")


def mlp() -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))


def fitted(model: nn.Module, *batches: Tensor, **options: object) -> Monitor:
    data = batches or tuple(noise(4, 4, seed=seed) for seed in range(3))
    return Monitor(model, Gaussian(), rank=8).fit(data, progress=False, **options)


def alone(monitor: Monitor, x: Tensor) -> Tensor:
    return torch.cat([monitor.score(x[i : i + 1]) for i in range(len(x))])


def engine_of(monitor: Monitor) -> HookEngine:
    monitor.score(noise(1, 4))
    source = monitor._ready().source
    assert source is not None
    assert isinstance(source.engine, HookEngine)
    return source.engine


class Sorting(nn.Module):
    """Sorts its samples by their first number, and back again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(stable=True).tolist()
        back = torch.tensor(order).argsort().tolist()
        return self.b(torch.tanh(self.a(x[order])))[back]


def keyed(*keys: float) -> Tensor:
    x = noise(len(keys), 4, seed=len(keys))
    x[:, 0] = torch.tensor(keys)
    return x


@slower
@far
@pytest.mark.parametrize("products", [None, True])
def test_an_outlier_is_not_blamed_on_another_sample(products: bool | None) -> None:
    batches = [keyed(1, 1, 1, 2, 3, 2)] * 2
    monitor = fitted(randomised(Sorting()), *batches, products=products)
    x = keyed(3, 1, 2, 1)
    x[0, 1:] *= 50
    found = monitor.score(x)
    assert int(found.argmax()) == 0
    torch.testing.assert_close(found, alone(monitor, x), rtol=1e-9, atol=1e-12)


class Switch(nn.Module):
    """Sends each sample to one of two experts by one-hot dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(4, 2), nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = nn.functional.one_hot(self.gate(x).argmax(1), 2)
        place = (chosen.cumsum(0) - 1) * chosen
        sent = chosen[..., None] * nn.functional.one_hot(place, len(x))
        packed = torch.einsum("bec,bd->ecd", sent.to(x), x)
        done = torch.stack([e(p) for e, p in zip(self.experts, packed, strict=True)])
        return self.out(torch.tanh(torch.einsum("bec,ecd->bd", sent.to(x), done)))


@slower
@pytest.mark.parametrize("size", [1, 4])
def test_a_first_score_alone_decides_nothing(size: int, path: Path) -> None:
    model = randomised(Switch())
    fitted(model, *noise(24, 4).split(size)).save(path)
    monitor = Monitor.load(path, model)
    monitor.score(noise(1, 4, seed=5))
    x = noise(8, 4, seed=6)
    torch.testing.assert_close(monitor.score(x), alone(monitor, x), rtol=1e-9, atol=1e-12)


def test_the_engine_is_saved_and_not_chosen_again(tmp_path: Path) -> None:
    model = mlp()
    fitted(model).save(tmp_path / "m.scod")
    loaded = Monitor.load(tmp_path / "m.scod", model)
    assert loaded.fitted.engine == "HookEngine on cpu"
    assert isinstance(engine_of(loaded), HookEngine)
    unruly = randomised(nn.Sequential(nn.Linear(4, 2), nn.PReLU()))
    with pytest.warns(EngineFallbackWarning):
        slow = fitted(unruly)
    slow.save(tmp_path / "s.scod")
    again = Monitor.load(tmp_path / "s.scod", unruly)  # without a warning: it is known
    torch.testing.assert_close(again.score(noise(3, 4)), slow.score(noise(3, 4)))


CALLS: list[int] = []


class InTurns(nn.Module):
    """Leaves its samples where they are, until it has been called for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        axis = 1 if len(CALLS) < 1000 else 0
        turned = torch.roll(torch.tanh(self.first(x)), 1, axis)
        return self.last(torch.roll(turned, -1, axis))


@slower
def test_what_is_known_of_a_call_is_not_taken_for_another() -> None:
    CALLS.clear()
    model, x = randomised(InTurns()), noise(4, 4)
    monitor = fitted(model, noise(12, 4))
    before, engine = monitor.score(x), engine_of(monitor)
    assert isinstance(engine, HookEngine)
    assert not engine._others
    CALLS.extend([0] * 1000)
    torch.testing.assert_close(monitor.score(x), before, rtol=1e-9, atol=1e-12)
    assert len(engine._others) == 1


class Keeping(nn.Module):
    """Keeps what a scripted function has made of its samples, which nobody can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.kept = nn.Linear(4, 6), nn.Linear(6, 2), torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = turned(x)
        return turned(self.b(torch.tanh(self.a(self.kept))))


def turn(x: Tensor) -> Tensor:
    return x.flip(0)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script`")
    turned = torch.jit.script(turn)


@slower
def test_what_a_model_keeps_of_its_samples_is_no_constant() -> None:
    monitor, x = fitted(randomised(Keeping())), noise(5, 4, seed=8)
    torch.testing.assert_close(monitor.score(x), alone(monitor, x), rtol=1e-9, atol=1e-12)


def centred(_: nn.Module, x: Tensor) -> Tensor:
    return x - x.mean(0)


BLIND = {
    "one by one": [noise(1, 4, seed=seed) for seed in range(6)],
    "alike first": [noise(1, 4).expand(3, 4), noise(3, 4, seed=2)],
    "blank first": [torch.zeros(3, 4, dtype=torch.float64), noise(3, 4, seed=2)],
    "unknown first": [torch.full((3, 4), torch.nan).double(), noise(3, 4, seed=2)],
}


@slower
@pytest.mark.parametrize("case", BLIND)
def test_samples_that_influence_each_other_are_refused_however_they_begin(case: str) -> None:
    model = randomised(Uses(lambda m, x: m.a(centred(m, x)), a=nn.Linear(4, 2)))
    with pytest.raises(BatchError, match="alone and in a batch"):
        fitted(model, *BLIND[case], on_bad="skip")


@pytest.mark.parametrize("least", [5, 8])
def test_a_coupling_of_larger_batches_is_noticed_on_the_first_of_them(least: int) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.a(x * 2 if len(x) >= least else x)

    monitor = fitted(randomised(Uses(forward, a=nn.Linear(4, 2))))
    monitor.score(noise(least - 1, 4))
    with pytest.raises(BatchError, match="alone and in a batch"):
        monitor.score(noise(least, 4))


class Lent(torch.autograd.Function):
    """Changes nothing but gradients, which in even batches are those of neighbours."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone() if len(tangent) % 2 else tangent.flip(0)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        return delta.clone() if len(delta) % 2 else delta.flip(0)


@slower
def test_a_coupling_of_gradients_alone_is_noticed_by_products() -> None:
    model = Uses(lambda m, x: m.b(Lent.apply(m.a(x))), a=nn.Linear(4, 3), b=nn.Linear(3, 2))
    with pytest.raises(BatchError, match="alone and in a batch"):
        fitted(randomised(model), products=True)


class Flipped(HookEngine):
    """Gives rows to the wrong samples."""

    def linearize(self, call: Inputs) -> Linearization:
        linear = super().linearize(call)
        pull_back = linear.pull_back

        def wrong(rows: Tensor) -> Factors:
            blocks = pull_back(rows.flip(0)).blocks()
            return HeldFactors(
                [(columns, own.flip(0)[..., :1] + own) for columns, own in blocks]
            )

        linear.pull_back = wrong  # type: ignore[method-assign]
        return linear


def test_a_checksum_notices_rows_of_others() -> None:
    network = Network(mlp())
    parameters, call = everything(network), Inputs((noise(5, 4),), {})
    with network.evaluating():
        distances = [
            Checksum(network, parameters).distance(
                call, kind(network, parameters).linearize(call)
            )
            for kind in (HookEngine, FunctionalEngine, LoopEngine, Flipped)
        ]
    assert max(d for d in distances[:3] if d is not None) < 1e-12
    assert distances[3] is not None
    assert distances[3] > 1e-2


def test_half_the_samples_are_asked_where_there_is_no_other_way() -> None:
    network = Network(mlp())
    parameters, call = everything(network), Inputs((noise(6, 4),), {})
    for kind, right in ((HookEngine, True), (Flipped, False)):
        checksum = Checksum(network, parameters)
        checksum._ways.clear()
        with network.evaluating():
            linear = kind(network, parameters).linearize(call)
            found = [checksum.distance(call, linear) for _ in range(4)]
        assert all(d == 0 for d in found) if right else any(d and d > 1e-2 for d in found)


def test_rows_of_zeros_prove_nothing() -> None:
    model = randomised(
        nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, False))
    )
    engine = engine_of(fitted(model))
    before = set(engine._checked)
    monitor_batches = [torch.zeros(7, 4, dtype=torch.float64), noise(7, 4)]
    network = engine.network
    with network.evaluating():
        engine.linearize(Inputs((monitor_batches[0],), {}))
        assert engine._checked == before
        engine.linearize(Inputs((monitor_batches[1],), {}))
    assert len(engine._checked) == len(before) + 1


def test_later_batches_are_checked_as_often_as_is_asked_for() -> None:
    monitor = fitted(mlp())
    engine = engine_of(monitor)
    for every, expected in ((0, 0), (1, 6), (3, 2)):
        monitor.check_every = every
        engine._batches, before = 0, engine._checksum._count
        for seed in range(6):
            monitor.score(noise(4, 4, seed=seed))
            monitor.score(noise(1, 4, seed=seed))  # needs none
        assert engine._checksum._count - before == expected
    for wrong in (-1, 0.5, True):
        with pytest.raises(OptionError, match="check_every"):
            monitor.check_every = wrong


def test_selftest_says_what_it_found() -> None:
    monitor = fitted(mlp())
    found = monitor.selftest(noise(5, 4, seed=9))
    assert found.ok
    assert found.engine == "HookEngine"
    assert str(found).startswith("right: 5 scores by HookEngine")
    scorer = monitor._ready()
    assert scorer.source is not None
    engine = Flipped(monitor._network, monitor.fitted.parameters)
    scorer.source = type(scorer.source)(
        engine, scorer.source.likelihood, scorer.source.shape, scorer.source.budget
    )
    scorer.check_every = 0
    wrong = monitor.selftest(noise(5, 4, seed=9))
    assert not wrong.ok
    assert str(wrong).startswith("WRONG")


def test_samples_to_try_are_finite_and_no_two_alike() -> None:
    x = noise(6, 2)
    x[1] = x[0]
    x[2, 0] = torch.nan
    assert distinct(Inputs((x,), {}), 3) == [0, 3, 4]
    assert distinct(Inputs((x[:2],), {}), 3) == [0]


def test_samples_of_the_user_are_not_kept() -> None:
    """Those an engine was chosen with serve its first check, and are forgotten."""
    for batches, options in (((noise(8, 4),), {}), ((noise(1, 4),) * 3, {}), ((), {})):
        monitor = fitted(mlp(), *batches, **options)
        assert engine_of(monitor).known_alone is None


def test_plain_autograd_decides_where_forward_mode_is_wrong() -> None:
    """In little memory: of each sample one row at a time."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = m.a(x)
        return m.b(torch.tanh(first))

    network = Network(randomised(Uses(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 2))))
    parameters, call = everything(network), Inputs((noise(6, 4),), {})
    for kind, right in ((HookEngine, True), (Flipped, False)):
        checksum = Checksum(network, parameters)
        with network.evaluating():
            linear = kind(network, parameters).linearize(call)
            found = [checksum.distance(call, linear) for _ in range(2)]
        assert len(checksum._ways) == 1
        assert max(found) < 1e-12 if right else min(found) > 1e-2
