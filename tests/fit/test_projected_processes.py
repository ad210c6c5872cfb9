"""Projected weights in process groups: one process learns, all use what it has learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from scodkit import Categorical, Monitor, Projected
from scodkit.errors import OptionError
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


def shard(rank: int, count: int, folder: Path) -> None:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    with pytest.raises(OptionError, match="get_model_state_dict"):
        Monitor(model, Categorical(), 8, parameters=Projected(rank=4))
    # as the error says
    whole = network()
    for parameter in whole.parameters():
        nn.init.zeros_(parameter)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        torch.save(state, folder / "state")
    torch.distributed.barrier()
    whole.load_state_dict(torch.load(folder / "state"))
    own = Monitor(whole, Categorical(), 8, parameters=Projected(rank=4))
    own.fit(batches(count, rank), progress=False).save(folder / f"fsdp.{rank}")


def test_sharded_models_are_refused_and_the_advice_works(tmp_path: Path) -> None:
    run(2, shard, tmp_path)
    loaded = [Monitor.load(tmp_path / f"fsdp.{rank}", network()) for rank in range(2)]
    scores = [own.score(data(9, seed=1)) for own in loaded]
    torch.testing.assert_close(*scores)
