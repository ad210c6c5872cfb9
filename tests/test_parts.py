"""Parts of data: each sample in one of them, and none counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
)

from cases import mlp
from scodkit import Categorical, Monitor
from scodkit.errors import MergeError, OptionError
from scodkit.parts import Shard


@given(st.integers(0, 200), st.integers(1, 20))
def test_shards_hold_every_sample_once_and_are_as_equal_as_can_be(length, count) -> None:
    shards = [Shard(range(length), index, count) for index in range(count)]
    assert [item for shard in shards for item in shard] == list(range(length))
    sizes = {len(shard) for shard in shards}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_part_that_is_not_there_is_refused(index: int, count: int) -> None:
    with pytest.raises(OptionError, match="counted from 0"):
        Shard(range(5), index, count)
    with pytest.raises(OptionError, match="with a length, read by position"):
        Shard((i for i in range(5)), 0, 1)
    with pytest.raises(IndexError):
        Shard(range(5), 0, 2)[2]


def data(seed: int, count: int = 12) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def fitted(*seeds: int) -> Monitor:
    torch.manual_seed(0)
    monitor = Monitor(mlp(3), Categorical(), rank=4)
    return monitor.fit([data(seed) for seed in seeds], progress=False)


def test_data_merged_twice_is_refused_even_after_other_merges(tmp_path: Path) -> None:
    fitted(1).save(tmp_path / "one.scod")
    whole = fitted(0).merge(fitted(1)).merge(fitted(2, 3))
    before = whole.score(data(9))
    again = Monitor.load(tmp_path / "one.scod", whole.model)
    with pytest.raises(MergeError, match="would count twice"):
        whole.merge(again)
    with pytest.raises(MergeError, match="would count twice"):
        whole.merge(whole)
    whole.save(tmp_path / "whole.scod")
    with pytest.raises(MergeError, match="would count twice"):
        Monitor.load(tmp_path / "whole.scod", whole.model).merge(fitted(2, 3))
    assert torch.equal(whole.score(data(9)), before)


def test_a_shard_of_a_shard_is_a_part_of_the_whole() -> None:
    items = TensorDataset(data(0, 40))
    inner = Shard(Shard(items, 1, 2), 0, 2)
    assert len(inner) == 10
    assert torch.equal(inner[3][0], items[23][0])


def test_an_update_with_data_of_the_fit_is_refused() -> None:
    x = data(0, count=30)
    monitor = Monitor(mlp(3), Categorical(), 4)
    monitor.fit(DataLoader(Shard(x, 0, 2), batch_size=8), progress=False)
    before = monitor.score(x)
    with pytest.raises(MergeError, match="would count twice"):
        monitor.update(DataLoader(Shard(x, 0, 3), batch_size=8), progress=False)
    assert torch.equal(monitor.score(x), before)
    monitor.update(DataLoader(Shard(x, 1, 2), batch_size=8), progress=False)
    assert monitor.basis.num_data == 30


def test_fits_of_other_priors_are_not_merged() -> None:
    model = mlp(3)
    parts = [Monitor(model, Categorical(), 4, prior_scale=s) for s in (1.0, 7.0)]
    for seed, part in enumerate(parts):
        part.fit([data(seed, 9)], progress=False)
    with pytest.raises(MergeError, match=r"got 1\.0 and 7\.0; set the one"):
        parts[0].merge(parts[1])
    parts[1].prior_scale = 1.0
    assert parts[0].merge(parts[1]).basis.num_data == 18


def test_a_stream_with_a_length_has_no_shards() -> None:
    class Stream(IterableDataset[int]):
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    with pytest.raises(OptionError, match="its own stream"):
        Shard(Stream(), 0, 2)


def test_fits_of_mostly_zeros_are_told_apart() -> None:
    """Of a large embedding hardly a number of the sketch is not zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(200_000, 4), nn.Flatten(), nn.Linear(8, 2))
    monitor = Monitor(model, Categorical(), 2).fit([torch.tensor([[1, 2]])], progress=False)
    for i in range(3, 9, 2):
        monitor.update([torch.tensor([[i, i + 1]])], progress=False)
    assert monitor.basis.num_data == 4


def test_overlapping_shards_are_refused_with_what_they_have_in_common() -> None:
    x = data(0, 80)

    def of(index: int, count: int) -> Monitor:
        torch.manual_seed(0)
        loader = torch.utils.data.DataLoader(Shard(x, index, count), batch_size=9)
        return Monitor(mlp(3), Categorical(), rank=4).fit(loader, progress=False)

    with pytest.raises(MergeError, match="10 of 20 samples to be added are in the fit"):
        of(2, 8).merge(of(1, 4))
    whole = of(0, 8)
    for index in range(1, 8):
        whole.merge(of(index, 8))
    torch.manual_seed(0)
    alone = Monitor(mlp(3), Categorical(), rank=4).fit(x.split(9), progress=False)
    assert whole.basis.num_data == 80
    assert torch.allclose(whole.score(data(5)), alone.score(data(5)), rtol=1e-4)
