"""Projected weights in process groups: one process learns, all use what it has learnt."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from scodkit import Categorical, Monitor, Projected, unsharded
from scodkit.errors import EngineFallbackWarning, OptionError
from scodkit.sketch import Exact, FrequentDirections, Nystrom, Sketch
from together import run

pytestmark = pytest.mark.slow

SKETCHES: dict[str, Sketch] = {
    "nystrom": Nystrom(size=30),
    "frequent_directions": FrequentDirections(size=30),
    "exact": Exact(),
}
# samples of each process: uneven, and the first one without any
UNEVEN = {2: (44, 16), 3: (0, 40, 20)}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 18), nn.Tanh(), nn.Linear(18, 4)]
    return nn.Sequential(*layers).double()


def data(size: int = 60, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 12, generator=generator, dtype=torch.float64)


def monitor(sketch: Sketch, projected: Projected) -> Monitor:
    return Monitor(network(), Categorical(), 8, sketch=sketch, parameters=projected)


def batches(count: int, rank: int) -> list[Tensor]:
    own = data().split(list(UNEVEN[count]))[rank]
    return list(own.split(7)) if len(own) else []


def fit_parts(rank: int, count: int, folder: Path) -> None:
    for name, sketch in SKETCHES.items():
        own = monitor(sketch, Projected(rank=4, samples=20))
        own.fit(batches(count, rank), progress=False).save(folder / f"{name}.{rank}")


@pytest.mark.parametrize("count", [2, 3])
def test_processes_share_what_one_has_learnt(count: int, tmp_path: Path) -> None:
    run(count, fit_parts, tmp_path)
    new = data(9, seed=1)
    for name, sketch in SKETCHES.items():
        model = network()
        found = [Monitor.load(tmp_path / f"{name}.{rank}", model) for rank in range(count)]
        given = Projected(given=found[0].projections)
        alone = monitor(sketch, given).fit(list(data().split(7)), progress=False)
        for own in found:
            assert own.projections == alone.projections
            assert own.basis.trace == pytest.approx(alone.basis.trace, rel=1e-12)
            assert own.basis.inside == pytest.approx(alone.basis.inside, rel=1e-12)
            if sketch.linear:
                torch.testing.assert_close(own.score(new), alone.score(new), rtol=1e-7, atol=0)
        first = next(rank for rank in range(count) if UNEVEN[count][rank])
        learnt = monitor(sketch, Projected(rank=4, samples=20))
        learnt.fit(batches(count, first), progress=False)
        assert learnt.projections == found[0].projections


def sharded() -> nn.Module:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def in_fsdp(rank: int, count: int, folder: Path) -> None:
    model = sharded()
    before = {name: type(p).__name__ for name, p in model.named_parameters()}
    with pytest.raises(OptionError, match=r"with scodkit\.unsharded"):
        Monitor(model, Categorical(), 8, parameters=Projected(rank=4))
    found = {}
    for name, chosen in (("projected", Projected(rank=4, samples=20)), ("all", "all")):
        with unsharded(model) as whole, warnings.catch_warnings():
            warnings.simplefilter("error", EngineFallbackWarning)
            own = Monitor(whole, Categorical(), 8, sketch=Exact(), parameters=chosen)
            own.fit(batches(count, rank), progress=False)
            # each process may now do as it likes, and as often
            own.calibrate([data(30 + rank, seed=2)], progress=False)
            for _ in range(rank):
                own.score(data(rank, seed=3))
            own.save(folder / f"{name}.{rank}")
            loaded = Monitor.load(folder / f"{name}.{rank}", whole)
            found[name] = (own.score(data(9, seed=1)), loaded(data(9, seed=1)).p_value)
        assert before == {name: type(p).__name__ for name, p in model.named_parameters()}
        assert set(before.values()) == {"DTensor"}
        with pytest.raises(OptionError, match="sharded over several"):
            own.score(data(9, seed=1))
        with unsharded(model):
            torch.testing.assert_close(own.score(data(9, seed=1)), found[name][0])
    torch.save(found, folder / f"found.{rank}")
    # training goes on as before
    model(data(4 + rank)).sum().backward()
    alone = network()
    alone(torch.cat([data(4), data(5)])).sum().backward()
    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert parameter.grad is not None
        whole_grad = parameter.grad.full_tensor() * count  # type: ignore[attr-defined]
        torch.testing.assert_close(whole_grad, other.grad)
    with pytest.raises(OptionError, match=r"leave out unsharded"), unsharded(network()):
        pass


def test_models_of_fsdp_do_what_whole_ones_do(tmp_path: Path) -> None:
    run(2, in_fsdp, tmp_path)
    for name in ("projected", "all"):
        model = network()
        loaded = [Monitor.load(tmp_path / f"{name}.{rank}", model) for rank in range(2)]
        given = Projected(given=loaded[0].projections) if name == "projected" else "all"
        merged = Monitor(model, Categorical(), 8, sketch=Exact(), parameters=given)
        merged.fit(list(data().split(7)), progress=False)
        for rank, own in enumerate(loaded):
            score, p_value = torch.load(tmp_path / f"found.{rank}")[name]
            assert own.basis.trace == pytest.approx(merged.basis.trace, rel=1e-12)
            torch.testing.assert_close(own.basis.values, merged.basis.values)
            torch.testing.assert_close(score, merged.score(data(9, seed=1)))
            torch.testing.assert_close(own.score(data(9, seed=1)), score)
            merged.calibrate([data(30 + rank, seed=2)], progress=False)
            torch.testing.assert_close(p_value, merged(data(9, seed=1)).p_value)
        if name == "projected":
            learnt = Monitor(model, Categorical(), 8, parameters=Projected(rank=4, samples=20))
            learnt.fit(batches(2, 0), progress=False)
            assert learnt.projections == loaded[0].projections == loaded[1].projections


def parallel(rank: int, count: int, folder: Path) -> None:
    model = network()
    mesh = init_device_mesh("cpu", (count,))
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    with pytest.raises(OptionError, match="get_model_state_dict"):
        Monitor(model, Categorical(), 8)


def test_tensor_parallel_models_are_refused(tmp_path: Path) -> None:
    run(2, parallel, tmp_path)
