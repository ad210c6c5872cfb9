"""Samples are known again, in whatever batches and order they come."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from scodkit import Bernoulli, Categorical, Gaussian, Monitor
from scodkit.errors import (
    CalibrationWarning,
    MergeError,
    MismatchError,
    RepeatedDataWarning,
)
from scodkit.fit import data as data_room
from scodkit.fit.data import Seen, digests_of, seen_again
from scodkit.model.inputs import Inputs
from scodkit.numerics import artifact
from scodkit.sharded import ShardedMonitor
from together import run


def data(size: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))


def monitor() -> Monitor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return Monitor(model, Categorical(), rank=4)


def fitted(loader: Iterable[object]) -> Monitor:
    return monitor().fit(loader, progress=False)


def loader(x: Tensor, **options: object) -> DataLoader[object]:
    return DataLoader(TensorDataset(x), **{"batch_size": 8, **options})


X, NEW = data(), data(seed=1)

# the data of the fit once more, as nobody would know it by its batches
SEEN = {
    "the same": [X],
    "other batches": X.split(5),
    "shuffled": [X[torch.randperm(32, generator=torch.Generator().manual_seed(3))]],
    "half of it": [X[:16]],
    "a subset": DataLoader(Subset(TensorDataset(X), range(3, 20)), batch_size=6),
    "one more row": [torch.cat([X, NEW[:1]])],
    "a loader": loader(X),
    "among new data": [torch.cat([NEW[:16], X[5:21]])],
    "twice": [torch.cat([X, X])],
}


@pytest.mark.parametrize("first", [[X], loader(X)], ids=["list", "loader"])
@pytest.mark.parametrize("how", SEEN)
def test_data_of_the_fit_is_not_added_again(how: str, first: Iterable[object]) -> None:
    mine = fitted(first)
    before = mine.score(NEW)
    with pytest.raises(MergeError, match="would count twice"):
        mine.update(SEEN[how], progress=False)
    with pytest.raises(MergeError, match="would count twice"):
        mine.merge(fitted(SEEN[how]))
    assert torch.equal(mine.score(NEW), before)
    mine.update([NEW], progress=False)
    with pytest.raises(MergeError, match="32 of 32 samples to be added"):
        mine.update([NEW[torch.arange(31, -1, -1)]], progress=False)


@pytest.mark.parametrize("how", SEEN)
def test_calibrating_with_data_of_the_fit_is_told_exactly(how: str, path: Path) -> None:
    fitted([X]).save(path)
    mine = Monitor.load(path, monitor().model)
    batches = [b[0] if isinstance(b, list) else b for b in SEEN[how]]
    count = sum(bool((x == X).all(1).any()) for batch in batches for x in batch)
    total = sum(map(len, batches))
    with pytest.warns(CalibrationWarning, match=f"{count} of {total} held-out samples were"):
        mine.calibrate(SEEN[how], progress=False)
    assert mine.calibration is not None
    mine.calibrate([NEW], progress=False)


def test_a_few_samples_that_come_again_are_told_but_not_refused() -> None:
    mine = fitted([data(1000)])
    few = torch.cat([data(1000)[:2], data(998, seed=1)])
    with pytest.warns(RepeatedDataWarning, match="2 of 1000 samples to be added"):
        mine.update([few], progress=False)
    assert mine.basis.num_data == 2000


def test_samples_that_were_fitted_more_than_once_are_known_again() -> None:
    x = data(200)
    drawn = WeightedRandomSampler(torch.ones(200), 400, generator=torch.Generator())
    for first in (loader(x, sampler=drawn), [x, x]):
        mine = fitted(first)
        with pytest.raises(MergeError, match="would count twice"):
            mine.update([x[:100]], progress=False)
        with pytest.warns(CalibrationWarning):
            mine.calibrate([x[:100]], progress=False)


@pytest.mark.filterwarnings("error")
def test_honest_fits_of_regression_are_not_warned_of() -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        train, held = 6 * torch.rand(400, 1) - 3, 6 * torch.rand(400, 1) - 3
        net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
        optimiser = torch.optim.Adam(net.parameters(), 1e-2)
        for _ in range(100):
            optimiser.zero_grad()
            (net(train) - train.sin()).square().mean().backward()
            optimiser.step()
        mine = Monitor(net, Gaussian(0.01), rank=20).fit(train.split(100), progress=False)
        mine.calibrate([held], progress=False)
        with pytest.warns(CalibrationWarning, match="100 of 100 held-out"):
            mine.calibrate([train[50:150]], progress=False)


# -- values that repeat anyway ---------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 18).map(lambda bits: 2**bits),
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.sampled_from([1, 3]),
)
def test_samples_that_are_alike_by_chance_are_not_refused(
    seed: int, values: int, first: int, second: int, power: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, new = (
        (torch.rand(size, generator=generator).pow(power) * values).long()
        for size in (first, second)
    )
    again = seen_again(old, new)
    assert again is None or not again.certain


@pytest.mark.filterwarnings("error")
def test_binary_features_can_be_calibrated_with_and_added() -> None:
    draws = [
        torch.randint(0, 2, (500, 4), generator=torch.Generator().manual_seed(s)).float()
        for s in range(3)
    ]
    torch.manual_seed(0)
    mine = Monitor(nn.Linear(4, 1), Bernoulli(), rank=3).fit([draws[0]], progress=False)
    mine.update([draws[1]], progress=False).calibrate([draws[2]], progress=False)
    assert mine.basis.num_data == 1000


@pytest.mark.filterwarnings("error")
def test_blank_images_among_others_are_not_the_same_data() -> None:
    mine = fitted([torch.cat([data(300), torch.zeros(1, 4)])])
    mine.update([torch.cat([data(300, seed=1), torch.zeros(200, 4)])], progress=False)
    assert mine.basis.num_data == 801


# -- digests ---------------------------------------------------------------------------------


def digests(*tensors: Tensor) -> Tensor:
    return digests_of(Inputs(tensors, {}))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8],
)
def test_samples_that_differ_have_other_digests(dtype: torch.dtype) -> None:
    """Whole numbers: as floats most of their bits are zero."""
    grid = torch.cartesian_prod(*[torch.arange(4)] * 8).to(dtype)
    assert len(digests(grid).unique()) == len(grid)
    assert len(digests(grid[:, ::2].unique(dim=0), torch.zeros(256)).unique()) == 256
    switched = torch.eye(500, dtype=dtype)
    assert len(torch.cat([digests(switched), digests(2 * switched)]).unique()) == 1000
    bits = torch.cartesian_prod(*[torch.tensor([False, True])] * 16)
    assert len(digests(bits).unique()) == 2**16


def test_a_digest_is_of_its_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, z = data(50), data(50, seed=2).double()
    whole = digests(x, z)
    assert torch.equal(
        torch.cat([digests(x[i : i + 1], z[i : i + 1]) for i in range(50)]), whole
    )
    strided = torch.empty(50, 9)[:, 1::2].copy_(x)
    assert torch.equal(digests(strided, z), whole)
    assert not (digests(z, x) == whole).any()
    with torch.inference_mode():
        assert torch.equal(digests(x, z), whole)
    monkeypatch.setattr(data_room, "_AT_ONCE", 1)
    assert torch.equal(digests(x, z), whole)
    assert digests(x[:0], z[:0]).shape == (0,)
    assert digests(torch.empty(3, 0)).shape == (3,)
    assert digests(torch.arange(5.0)).unique().shape == (5,)


def test_padding_does_not_matter() -> None:
    tokens = torch.randint(1, 99, (6, 5), generator=torch.Generator().manual_seed(0))
    longer = nn.functional.pad(tokens, (0, 4))
    assert torch.equal(digests(tokens, tokens > 0), digests(longer, longer > 0))


def test_digests_are_the_same_tomorrow() -> None:
    """Files hold them."""
    x = torch.arange(12.0).reshape(3, 4)
    known = [8007085089534002368, 1615564028061714231, -1407417515234108052]
    assert digests(x).tolist() == known


def test_beyond_so_many_none_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_room, "KEPT", 50)
    monkeypatch.setattr(data_room, "_WAITING", 2)
    kept = Seen()
    for part in torch.arange(50).flip(0).split(7):
        kept.add(part)
    assert torch.equal(kept.all(), torch.arange(50))
    kept.add(torch.tensor([50]))
    assert kept.all() is None
    mine = fitted([X])
    assert len(mine.fitted.samples) == 32
    mine.update([NEW], progress=False)
    assert mine.fitted.samples is None
    with pytest.warns(RepeatedDataWarning, match="nobody can tell"):
        mine.update([X[:20]], progress=False)


# -- through files, checkpoints and processes ------------------------------------------------


def test_digests_are_kept_in_files_and_through_merges(path: Path) -> None:
    mine = fitted([X]).merge(fitted([NEW]))
    assert torch.equal(mine.fitted.samples, torch.cat([digests(X), digests(NEW)]).sort().values)
    mine.save(path)
    loaded = Monitor.load(path, mine.model)
    assert torch.equal(loaded.fitted.samples, mine.fitted.samples)
    for part in (X[::2], NEW.flip(0)):
        with pytest.raises(MergeError, match="would count twice"):
            loaded.update([part], progress=False)


def test_files_without_digests_are_read(tmp_path: Path) -> None:
    fitted([X]).save(tmp_path / "m.scod", sketch=False)
    assert "samples" not in artifact.read(tmp_path / "m.scod", "monitor")[1]
    assert Monitor.load(tmp_path / "m.scod", monitor().model).fitted.samples is None
    fitted([X]).save(tmp_path / "m.scod")
    header, tensors = artifact.read(tmp_path / "m.scod", "monitor")
    del tensors["samples"], header["form"], header["format"], header["kind"]
    artifact.write(tmp_path / "old.scod", "monitor", header, tensors)
    old = Monitor.load(tmp_path / "old.scod", monitor().model)
    assert old.fitted.samples is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        old.calibrate([X], progress=False)
    with pytest.warns(RepeatedDataWarning, match="nobody can tell"):
        old.update([X[:16]], progress=False)
    assert old.fitted.samples is None


def test_skipped_samples_were_not_fitted() -> None:
    bad = X.clone()
    bad[22:, 0] = float("nan")
    mine = monitor().fit([bad[:20], bad[20:]], progress=False, on_bad="skip")
    assert torch.equal(mine.fitted.samples, digests(bad[:22]).sort().values)
    mine.update([X[22:]], progress=False)
    torch.manual_seed(0)
    wide = Monitor(nn.Linear(4, 300), Categorical(), rank=3)
    wide.fit([bad], progress=False, on_bad="skip", products=True)
    assert torch.equal(wide.fitted.samples, digests(bad[:22]).sort().values)


def test_a_fit_that_was_killed_and_went_on_knows_all_its_samples(tmp_path: Path) -> None:
    program = f"""
        import os, sys
        sys.path[:0] = {sys.path!r}
        from test_seen_before import loader, monitor, X
        def batches():
            for number, batch in enumerate(loader(X)):
                if number == 3:
                    os.kill(os.getpid(), 9)
                yield batch
        monitor().fit(batches(), progress=False, checkpoint={str(tmp_path / "fit")!r}, every=1)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert killed.returncode == -9
    assert len(artifact.read(tmp_path / "fit", "checkpoint")[1]["samples"]) == 24
    mine = monitor().fit(
        (batch for batch in loader(X)), progress=False, checkpoint=tmp_path / "fit"
    )
    assert torch.equal(mine.fitted.samples, digests(X).sort().values)


def test_a_sharded_monitor_knows_its_samples(path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    parts = ShardedMonitor(model, Categorical(), rank=4).fit(X.split(9), progress=False)
    parts.save(path)
    whole = Monitor.load(path, model)
    with pytest.raises(MergeError, match="would count twice"):
        whole.update([X[3:20]], progress=False)


def fit_together(rank: int, count: int, folder: Path) -> None:
    own = X.split(16)[rank] if rank < 2 else []
    mine = fitted(list(own.split(5)) if rank < 2 else [])
    assert torch.equal(mine.fitted.samples, digests(X).sort().values)
    mine.save(folder / f"m.{rank}")
    with pytest.raises(MergeError, match="would count twice"):
        mine.update([X[4:20]] if rank == 0 else [data(9, rank)], progress=False)
    with pytest.raises(MismatchError, match="16 of 16 samples of process 1 were in others"):
        fitted([X[:16].flip(0)] if rank == 1 else ([X[:20]] if rank == 0 else []))


@pytest.mark.slow
def test_processes_know_each_others_samples(tmp_path: Path) -> None:
    run(3, fit_together, tmp_path)
    loaded = Monitor.load(tmp_path / "m.2", monitor().model)
    with pytest.raises(MergeError, match="would count twice"):
        loaded.update([X.flip(0)], progress=False)


# -- data that repeats itself ----------------------------------------------------------------


def test_the_same_data_is_known_again_even_if_its_samples_repeat() -> None:
    twice = X.repeat(2, 1)
    coarse = torch.cat([X, X[:20], X[:9]])
    for same in (twice, coarse, X[:16].repeat(7, 1)):
        again = seen_again(digests(same), digests(same.flip(0)))
        assert again is not None
        assert again.certain
        with pytest.raises(MergeError, match="would count twice"):
            fitted([same]).merge(fitted([same.flip(0)]))
    assert seen_again(digests(twice), digests(torch.cat([X[:16], X[:16]]))).certain
    for few in (X[:1], X[:3], torch.zeros(9, X.shape[1])):  # may be so by chance
        with pytest.warns(RepeatedDataWarning, match="like some in the fit"):
            fitted([few]).merge(fitted([few.flip(0)]))


def test_changed_data_in_the_middle_of_a_resumed_fit_is_noticed(tmp_path: Path) -> None:
    items = torch.randn(64, X.shape[1], generator=torch.Generator().manual_seed(3))
    options = {"checkpoint": tmp_path / "fit.ckpt", "progress": False}
    monitor().fit(DataLoader(TensorDataset(items), batch_size=4), **options)
    changed = items.clone()
    changed[8:40] += 1.0
    with pytest.raises(MismatchError, match="other batches"):
        monitor().fit(DataLoader(TensorDataset(changed), batch_size=4), **options)
