"""Monitors whose weights processes divide: the same scores, files for any number of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from scodkit import Categorical, Gaussian, Monitor, MonteCarlo
from scodkit.errors import (
    BatchError,
    MergeError,
    MismatchError,
    NonFiniteError,
    NotFittedError,
    OptionError,
    ParameterSelectionError,
    ProcessError,
)
from scodkit.sharded import ShardedMonitor
from scodkit.sketch import Exact, FrequentDirections, Nystrom, Sketch, TwoSided
from together import digits, run

pytestmark = pytest.mark.slow

SKETCHES = {"nystrom": Nystrom(size=24), "two_sided": TwoSided(size=31)}


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 9), nn.Tanh(),
            nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3),
        ).double()  # fmt: skip


def sharded(sketch: Sketch = SKETCHES["nystrom"], **options) -> ShardedMonitor:
    return ShardedMonitor(network(), Categorical(), 10, sketch=sketch, **options)


def whole(sketch: Sketch = SKETCHES["nystrom"]) -> Monitor:
    monitor = Monitor(network(), Categorical(), 10, sketch=sketch)
    return monitor.fit(digits().split(9), progress=False)


def fit_and_save(rank: int, count: int, folder: Path) -> None:
    for name, sketch in SKETCHES.items():
        own = sharded(sketch)
        # processes of other memory form pieces of other sizes, if they do not agree on one
        own.memory_budget = 20_000 if rank else 2**30
        own.fit(digits().split(9), progress=False)
        alone = Monitor(network(), Categorical(), 10, sketch=sketch)
        alone.fit(digits().split(9), progress=False, together=False)
        assert len(own.basis.vectors) < 0.8 * len(alone.basis.vectors)
        expected, x = alone.score(digits(5, 3)), digits(5, 3)
        assert torch.allclose(own.score(x), expected, rtol=1e-6)
        assert own.basis.trace == pytest.approx(alone.basis.trace)
        if alone.basis.certified:
            lower = alone.certify(x).lower
            assert torch.allclose(own.certify(x).lower, lower, rtol=1e-5)
        own.save(folder / f"{name}.scod")
        again = ShardedMonitor.load(folder / f"{name}.scod", own._network.model)
        assert torch.allclose(again.score(x), expected, rtol=1e-6)
    (folder / f"done.{rank}").touch()


def load_elsewhere(rank: int, count: int, folder: Path) -> None:
    for name in SKETCHES:
        own = ShardedMonitor.load(folder / f"{name}.scod", network())
        alone = Monitor.load(folder / f"{name}.scod", network())
        assert len(own.basis.vectors) < len(alone.basis.vectors)
        x = digits(5, 3)
        assert torch.allclose(own.score(x), alone.score(x), rtol=1e-9)
        own.save(folder / f"again.{name}.scod")
        # over files of more processes, and of one
        own.save(folder / f"{name}.scod")
        if rank == 0:
            alone.save(folder / f"one.{name}.scod")
        distributed.barrier()
        own.save(folder / f"one.{name}.scod")
    (folder / f"loaded.{rank}").touch()


def test_three_processes_score_as_one_and_others_load_their_files(tmp_path: Path) -> None:
    run(3, fit_and_save, tmp_path)
    assert len(list(tmp_path.glob("done.*"))) == 3
    (tmp_path / "meeting").unlink(missing_ok=True)
    run(2, load_elsewhere, tmp_path)
    assert len(list(tmp_path.glob("loaded.*"))) == 2
    x = digits(5, 3)
    for name, sketch in SKETCHES.items():
        expected = whole(sketch)
        for begin in ("", "again.", "one."):
            found = Monitor.load(tmp_path / f"{begin}{name}.scod", network())
            assert torch.allclose(found.score(x), expected.score(x), rtol=1e-6)
            more = digits(9, 8)
            found.update([more], progress=False)
            both = whole(sketch).update([more], progress=False)
            assert torch.allclose(found.score(x), both.score(x), rtol=1e-6)
    missing_or_mixed_files_are_refused(tmp_path)


def missing_or_mixed_files_are_refused(folder: Path) -> None:
    with pytest.raises(MismatchError, match="a part of its weights"):
        Monitor.load(folder / "nystrom.scod.1-of-2", network())
    second = folder / "nystrom.scod.1-of-2"
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(MismatchError, match=r"expected 2 files nystrom\.scod\.0-of-2"):
        Monitor.load(folder / "nystrom.scod", network())
    second.write_bytes((folder / "two_sided.scod.1-of-2").read_bytes())
    with pytest.raises(MismatchError, match="parts of several"):
        Monitor.load(folder / "nystrom.scod", network())
    second.write_bytes(kept)
    with pytest.raises(MismatchError, match="weights"):
        Monitor.load(folder / "nystrom.scod", network(seed=1))
    stray = folder / "nystrom.scod.1-of-3"
    stray.write_bytes(kept)
    with pytest.raises(MismatchError, match="and no others"):
        Monitor.load(folder / "nystrom.scod", network())
    (folder / "nystrom.scod.v2.0-of-2").touch()  # of somebody else
    whole().save(folder / "nystrom.scod")
    assert (folder / "nystrom.scod.v2.0-of-2").exists()
    assert not stray.exists()
    assert not second.exists()
    Monitor.load(folder / "nystrom.scod", network())
    second.write_bytes(kept)
    with pytest.raises(MismatchError, match="a whole one and 1 parts"):
        Monitor.load(folder / "nystrom.scod", network())


def breaking(batch: torch.Tensor, rank: int):
    yield batch
    if rank:
        raise OSError("no such luck")
    yield batch


def load_what_cannot_be_divided(rank: int, count: int, folder: Path) -> None:
    alone = Monitor(network(), Categorical(), 10, sketch=FrequentDirections(size=20))
    alone.fit([digits()], progress=False, together=False)
    if rank == 0:
        alone.save(folder / "whole.scod")
    distributed.barrier()
    own = ShardedMonitor.load(folder / "whole.scod", network())
    x = digits(5, 3)
    assert torch.allclose(own.score(x), alone.score(x), rtol=1e-9)
    own.save(folder / "parts.scod")
    again = Monitor.load(folder / "parts.scod", network())
    assert torch.allclose(again.score(x), alone.score(x), rtol=1e-9)
    with pytest.raises((MergeError, ProcessError), match="saved without"):
        again.update([digits(9, rank)], progress=False)
    (folder / f"done.{rank}").touch()


def test_of_a_sketch_that_cannot_be_divided_only_the_basis_is(tmp_path: Path) -> None:
    run(2, load_what_cannot_be_divided, tmp_path)
    assert len(list(tmp_path.glob("done.*"))) == 2


def go_wrong(rank: int, count: int, folder: Path) -> None:
    with pytest.raises(MismatchError, match="the same first batch in all processes"):
        sharded().fit([digits(9, rank)], progress=False)
    with pytest.raises(MismatchError, match="the same weights in all processes"):
        ShardedMonitor(network(rank), Categorical(), 5).fit([digits(9)], progress=False)
    with pytest.raises(MismatchError, match="the same batch in all processes"):
        sharded().fit([digits(9), digits(9, rank)], progress=False)
    with pytest.raises(MismatchError, match="the same batch in all processes"):
        sharded().fit([digits(9)] * (1 + rank), progress=False)
    with pytest.raises((OSError, ProcessError), match="no such luck"):
        sharded().fit(breaking(digits(9), rank), progress=False)
    bad = digits(9)
    bad[4] = torch.nan
    with pytest.raises(NonFiniteError, match="sample 4"):
        sharded().fit([bad], progress=False)
    own = sharded().fit([bad], progress=False, on_bad="skip")
    assert own.basis.num_data == 8
    with pytest.raises((BatchError, ProcessError), match="got"):
        own.score(bad if rank else "nothing")
    assert own.score(bad).isinf().tolist() == [i == 4 for i in range(9)]
    with pytest.raises((ParameterSelectionError, ProcessError), match="start fewer processes"):
        sharded(parameters=["0.weight"]).fit([digits(9)], progress=False)
    with pytest.raises(OptionError, match="type sketch=Nystrom"):
        sharded(Exact()).fit([digits(9)], progress=False)
    (folder / f"done.{rank}").touch()


def test_what_goes_wrong_goes_wrong_in_all(tmp_path: Path) -> None:
    run(2, go_wrong, tmp_path)
    assert len(list(tmp_path.glob("done.*"))) == 2


def test_alone_it_is_a_monitor(path: Path) -> None:
    own = sharded()
    with pytest.raises(NotFittedError):
        own.score(digits(2))
    own.fit(digits().split(9), progress=False)
    x = digits(5, 3)
    assert torch.allclose(own.score(x), whole().score(x), rtol=1e-9)
    assert own.score(x[:0]).shape == own.certify(x[:0]).upper.shape == (0,)
    own.save(path)
    assert torch.allclose(Monitor.load(path, network()).score(x), own.score(x))
    with pytest.raises(BatchError, match="expected samples in the first batch"):
        own.fit([x[:0], x], progress=False)


def test_it_is_not_saved_once_the_weights_have_changed(tmp_path: Path) -> None:
    own = sharded()
    with pytest.raises(NotFittedError):
        own.save(tmp_path / "m.scod")
    own.fit([digits(9)], progress=False)
    with torch.no_grad():
        own._network.model[0].weight.add_(1)
    with pytest.raises(MismatchError, match="weights"):
        own.save(tmp_path / "m.scod")
    assert not list(tmp_path.iterdir())


def drawn(output: torch.Tensor) -> torch.distributions.Distribution:
    return torch.distributions.Categorical(logits=output)


def test_a_likelihood_that_draws_is_given_again(path: Path) -> None:
    likelihood = MonteCarlo(drawn, samples=2)
    own = ShardedMonitor(network(), likelihood, 5).fit([digits(9)], progress=False)
    own.save(path)
    found = ShardedMonitor.load(path, network(), likelihood=likelihood)
    assert torch.equal(found.score(digits(4)), own.score(digits(4)))


def late_group(rank: int, count: int, folder: Path) -> None:
    distributed.destroy_process_group()
    own = sharded()
    meeting = f"file://{folder}/again"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    own.fit(digits().split(9), progress=False)
    assert len(own.basis.vectors) < 0.8 * own._ready().parameters.num_parameters
    own.save(folder / "m.scod")
    part = ShardedMonitor.load(folder / "m.scod", network())
    assert part.basis.vectors.untyped_storage().nbytes() == part.basis.vectors.nbytes
    distributed.barrier()
    alone = Monitor(network(), Categorical(), 10, sketch=SKETCHES["nystrom"])
    alone.fit(digits().split(9), progress=False, together=False)
    if rank == 0:
        alone.save(folder / "whole.scod")
    distributed.barrier()
    part = ShardedMonitor.load(folder / "whole.scod", network())
    assert part.basis.vectors.untyped_storage().nbytes() == part.basis.vectors.nbytes
    (folder / f"done.{rank}").touch()


def test_a_group_may_come_after_the_monitor_is_made(tmp_path: Path) -> None:
    run(2, late_group, tmp_path)
    assert len(list(tmp_path.glob("done.*"))) == 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_weights_are_divided_evenly_and_without_gaps(count: int) -> None:
    monitor = Monitor(network(), Gaussian(), 3).fit([digits(4)], progress=False)
    parameters = monitor.fitted.parameters
    parts = [parameters.divided(index, count) for index in range(count)]
    assert [n for names, _ in parts for n in names] == list(parameters.names)
    edges = [edge for _, held in parts for edge in (held.start, held.stop)]
    assert (edges[0], edges[-1]) == (0, parameters.num_parameters)
    assert edges[1:-1:2] == edges[2::2]
