"""How far an input is outside the range of training inputs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from scodkit import Categorical, Fused, Gaussian
from scodkit.model.input_range import InputRange
from scodkit.model.inputs import Inputs


def call(*args: Tensor, **kwargs: Tensor) -> Inputs:
    return Inputs(args, kwargs)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def slow_excess(seen: Tensor, numbers: Tensor, spread: list[float]) -> list[float]:
    """Return the excess of each row of numbers, one by one."""
    found = []
    for row in numbers.tolist():
        total = 0.0
        for j, value in enumerate(row):
            low, high = float(seen[:, j].min()), float(seen[:, j].max())
            total += max(0.0, low - value, value - high) / spread[j]
        found.append(total)
    return found


def test_columns_of_a_table_count_in_their_own_spreads() -> None:
    seen, new = drawn(50, 3) * torch.tensor([1.0, 1e-3, 1e4]), drawn(20, 3, seed=1) * 100
    ranges = InputRange()
    ranges.add(call(seen))
    spread = [float(seen[:, j].std(correction=0)) for j in range(3)]
    expected = torch.tensor(slow_excess(seen, new, spread), dtype=torch.float64)
    torch.testing.assert_close(ranges.excess(call(new)), expected)
    assert torch.equal(ranges.excess(call(seen)), torch.zeros(50, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(1, 5, 5), (70,), (6, 2)])
def test_other_inputs_count_by_four_numbers_of_each_sample(shape: tuple[int, ...]) -> None:
    seen, new = drawn(50, *shape), 3 * drawn(20, *shape, seed=1) + 1
    ranges = InputRange()
    ranges.add(call(seen))

    def four(x: Tensor) -> Tensor:
        flat = x.flatten(1)
        ends = flat.amin(1), flat.amax(1)
        return torch.stack([*ends, flat.mean(1), flat.std(1, correction=0)], 1)

    spread = four(seen).std(0, correction=0).tolist()
    expected = torch.tensor(slow_excess(four(seen), four(new), spread), dtype=torch.float64)
    torch.testing.assert_close(ranges.excess(call(new)), expected)
    assert float(expected.min()) > 0


def test_batches_and_merges_are_one_pass() -> None:
    table, image = drawn(60, 3) + 1e6, drawn(60, 2, 4, 4)
    whole, first, second = InputRange(), InputRange(), InputRange()
    whole.add(call(table, image))
    for part in (slice(0, 7), slice(7, 31)):
        first.add(call(table[part], image[part]))
    second.add(call(table[31:], image[31:]))
    new = call(table[:9] + 5, 3 * image[:9])
    before = first.pack()
    torch.testing.assert_close(first.merged(second).excess(new), whole.excess(new))
    torch.testing.assert_close(second.merged(first).excess(new), whole.excess(new))
    assert all(torch.equal(first.pack()[name], own) for name, own in before.items())
    assert torch.equal(InputRange(whole.pack()).excess(new), whole.excess(new))


def test_what_never_varied_has_a_spread_all_the_same() -> None:
    ranges = InputRange()
    table = torch.cat([drawn(30, 1), torch.zeros(30, 1), torch.full((30, 1), 20.0)], 1)
    ranges.add(call(table))
    one_hot = table[:1] + torch.tensor([0.0, 1.0, 0.0])
    doubled = table[:1] + torch.tensor([0.0, 0.0, 20.0])
    assert float(ranges.excess(call(one_hot))) == pytest.approx(1)
    assert float(ranges.excess(call(doubled))) == pytest.approx(1)
    images = drawn(40, 1, 6, 6).abs().clamp_max(1)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = 0, 1  # all are from 0 to 1
    ranges = InputRange()
    ranges.add(call(images))
    hundredth = 0.01 * float(images.std(correction=0))
    one = images[:1].clone()
    one[0, 0, 0, 1] = 1 + hundredth
    assert float(ranges.excess(call(one))) == pytest.approx(1, rel=0.05)
    constant = InputRange()
    constant.add(call(torch.zeros(5, 1, 3, 3)))
    assert bool(constant.excess(call(torch.ones(1, 1, 3, 3))).isfinite().all())


def test_samples_that_are_not_finite_have_no_part_in_a_range() -> None:
    ranges, clean = InputRange(), InputRange()
    x = drawn(20, 3)
    clean.add(call(x[2:]))
    x[0, 1], x[1, 2] = torch.nan, torch.inf
    ranges.add(call(x))
    ranges.add(call(x[:2]))
    torch.testing.assert_close(ranges.pack(), clean.pack(), rtol=1e-14, atol=1e-14)
    empty = InputRange()
    empty.add(call(x[:2]))
    assert empty.pack() == {}
    torch.testing.assert_close(empty.merged(ranges).pack(), ranges.pack(), rtol=0, atol=0)


def test_what_was_not_there_in_training_says_nothing() -> None:
    ranges = InputRange()
    ranges.add(call(drawn(20, 3), tokens=torch.arange(40).view(20, 2)))
    assert list(ranges.pack()) == ["0:3"]
    others = call(1e9 * drawn(4, 5), tokens=torch.arange(8).view(4, 2), other=drawn(4))
    assert torch.equal(ranges.excess(others), torch.zeros(4, dtype=torch.float64))


def bounded() -> nn.Module:
    """Return a network whose features are between -1 and 1, whatever goes in."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()])
def test_absurd_inputs_are_flagged_where_features_are_bounded(likelihood: object) -> None:
    fused = Fused(bounded(), likelihood)  # type: ignore[arg-type]
    fused.fit([drawn(400, 6, 4).float()], progress=False)
    fused.calibrate([drawn(400, 6, 4, seed=1).float()], progress=False)
    new = drawn(200, 6, 4, seed=2).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert bool(fused.flag(16 * new).all())
        assert bool(fused.flag(255 * new).all())
    assert float(fused.flag(new).double().mean()) < 0.1
    words = fused.explain(16 * new[:1]).words()
    assert "input range" in words.splitlines()[1]
    assert "outside the range of all training inputs" in words
