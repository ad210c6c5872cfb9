"""Recorded scoring: the same numbers as eager scoring, or none at all."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from cases import conv_batchnorm, mlp
from scodkit import Categorical, Gaussian, Monitor, MonteCarlo
from scodkit.errors import (
    BatchError,
    CaptureError,
    CaptureWarning,
    EngineFallbackWarning,
    NotFittedError,
    StaleMonitorError,
)
from scodkit.scoring import compiled as capture

pytestmark = pytest.mark.slow

NEEDS_A_COMPILER = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")),
    reason="needs a C++ compiler for torch.compile",
)
BATCH = 4


def data(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def fitted(model: nn.Module | None = None, likelihood=None, **options: object) -> Monitor:
    torch.manual_seed(0)
    monitor = Monitor(model or mlp(3), likelihood or Categorical(), rank=4, **options)
    return monitor.fit([data(12, 3)], progress=False)


def recorded(monitor: Monitor, example: Tensor) -> bool:
    """Whether batches like this one would be scored from a recording."""
    held = monitor._ready()._captured
    return held is not None and held.fits([example])


@dataclass(frozen=True)
class Pair:
    """A recorded monitor and an eager one, of one model and one fit."""

    recorded: Monitor
    eager: Monitor
    shape: tuple[int, ...]
    dtype: torch.dtype

    def batch(self, seed: int, size: int = BATCH) -> Tensor:
        return data(size, *self.shape, seed=seed, dtype=self.dtype)

    def close(self, found: Tensor, expected: Tensor) -> None:
        tolerance = 1e-10 if self.dtype == torch.float64 else 1e-4
        scale = float(expected[expected.isfinite()].abs().max())
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.fixture(scope="module", params=["mlp, float32", "conv, float64"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    torch.manual_seed(0)
    if request.param.startswith("mlp"):
        model, likelihood, shape, dtype = mlp(3), Gaussian(0.5), (3,), torch.float32
    else:
        model, likelihood = conv_batchnorm(3), Categorical()
        shape, dtype = (2, 5, 5), torch.float64
    model = model.to(dtype).eval()
    made = [Monitor(model, likelihood, rank=6) for _ in range(2)]
    for monitor in made:
        monitor.fit([data(30, *shape, seed=1, dtype=dtype)], progress=False)
    with pytest.MonkeyPatch.context() as patch:
        seconds = count()
        patch.setattr(capture, "_seconds", lambda run: next(seconds))  # faster, always
        made[0].compile(data(BATCH, *shape, seed=2, dtype=dtype))
    yield Pair(*made, shape, dtype)
    torch._dynamo.reset()


# torch.compile imports parts of torch that warn of themselves
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@NEEDS_A_COMPILER
class TestCompiled:
    def test_other_inputs_get_the_models_output_and_the_eager_score(self, pair: Pair):
        for seed in (3, 4):
            batch = pair.batch(seed)
            assert recorded(pair.recorded, batch)
            found, expected = pair.recorded(batch), pair.eager(batch)
            pair.close(found.score, expected.score)
            pair.close(found.output, expected.output)
            pair.close(pair.recorded.score(batch), expected.score)
            assert found.score.dtype == expected.score.dtype
            assert not found.score.requires_grad
            assert not found.output.requires_grad

    def test_earlier_results_are_not_written_over(self, pair: Pair):
        found = pair.recorded(pair.batch(3))
        kept = found.output.clone(), found.score.clone()
        pair.recorded(pair.batch(4))
        assert torch.equal(found.output, kept[0])
        assert torch.equal(found.score, kept[1])

    def test_certificates(self, pair: Pair):
        found, expected = (m.certify(pair.batch(5)) for m in (pair.recorded, pair.eager))
        for name in ("score", "lower", "upper", "paper_gap"):
            pair.close(getattr(found, name), getattr(expected, name))

    def test_p_values_and_flags_after_calibration(self, pair: Pair):
        for monitor in (pair.recorded, pair.eager):
            monitor.calibrate([pair.batch(seed) for seed in range(10, 20)], progress=False)
        assert recorded(pair.recorded, pair.batch(6))
        found, expected = pair.recorded(pair.batch(6)), pair.eager(pair.batch(6))
        assert found.p_value is not None
        pair.close(found.p_value, expected.p_value)
        flags = [m.flag(pair.batch(6), 0.3) for m in (pair.recorded, pair.eager)]
        assert torch.equal(*flags)

    @pytest.mark.parametrize("size", [0, 1, 3, 7])
    def test_other_batch_sizes_are_scored_eagerly(self, pair: Pair, size: int):
        batch = pair.batch(7, size)
        assert not recorded(pair.recorded, batch)
        assert torch.equal(pair.recorded.score(batch), pair.eager.score(batch))

    def test_batches_with_other_strides(self, pair: Pair):
        x = pair.batch(17)
        turned = x.movedim(1, -1).contiguous().movedim(-1, 1)
        pair.close(pair.recorded.score(turned), pair.eager.score(x))

    def test_features_are_left_as_they_are(self, pair: Pair):
        batch = pair.batch(7)
        assert torch.equal(pair.recorded.features(batch), pair.eager.features(batch))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_bad_samples_score_infinity_and_leave_the_others_alone(self, pair: Pair, bad):
        batch = pair.batch(8)
        batch[1].view(-1)[0] = bad
        found = pair.recorded.score(batch)
        assert found.isinf().tolist() == [False, True, False, False]
        pair.close(found, pair.eager.score(batch))

    def test_weights_changed_in_place_are_refused(self, pair: Pair):
        batch = pair.batch(9)
        before = pair.recorded.score(batch)
        weights = list(pair.recorded.model.parameters())
        kept = [weight.detach().clone() for weight in weights]
        try:
            with torch.no_grad():
                for weight in weights:
                    weight.mul_(1.5)
            with pytest.raises(StaleMonitorError, match="the chosen weights differ"):
                pair.recorded(batch)
        finally:
            with torch.no_grad():
                for weight, old in zip(weights, kept, strict=True):
                    weight.copy_(old)
        assert recorded(pair.recorded, batch)
        assert torch.equal(pair.recorded.score(batch), before)

    @pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
    def test_in_every_grad_mode(self, pair: Pair, mode):
        batch = pair.batch(3)
        expected = pair.eager.score(batch)
        with mode():
            pair.close(pair.recorded.score(batch), expected)


class Replays:
    """Stands for a compiler: its recordings run the function and are counted."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self, function: capture.Function, example: Sequence[Tensor]
    ) -> capture.Function:
        def replay(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
            self.count += 1
            with torch.enable_grad():
                return function(tensors)

        return replay


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    seconds, made = count(), Replays()
    monkeypatch.setattr(capture, "_compiled", made)
    monkeypatch.setattr(capture, "_seconds", lambda run: next(seconds))
    return made


def test_only_batches_of_the_example_are_replayed(replays: Replays) -> None:
    monitor = fitted().compile(data(BATCH, 3))
    once = replays.count
    monitor(data(BATCH, 3, seed=5))
    monitor.certify(data(BATCH, 3, seed=5))
    assert replays.count == once + 2
    monitor.score(data(BATCH + 1, 3))
    monitor.features(data(BATCH, 3))
    assert replays.count == once + 2


def test_what_is_not_a_tensor_is_part_of_the_recording(replays: Replays) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(3)

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return scale * self.body(x)

    torch.manual_seed(0)
    monitor = Monitor(Scaled(), Categorical(), rank=4, inputs=lambda batch: batch)
    monitor.fit([(data(12, 3), 1.0)], progress=False)
    x = data(BATCH, 3, seed=5)
    expected = monitor.score((x, 2.0))
    monitor.compile((x, 1.0))
    before = replays.count
    torch.testing.assert_close(monitor.score((x, 2.0)), expected)
    assert replays.count == before


def change_prior(monitor: Monitor) -> None:
    monitor.prior_scale = 0.1


def update(monitor: Monitor) -> None:
    monitor.update([3 * data(9, 3, seed=4)], progress=False)


def fit_again(monitor: Monitor) -> None:
    monitor.fit([3 * data(9, 3, seed=4)], progress=False)


@pytest.mark.parametrize("change", [change_prior, update, fit_again])
def test_a_change_of_the_fit_drops_the_recording(replays: Replays, change) -> None:
    torch.manual_seed(0)
    model, x = mlp(3), data(BATCH, 3, seed=5)
    monitor, eager = fitted(model), fitted(model)
    monitor.compile(data(BATCH, 3))
    before = monitor.score(x)
    for each in (monitor, eager):
        change(each)
    assert not recorded(monitor, x)
    assert torch.equal(monitor.score(x), eager.score(x))
    assert not torch.allclose(monitor.score(x), before, rtol=1e-2)
    monitor.compile(data(BATCH, 3))
    assert recorded(monitor, x)
    assert torch.equal(monitor.score(x), eager.score(x))


def test_a_recording_that_does_not_pay_is_not_kept(replays: Replays, monkeypatch) -> None:
    monkeypatch.setattr(capture, "_seconds", lambda run: 1.0)
    monitor = fitted()
    with pytest.warns(CaptureWarning, match="not faster here"):
        monitor.compile(data(BATCH, 3))
    assert not recorded(monitor, data(BATCH, 3))


def test_a_recording_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: capture.Function, example: Sequence[Tensor]) -> capture.Function:
        output, *rest = (tensor.detach() for tensor in function(example))
        return lambda tensors: (output, 1.01 * rest[0], *rest[1:])

    monkeypatch.setattr(capture, "_compiled", wrong)
    monitor = fitted()
    expected = monitor.score(data(BATCH, 3))
    with pytest.raises(CaptureError, match=r"same numbers.*go on without monitor\.compile"):
        monitor.compile(data(BATCH, 3))
    assert torch.equal(monitor.score(data(BATCH, 3)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_comparison_allows_for_rounding_only(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    numbers = data(5, seed=1).to(dtype)
    small = 1e-6 * numbers
    capture._check_same((numbers * (1 + 10 * eps), small), (numbers, small))
    capture._check_same((numbers * 0,), (numbers * 0,))
    for wrong in (1.01 * small, small + numbers, small * float("nan"), -small):
        with pytest.raises(CaptureError, match="same numbers"):
            capture._check_same((numbers, wrong), (numbers, small))


# by equal ones: others are refused, recorded or not
REPLACEMENTS = {
    "state": lambda net: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True),
    "weight": lambda net: setattr(net[0], "weight", nn.Parameter(1.0 * net[0].weight)),
    "data": lambda net: setattr(net[0].weight, "data", 1.0 * net[0].weight.data),
    "layer": lambda net: net.__setitem__(0, copy.deepcopy(net[0])),
}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_replaced_weights_drop_the_recording(replays: Replays, replacement: str) -> None:
    monitor = fitted().compile(data(BATCH, 3))
    once = replays.count
    before = list(monitor.model.parameters())  # or new weights might lie where these lay
    REPLACEMENTS[replacement](monitor.model)
    with pytest.warns(CaptureWarning, match=r"the recording is dropped; type monitor\.compile"):
        monitor.score(data(BATCH, 3))
    assert not recorded(monitor, data(BATCH, 3))
    assert replays.count == once
    assert before


class Powered(nn.Module):
    """Holds numbers that its result depends on, and one that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.power, self.sizes = 2.0, (1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.sizes) * self.layer(x).abs() ** self.power


@pytest.mark.parametrize(("name", "value"), [("power", 3.0), ("sizes", (1, 3))])
def test_changed_attributes_drop_the_recording(replays: Replays, name, value) -> None:
    model, x = Powered(), data(BATCH, 3)
    monitor, once = fitted(model).compile(x), replays.count
    model(x)
    monitor.score(x)
    assert replays.count == once + 1
    setattr(model, name, value)
    with pytest.warns(CaptureWarning, match="attributes or hooks"):
        found = monitor.score(x)
    assert replays.count == once + 1
    assert torch.equal(found, monitor.score(x))
    assert not recorded(monitor, x)


class Counting(nn.Module):
    """Changes a buffer whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def test_models_that_change_their_buffers_are_not_recorded(replays: Replays) -> None:
    monitor = fitted(Counting())
    with pytest.raises(CaptureError, match="leaves its buffers alone"):
        monitor.compile(data(BATCH, 3))
    monitor.score(data(BATCH, 3))
    assert monitor.model.calls == 0


def test_an_example_may_have_bad_samples(replays: Replays) -> None:
    x = data(BATCH, 3)
    x[1, 0] = float("nan")
    assert fitted().compile(x).score(x).isinf().tolist() == [False, True, False, False]


def test_random_draws_cannot_be_recorded() -> None:
    likelihood = MonteCarlo(lambda out: torch.distributions.Categorical(logits=out))
    with pytest.raises(CaptureError, match="without random draws"):
        fitted(likelihood=likelihood).compile(data(BATCH, 3))


def test_a_fit_comes_first() -> None:
    with pytest.raises(NotFittedError, match=r"monitor\.fit"):
        Monitor(mlp(3), Categorical()).compile(data(BATCH, 3))


def test_an_empty_example_is_refused() -> None:
    with pytest.raises(BatchError, match="an example with samples"):
        fitted().compile(data(0, 3))


class Careful(nn.Module):
    """Looks at the values of its input before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.abs().max().item() < 1e6 else self.body(0 * x)


def test_a_model_that_asks_for_values_goes_on_eagerly() -> None:
    with pytest.warns(EngineFallbackWarning, match="item may have mixed up the samples"):
        monitor = fitted(Careful())
    x = data(BATCH, 3, seed=5)
    expected = monitor.score(x)
    with pytest.raises(CaptureError, match=r"can be followed.*go on without monitor\.compile"):
        monitor.compile(x)
    assert torch.equal(monitor.score(x), expected)
    assert not recorded(monitor, x)
