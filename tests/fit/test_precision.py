"""Fits in half precision: close to full ones, and only the fit is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from oracles import dense_factors
from scodkit import Categorical, Gaussian, Monitor, Projected
from scodkit.errors import MismatchError, NonFiniteError, OptionError
from scodkit.model.inputs import Inputs
from scodkit.sketch import Exact, FrequentDirections, Nystrom, TwoSided

BF16 = torch.bfloat16
RANK = 8


def images(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, 2, 8, 8, generator=torch.Generator().manual_seed(seed))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 3),
    ).eval()


def monitor(**options: object) -> Monitor:
    return Monitor(network(), Categorical(), rank=RANK, **options)


@pytest.mark.parametrize(
    "sketch",
    [Nystrom(), TwoSided(size=24), FrequentDirections(size=16), Exact()],
    ids=lambda s: type(s).__name__,
)
def test_a_half_precision_fit_is_close_to_the_full_one(sketch) -> None:
    batches, test = list(images(160).split(40)), images(20, seed=1)
    full = monitor(sketch=sketch).fit(batches, progress=False)
    half = monitor(sketch=sketch).fit(batches, progress=False, precision=BF16)
    assert half.basis.vectors.dtype == half.basis.values.dtype == torch.float32
    assert half.basis.rank == full.basis.rank
    assert half.basis.captured == pytest.approx(full.basis.captured, rel=0.03)
    assert half.basis.trace == pytest.approx(full.basis.trace, rel=0.03)
    torch.testing.assert_close(half.basis.values, full.basis.values, rtol=0.05, atol=0)
    overlap = (full.basis.vectors.mT @ half.basis.vectors).square().sum() / full.basis.rank
    assert 0.98 < float(overlap) < 1.0001
    torch.testing.assert_close(half.score(test), full.score(test), rtol=0.03, atol=0)
    assert not torch.equal(half.basis.vectors, full.basis.vectors)


class Last(nn.Module):
    """The output of a recurrent layer after the last step."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = layer(4, 6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layer(x)[0][:, -1])
        return output


@pytest.mark.parametrize("parameters", ["all", Projected(rank=3)], ids=["whole", "projected"])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_fitted_and_scored_in_half_precision(layer, parameters) -> None:
    x, test = images(30).flatten(1).view(30, -1, 4)[:, :5], images(6, 1).view(6, -1, 4)[:, :5]
    full = Monitor(Last(layer), Categorical(), 20, parameters=parameters)
    half = Monitor(Last(layer), Categorical(), 20, parameters=parameters)
    expected = full.fit([x], progress=False).score(test)
    half.fit([x], progress=False, precision=BF16)
    torch.testing.assert_close(half.score(test), expected, rtol=0.03, atol=0)
    full.precision = BF16
    torch.testing.assert_close(full.score(test), expected, rtol=0.05, atol=0)


def test_an_update_may_be_in_half_precision_too() -> None:
    first, second, test = images(80), images(80, seed=2), images(20, seed=1)
    whole = monitor().fit([first, second], progress=False)
    updated = monitor().fit([first], progress=False)
    updated.update([second], progress=False, precision=BF16)
    assert updated.basis.num_data == 160
    torch.testing.assert_close(updated.score(test), whole.score(test), rtol=0.03, atol=0)


SHARED = nn.Linear(300, 300)
WIDE = torch.randn(4, 300)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)), WIDE),
        (nn.Sequential(SHARED, nn.Tanh(), SHARED, nn.Linear(300, 3)), WIDE),
        (
            nn.Sequential(nn.Embedding(900, 100), nn.Flatten(), nn.Linear(300, 300)),
            torch.randint(0, 9, (4, 3)),
        ),
    ],
    ids=["plain", "shared", "embedding"],
)
def test_rows_in_half_precision_are_counted_as_they_are(model: nn.Module, batch) -> None:
    found = Monitor(model.eval(), Gaussian(), rank=4).fit([batch], progress=False)
    engine = found._scorer.source.engine
    half = engine.of(engine.network.at_precision(BF16))
    with half.network.evaluating():
        linear = half.linearize(Inputs((batch,), {}))
        held = linear.pull_back(torch.randn(4, 2, linear.output.shape[1])).hold()
    bytes_held = sum(rows.nbytes for _, rows in held.blocks()) / held.num_rows
    widest = half.parameters.widest * bytes_held / half.parameters.num_parameters
    estimate = half.row_bytes(held=True) - half._delta_bytes
    # small layers are put together, in the wider of their dtypes
    assert estimate == pytest.approx(bytes_held + widest, rel=0.02)
    assert half.row_bytes(held=True) < engine.row_bytes(held=True)


def test_only_the_fit_is_in_half_precision() -> None:
    found = monitor()
    seen: set[torch.dtype] = set()
    layer = found.model[2]
    layer.register_forward_hook(lambda *call: seen.add(call[2].dtype))
    found.fit([images(40)], progress=False, precision=BF16)
    assert BF16 in seen
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}
    seen.clear()
    test = images(5, seed=1)
    scored = found(test)
    features = found.features(test)
    assert seen == {torch.float32}
    assert scored.output.dtype == scored.score.dtype == torch.float32
    assert torch.equal(scored.output, found.model(test).detach())
    call = Inputs((test.double(),), {})
    exact = dense_factors(found.model.double(), call, Categorical().named())
    expected = exact @ found.basis.vectors.double()
    # half precision would be off by 1e-2
    error = (features.double() - expected).abs().max() / expected.abs().max()
    assert float(error) < 1e-5


@pytest.mark.parametrize(("before", "after"), [(BF16, None), (None, BF16)], ids=str)
def test_a_checkpoint_of_another_precision_is_refused(tmp_path: Path, before, after) -> None:
    path, batches = tmp_path / "fit.ckpt", [images(10), images(10, seed=1)]
    options = {"checkpoint": path, "progress": False}
    first = monitor().fit(batches, precision=before, **options)
    with pytest.raises(MismatchError, match="precision"):
        monitor().fit(batches, precision=after, **options)
    again = monitor().fit(batches, precision=before, **options)
    assert torch.equal(again.score(images(3, seed=2)), first.score(images(3, seed=2)))


@pytest.mark.parametrize("precision", [torch.int8, torch.float64, torch.complex64], ids=str)
def test_other_precisions_are_refused_and_leave_the_fit(precision: torch.dtype) -> None:
    found, test = monitor().fit([images(10)], progress=False), images(3, seed=1)
    before = found.score(test)
    with pytest.raises(OptionError, match=r"precision=torch\.bfloat16"):
        found.fit([images(10, seed=2)], progress=False, precision=precision)
    with pytest.raises(OptionError, match=r"precision=torch\.bfloat16"):
        found.update([images(10, seed=2)], progress=False, precision=precision)
    assert torch.equal(found.score(test), before)
    assert found.basis.num_data == 10


@pytest.mark.parametrize("precision", [None, BF16], ids=str)
@pytest.mark.parametrize("budget", [2**30, 1], ids=["at once", "row by row"])
@pytest.mark.parametrize("how", ["fit", "update"])
def test_a_bad_sample_of_a_later_batch_is_named(precision, budget: int, how: str) -> None:
    found, test = monitor().fit([images(10)], progress=False), images(3, seed=1)
    found.calibrate([images(20, seed=3)], progress=False)
    found.memory_budget = budget
    before = found(test)
    batches = [images(size, seed=size) for size in (4, 3, 5, 2)]
    batches[2][1, 0, 3, 3] = float("nan")
    batches[3][0, 0, 0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"sample 8 \(batch 2, row 1\)"):
        getattr(found, how)(batches, progress=False, precision=precision)
    after = found(test)
    torch.testing.assert_close(after.score, before.score, rtol=1e-6, atol=0)
    assert torch.equal(after.output, before.output)
    assert after.p_value is not None
    assert found.basis.num_data == 10
    found.update(batches[:2], progress=False)
    assert found.basis.num_data == 17
