"""Several processes come to what one alone does: same sketch, same counts, same errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from scodkit import Categorical, LastLayers, Monitor
from scodkit.errors import BatchError, MismatchError, NonFiniteError, ProcessError
from scodkit.parts import Shard
from scodkit.sketch import Exact, FrequentDirections, Nystrom, Sketch, TwoSided
from together import digits, network, run

pytestmark = pytest.mark.slow

SKETCHES = {
    "nystrom": Nystrom(size=30),
    "two_sided": TwoSided(size=31),
    "frequent_directions": FrequentDirections(size=30),
    "exact": Exact(),
}
# samples of each process: uneven, and one without any
UNEVEN = {2: (44, 17), 4: (30, 0, 30, 1)}


def monitor(sketch: Sketch, dtype: torch.dtype = torch.float64, **options) -> Monitor:
    return Monitor(network(dtype), Categorical(), 10, sketch=sketch, **options)


def parts_of(x: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    return list(x.split(list(sizes)))


def batches(x: Tensor, size: int = 7) -> list[Tensor]:
    return list(x.split(size)) if len(x) else []


def fit_uneven(rank: int, count: int, folder: Path) -> None:
    for name, sketch in SKETCHES.items():
        for dtype in (torch.float64, torch.float32):
            x = digits(dtype=dtype)
            own = monitor(sketch, dtype)
            own.fit(batches(parts_of(x, UNEVEN[count])[rank]), progress=False)
            own.save(folder / f"{name}.{dtype}.{rank}".replace("torch.", ""))
    last = monitor(Nystrom(size=30), parameters=LastLayers(count=1))
    last.fit(batches(parts_of(digits(), UNEVEN[count])[rank]), progress=False)
    last.score(digits(3))  # a process without data has no engine yet
    last.save(folder / f"last.{rank}")


@pytest.mark.parametrize("count", [2, 4])
def test_processes_with_uneven_parts_are_as_one(count: int, tmp_path: Path) -> None:
    run(count, fit_uneven, tmp_path)
    for name, sketch in SKETCHES.items():
        for dtype, exact in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
            alone = monitor(sketch, dtype).fit(batches(digits(dtype=dtype)), progress=False)
            found = [
                Monitor.load(
                    tmp_path / f"{name}.{dtype}.{r}".replace("torch.", ""), alone.model
                )
                for r in range(count)
            ]
            for one in found:
                assert one.basis.num_data == len(digits()) == alone.basis.num_data
                assert one.basis.trace == pytest.approx(alone.basis.trace, rel=exact)
                assert one.fitted.input_range == alone.fitted.input_range is not None
                assert torch.equal(one.basis.vectors, found[0].basis.vectors)
                if sketch.linear and not isinstance(sketch, Exact):
                    same_sums(one, alone, exact)
            if not isinstance(sketch, FrequentDirections):  # of which only the bound is kept
                close(found[0].score(digits(5, 1, dtype)), alone.score(digits(5, 1, dtype)))
            else:
                assert found[0].basis.certified
    whole = monitor(Nystrom(size=30), parameters=LastLayers(count=1))
    whole.fit(batches(digits()), progress=False)
    for rank in range(count):
        close(
            Monitor.load(tmp_path / f"last.{rank}", whole.model).score(digits(3)),
            whole.score(digits(3)),
        )


def same_sums(one: Monitor, alone: Monitor, exact: float) -> None:
    assert one.fitted.state is not None
    assert alone.fitted.state is not None
    for name, tensor in alone.fitted.state.tensors.items():
        away = (one.fitted.state.tensors[name] - tensor).norm() / tensor.norm()
        assert float(away) <= exact, name


def close(found: Tensor, expected: Tensor) -> None:
    assert torch.allclose(found, expected, rtol=1e-6 if found.dtype == torch.float64 else 1e-3)


def fail_together(rank: int, count: int, folder: Path) -> None:
    bad = digits(20)
    bad[3] = torch.nan
    own = monitor(Nystrom(size=20))
    own.fit([digits(9, rank)], progress=False)
    before = own.score(digits(4))
    with pytest.raises((NonFiniteError, ProcessError)) as told:
        own.fit([bad if rank == 1 else digits(20)], progress=False)
    assert isinstance(told.value, NonFiniteError if rank == 1 else ProcessError)
    assert "sample 3" in str(told.value)
    if rank != 1:
        assert "process 1 failed (NonFiniteError" in str(told.value)
    assert torch.equal(own.score(digits(4)), before)
    with pytest.raises(MismatchError, match=r"20 of 20 samples of process 1 were in others"):
        own.fit([digits(20)], progress=False)
    with pytest.raises(MismatchError, match=r"the weights of process 0 and of process 1"):
        Monitor(network(seed=rank), Categorical(), 5).fit([digits(8, rank)], progress=False)
    with pytest.raises(MismatchError, match=r"the rank of process 0 and of process 1.*5 and 6"):
        Monitor(network(), Categorical(), 5 + rank).fit([digits(8, rank)], progress=False)
    other = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)).double()
    with pytest.raises(MismatchError, match="the parameters of process 0 and of process 1"):
        Monitor(other if rank else network(), Categorical(), 5).fit(
            [digits(8, rank)], progress=False
        )
    changed = monitor(Nystrom(size=20)).fit([digits(9, rank)], progress=False)
    if rank == 1:
        with torch.no_grad():
            changed.model[0].weight.add_(1)
    with pytest.raises((MismatchError, ProcessError), match="for an update"):
        changed.update([digits(9, 7 + rank)], progress=False)
    with pytest.raises(BatchError, match="empty loaders in all"):
        own.fit([], progress=False)
    if rank == 0:  # the others do not take part, and nobody waits
        alone = monitor(Nystrom(size=20)).fit([digits(8)], progress=False, together=False)
        assert alone.basis.num_data == 8
    nothing = torch.full((4, 1, 8, 8), torch.nan, dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="all 8 had"):
        own.fit([nothing], on_bad="skip", progress=False)
    own.fit([nothing if rank else digits(5)], on_bad="skip", progress=False)
    assert (own.basis.num_data, own.skipped) == (5, 4)
    (folder / f"done.{rank}").touch()


def test_what_goes_wrong_in_one_process_is_said_in_all(tmp_path: Path) -> None:
    run(2, fail_together, tmp_path)
    assert (tmp_path / "done.0").exists()
    assert (tmp_path / "done.1").exists()


def fit_shards(rank: int, count: int, folder: Path) -> None:
    whole = list(digits())
    own = monitor(Nystrom(size=30))
    loader = DataLoader(Shard(whole, rank, count), batch_size=7)
    own.fit(loader, progress=False)
    assert own.basis.num_data == len(whole)
    assert len(own.fitted.samples) == len(whole)
    own.update([digits(5, 10 + rank)], progress=False)
    assert own.basis.num_data == len(whole) + 15
    with pytest.raises(MismatchError, match="61 of 61 samples of process 1 were in others"):
        own.fit(DataLoader(Shard(whole, 0, 1), batch_size=7), progress=False)
    if rank == 0:
        own.save(folder / "whole.scod")


def test_shards_are_read_once_and_updates_add_up(tmp_path: Path) -> None:
    run(3, fit_shards, tmp_path)
    more = [digits(5, 10 + rank) for rank in range(3)]
    alone = monitor(Nystrom(size=30)).fit(batches(digits()) + more, progress=False)
    found = Monitor.load(tmp_path / "whole.scod", alone.model)
    close(found.score(digits(4, 5)), alone.score(digits(4, 5)))
