"""Fits in parts: resumed, updated, merged; and what is noticed when they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from cases import mlp
from scodkit import Categorical, Gaussian, Monitor
from scodkit.errors import MergeError, MismatchError, NonFiniteError, OptionError
from scodkit.fit.processes import Processes
from scodkit.sketch import Fold, Map, Nystrom


def data(size: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


def model() -> nn.Module:
    torch.manual_seed(0)
    return mlp(3)


def fitted(likelihood=None, **options: object) -> Monitor:
    monitor = Monitor(model(), likelihood or Categorical(), rank=4, **options)
    return monitor.fit([data()], progress=False)


def test_a_finished_checkpoint_gives_the_same_fit_again(tmp_path: Path) -> None:
    path = tmp_path / "fit.ckpt"
    batches = [data(seed=s) for s in range(3)]
    first = Monitor(model(), Categorical(), rank=4).fit(
        batches, checkpoint=path, progress=False
    )
    again = Monitor(model(), Categorical(), rank=4).fit(
        batches, checkpoint=path, progress=False
    )
    assert again.basis.num_data == 36
    assert torch.equal(again.score(data(4, 9)), first.score(data(4, 9)))


@pytest.mark.parametrize(
    "changed",
    [
        [data(seed=0), data(seed=1), 5 * data(seed=2)],
        [data(seed=0), data(seed=2), data(seed=1)],
        [data(seed=0)],
    ],
    ids=["another batch", "another order", "fewer batches"],
)
def test_data_that_changed_under_a_checkpoint_is_noticed(tmp_path: Path, changed) -> None:
    path = tmp_path / "fit.ckpt"

    def stream(batches):  # a generator: no length to compare
        yield from batches

    batches = [data(seed=s) for s in range(3)]
    monitor = Monitor(model(), Categorical(), rank=4)
    monitor.fit(stream(batches), checkpoint=path, progress=False)
    before = monitor.score(data(4, 9))
    with pytest.raises(MismatchError, match="same data in the same order"):
        monitor.fit(stream(changed), checkpoint=path, progress=False)
    assert torch.equal(monitor.score(data(4, 9)), before)


class StopError(Exception):
    """Ends a fit in the middle."""


class Stopping(TensorDataset):
    """Gives up at an item, until it is told to go on."""

    stops = True

    def __getitem__(self, place):
        if self.stops and place == 21:
            raise StopError
        return super().__getitem__(place)


def loaders(items) -> dict[str, DataLoader]:
    some = [list(range(i, i + 4)) for i in range(0, 40, 4)]
    reverse = list(range(39, -1, -1))
    return {
        "plain": DataLoader(items, batch_size=4),
        "own sampler": DataLoader(items, batch_size=4, sampler=reverse),
        "own batches": DataLoader(items, batch_sampler=some),
    }


@pytest.mark.parametrize("kind", ["plain", "own sampler", "own batches"])
def test_loaders_of_all_kinds_go_on_where_they_were(kind: str, tmp_path: Path) -> None:
    items, path = Stopping(data(40)), tmp_path / "fit.ckpt"
    monitor = Monitor(model(), Categorical(), rank=4)
    options = {"checkpoint": path, "every": 1, "progress": False}
    with pytest.raises(StopError):
        monitor.fit(loaders(items)[kind], check_deterministic=False, **options)
    assert path.exists()
    items.stops = False
    monitor.fit(loaders(items)[kind], check_deterministic=False, **options)
    whole = Monitor(model(), Categorical(), rank=4).fit(loaders(items)[kind], progress=False)
    assert monitor.basis.num_data == 40
    assert torch.equal(monitor.score(data(4, 9)), whole.score(data(4, 9)))


@pytest.mark.parametrize(
    "loader",
    [
        lambda items: DataLoader(items, batch_size=4, shuffle=True),
        lambda items: DataLoader(items, batch_size=4, sampler=SubsetRandomSampler(range(40))),
        lambda items: DataLoader(
            items, batch_sampler=BatchSampler(RandomSampler(items), 5, False)
        ),
        lambda items: DataLoader(items, batch_size=4, num_workers=1, in_order=False),
    ],
)
def test_data_in_a_random_order_cannot_be_gone_on_with(loader, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="in a fixed order"):
        Monitor(model(), Categorical(), rank=4).fit(
            loader(TensorDataset(data(40))), checkpoint=tmp_path / "fit.ckpt", progress=False
        )


def test_other_outputs_are_not_gone_on_with(tmp_path: Path) -> None:
    options = {"checkpoint": tmp_path / "fit.ckpt", "progress": False}
    Monitor(model(), Categorical(), rank=4).fit([data()], **options)
    fewer = Monitor(model(), Categorical(), rank=4, outputs=lambda y: y[:, :2])
    with pytest.raises(MismatchError, match="outputs"):
        fewer.fit([data()], **options)


def test_more_data_behind_a_checkpoint_is_simply_added(tmp_path: Path) -> None:
    path = tmp_path / "fit.ckpt"
    batches = [data(seed=s) for s in range(3)]
    Monitor(model(), Categorical(), rank=4).fit(
        (b for b in batches[:2]), checkpoint=path, progress=False
    )
    longer = Monitor(model(), Categorical(), rank=4)
    longer.fit((b for b in batches), checkpoint=path, progress=False)
    whole = Monitor(model(), Categorical(), rank=4).fit(batches, progress=False)
    assert torch.equal(longer.score(data(4, 9)), whole.score(data(4, 9)))


def test_a_missing_folder_is_noticed_before_any_data_is_read(tmp_path: Path) -> None:
    read = []

    def stream():
        read.append(1)
        yield data()

    with pytest.raises(FileNotFoundError, match="mkdir -p"):
        Monitor(model(), Categorical(), rank=4).fit(
            stream(), checkpoint=tmp_path / "no" / "fit.ckpt", progress=False
        )
    assert read == []
    with pytest.raises(FileNotFoundError, match="mkdir -p"):
        fitted().save(tmp_path / "no" / "monitor.scod")
    with pytest.raises(OptionError, match="the name of a file to write, got a folder"):
        fitted().save(tmp_path)


@pytest.mark.parametrize("left", ["fit.ckpt.1-of-4", "fit.ckpt.0-of-2"])
def test_checkpoints_of_a_group_are_not_passed_over(left: str, tmp_path: Path) -> None:
    """One process cannot go on with a part of four, and would do all of it again."""
    (tmp_path / left).touch()
    monitor, where = Monitor(model(), Categorical(), rank=4), tmp_path / "fit.ckpt"
    with pytest.raises(MismatchError, match=f"than 1 at .*found {left} .1 in all.; start"):
        monitor.fit([data()], checkpoint=where, progress=False)
    (tmp_path / left).unlink()
    monitor.fit([data()], checkpoint=where, progress=False)
    (tmp_path / left).touch()  # now there is something to go on with
    monitor.fit([data()], checkpoint=where, progress=False)
    with pytest.raises(MismatchError, match=r"than 3 at .*found fit.ckpt .2 in all.; start"):
        Processes(rank=2, count=3).check_files(where)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"every": "10"}, "every >= 1 batches, got '10'"),
        ({"products": "no"}, "products=True, False or None, got 'no'"),
        ({"precision": "bf16"}, "precision=torch.bfloat16 or None, got 'bf16'"),
    ],
)
def test_options_that_there_are_not(option: dict[str, object], words: str) -> None:
    monitor = Monitor(model(), Categorical(), rank=4)
    with pytest.raises(OptionError, match=words):
        monitor.fit([data()], progress=False, **option)
    if "every" not in option:
        with pytest.raises(OptionError, match=words):
            monitor.plan(data(), **option)


def test_a_fit_without_one_finite_sample_is_refused() -> None:
    monitor = fitted()
    before = monitor.score(data(4, 1))
    nothing = [torch.full((5, 3), float("nan"))]
    with pytest.raises(NonFiniteError, match="all 5 had"):
        monitor.fit(nothing, on_bad="skip", progress=False)
    assert torch.equal(monitor.score(data(4, 1)), before)


class SteepFirstOutput(nn.Module):
    """The gradient of its first output is infinite where the input is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(
            [(self.weight[0] * x[:, 0]).abs().sqrt(), self.weight[1] * x[:, 1]], 1
        )


@pytest.mark.parametrize("budget", [1, 2**30])
def test_a_bad_sample_is_skipped_whole(budget: int) -> None:
    x = torch.tensor([[1.0, 1.0], [0.0, 3.0], [2.0, 1.0]])
    monitor = Monitor(SteepFirstOutput(), Gaussian(), rank=2)
    monitor.memory_budget = budget
    monitor.fit([x], on_bad="skip", progress=False)
    clean = Monitor(SteepFirstOutput(), Gaussian(), rank=2).fit([x[[0, 2]]], progress=False)
    assert (monitor.skipped, monitor.basis.num_data) == (1, 2)
    assert monitor.basis.trace == pytest.approx(clean.basis.trace)


def test_merging_other_likelihoods_or_changed_weights_is_refused() -> None:
    with pytest.raises(MergeError, match=r"likelihoods are Gaussian.*1\.0.*Gaussian.*100\.0"):
        fitted(Gaussian(1.0)).merge(fitted(Gaussian(100.0)))
    mine, other = fitted(), fitted()
    with torch.no_grad():
        mine.model[0].weight.add_(1.0)
    with pytest.raises(MismatchError, match="for a merge"):
        mine.merge(other)


def test_an_update_that_cannot_end_well_reads_nothing(tmp_path: Path) -> None:
    fitted().save(tmp_path / "lean.scod", sketch=False)
    lean = Monitor.load(tmp_path / "lean.scod", model())
    read = []

    def stream():
        read.append(1)
        yield data()

    with pytest.raises(MergeError, match="saved without"):
        lean.update(stream(), progress=False)
    assert read == []


def test_updates_take_the_options_their_errors_recommend() -> None:
    monitor = fitted()
    bad = data(seed=1)
    bad[3] = float("nan")
    with pytest.raises(NonFiniteError, match="on_bad='skip'"):
        monitor.update([bad], progress=False)
    monitor.update([bad], progress=False, on_bad="skip", check_deterministic=False)
    assert (monitor.basis.num_data, monitor.skipped) == (23, 1)


class OwnMap(Map):
    """A map of the user's own, which no file can describe."""

    def pattern(self, start, stop, shape, seed, like):
        return Fold().rows(start, stop, shape, seed, like)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnMap)

    def __hash__(self) -> int:
        return 0


def test_sketches_of_ones_own_are_passed_again(tmp_path: Path) -> None:
    path = tmp_path / "own.scod"
    monitor = fitted(sketch=Nystrom(size=8, map=OwnMap()))
    monitor.save(path)
    with pytest.raises(ValueError, match=r"sketch=\.\.\."):
        Monitor.load(path, model())
    loaded = Monitor.load(path, model(), sketch=Nystrom(size=8, map=OwnMap()))
    loaded.update([data(5, 2)], progress=False)
    assert loaded.basis.num_data == 17
    with pytest.raises(MismatchError, match="sketch of the fit"):
        Monitor.load(path, model(), sketch=Nystrom(size=9, map=OwnMap()))


class Stream(IterableDataset):
    """An iterable data set that knows its length."""

    def __len__(self) -> int:
        return 12

    def __iter__(self):
        return iter(data())


def test_iterable_data_sets_work() -> None:
    monitor = Monitor(model(), Categorical(), rank=4)
    monitor.fit(DataLoader(Stream(), batch_size=4), progress=False)
    assert monitor.basis.num_data == 12
