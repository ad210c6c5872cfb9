"""Files whose digest is right and whose contents are not: refused, or without effect."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crafted import INF, NAN, Change, add, craft, drop, put, turn, without
from scodkit import Categorical, Monitor, predicted_class
from scodkit.errors import ArtifactError, OptionError
from scodkit.sketch import Exact, FrequentDirections, Nystrom, TwoSided
from small_monitors import data, network

SKETCHES = {
    "nystrom": Nystrom(size=10),
    "two_sided": TwoSided(size=31),
    "directions": FrequentDirections(),
    "rows": Exact(),
    "groups": Nystrom(),
    "half": Nystrom(),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    for name, sketch in SKETCHES.items():
        monitor = Monitor(network(), Categorical(), rank=5, sketch=sketch)
        monitor.fit([data(8 if name == "rows" else 30)], progress=False)
        if name == "half":
            monitor.compress()
        by = predicted_class if name == "groups" else None
        monitor.calibrate([data(20, 5)], by=by, progress=False)
        monitor.save(folder / name)
    return folder


def answers(path: Path) -> list[Tensor]:
    """Return all that a monitor from a file says of a few inputs, after an update as well."""
    by = predicted_class if path.name == "groups" else None
    monitor = Monitor.load(path, network(), by=by)
    found = monitor(data(6, 1))
    assert found.p_value is not None
    said = [found.score, found.p_value]
    if monitor.basis.certified:
        said += [monitor.certify(data(6, 1)).lower, monitor.certify(data(6, 1)).upper]
    monitor.update([data(4, 2)], progress=False)
    return [*said, monitor.score(data(6, 1))]


def copied(originals: Path, name: str, folder: Path) -> Path:
    return Path(shutil.copy(originals / name, folder / name))


NEEDED = (
    "format", "kind", "scodkit_version", "torch_version", "likelihood", "sketch", "rank",
    "prior_scale", "functions", "parameters", "fingerprints", "output_shape", "skipped",
    "basis",
)  # fmt: skip
BASIS = (
    "num_data", "trace", "certified", "residual_norm", "residual_rank", "slack", "clamped",
)  # fmt: skip
STATE = ("num_parameters", "columns", "num_data", "num_rows", "num_updates", "numbers")


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def reorder(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    header["parameters"] = dict(reversed(header["parameters"].items()))


def in_floats(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    shapes = header["parameters"]
    header["parameters"] = {name: [float(n) for n in shape] for name, shape in shapes.items()}


def negative(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    shapes = header["parameters"]
    header["parameters"] = {name: [-n for n in shape] for name, shape in shapes.items()}


def blank(vectors: Tensor) -> Tensor:
    vectors[:, 2] = 0
    return vectors


CHANGES: dict[str, Change] = {
    **{f"no {key}": drop(key) for key in NEEDED},
    **{f"{key} is a list in a list": put(key, [[]]) for key in NEEDED},
    **{f"no basis {key}": drop(f"basis.{key}") for key in BASIS},
    **{f"basis {key} is text": put(f"basis.{key}", "1") for key in BASIS},
    **{f"no state {key}": drop(f"state.{key}") for key in STATE},
    **{f"state {key} is true": put(f"state.{key}", True) for key in STATE},
    "format is true": put("format", True),
    "format is 1.0": put("format", 1.0),
    "format is text": put("format", "1"),
    "rank 0": put("rank", 0),
    "rank true": put("rank", True),
    "rank 5.0": put("rank", 5.0),
    "rank below the values": put("rank", 3),
    "rank above the sketch": put("rank", 11),
    "rank of 100 digits": put("rank", 10**100),
    "prior 0": put("prior_scale", 0),
    "prior below 0": put("prior_scale", -1.0),
    "prior NaN": put("prior_scale", NAN),
    "prior infinite": put("prior_scale", INF),
    "prior true": put("prior_scale", True),
    "prior of 1000 digits": put("prior_scale", 10**1000),
    "no data": put("basis.num_data", 0),
    "data below 0": put("basis.num_data", -5),
    "infinite data": put("basis.num_data", INF),
    "data true": put("basis.num_data", True),
    "data and a half": put("basis.num_data", 30.5),
    "other data than the sketch": put("basis.num_data", 31),
    "trace below 0": put("basis.trace", -1.0),
    "trace NaN": put("basis.trace", NAN),
    "other trace than the sketch": put("basis.trace", 0.5),
    "residual below 0": put("basis.residual_norm", -0.1),
    "slack below 0": put("basis.slack", -0.1),
    "certified 1": put("basis.certified", 1),
    "more in the basis": put("basis.offloaded", True),
    "skipped below 0": put("skipped", -1),
    "parameters in another order": reorder,
    "shapes in floats": in_floats,
    "shapes below 0": negative,
    "a parameter more": put("parameters.more", [3]),
    "no parameter": put("parameters", {}),
    "likelihood without type": drop("likelihood.type"),
    "likelihood of no type": put("likelihood.type", 3),
    "likelihood nobody knows": put("likelihood.type", "os.system"),
    "likelihood is a sketch": put("likelihood", {"type": "Exact"}),
    "likelihood with more": put("likelihood.more", 1),
    "likelihood with less": drop("likelihood.directions"),
    "directions are text": put("likelihood.directions", "2"),
    "directions are an object": put("likelihood.directions", {"type": "Exact"}),
    "directions true": put("likelihood.directions", True),
    "no direction": put("likelihood.directions", 0),
    "sketch is a likelihood": put("sketch", {"type": "Bernoulli"}),
    "sketch with more": put("sketch.more", 1),
    "sketch of size text": put("sketch.size", "10"),
    "sketch of size below 0": put("sketch.size", -10),
    "sketch of a size above": put("sketch.size", 12),
    "sketch with no map": put("sketch.map", None),
    "sketch with a likelihood as map": put("sketch.map", {"type": "Bernoulli"}),
    "sketch with a map of text": put("sketch.map.nonzeros", "8"),
    "sketch with a map of nothing": put("sketch.map.nonzeros", 0),
    "sketch with half a seed": put("sketch.seed", 0.5),
    "another kind of sketch": put("sketch", {"type": "Exact"}),
    "functions with more": put("functions.more", False),
    "functions with less": drop("functions.task"),
    "a function is 0": put("functions.task", 0),
    "fingerprints with more": put("fingerprints.more", ""),
    "fingerprint of no text": put("fingerprints.model", 3),
    "output of text": put("output_shape", "4"),
    "output of floats": put("output_shape", [4.0]),
    "output below 0": put("output_shape", [-4]),
    "notes in a list": put("notes", ["fit"]),
    "notes that are deep": put("notes.deep", nested(300)),
    "state of other weights": put("state.num_parameters", 43),
    "state of no columns": put("state.columns", 0),
    "state of other columns": put("state.columns", 12),
    "state of other data": put("state.num_data", 29),
    "state with text": put("state.numbers.filled", "all"),
    "state estimated beyond its data": put("state.numbers.estimated", 31),
    "state estimated, yet certified": put("state.numbers.estimated", 3),
    "state is a list": put("state", []),
    "a part of the weights": put("shard", {"index": 0, "count": 1, "start": 0, "stop": 44}),
    "a part beyond the weights": put("shard", {"index": 0, "count": 1, "start": 0, "stop": 99}),
    "a part backwards": put("shard", {"index": 0, "count": 1, "start": 9, "stop": 0}),
    "an engine of no name": put("engine", 3),
    "an engine": put("engine", "hooks"),
    "exempt buffers are a number": put("exempt", 5),
    "exempt buffers of no text": put("exempt", [[]]),
    "probes in a list": put("probes", []),
    "a range of text": put("input_range", "0 to 1"),
    "a range backwards": put("input_range", {"0": [1.0, 0.0]}),
    "a range of three": put("input_range", {"0": [0.0, 1.0, 2.0]}),
    "a range without end": put("input_range", {"0": [0.0, float("inf")]}),
    "what nobody reads": put("colour", "blue"),
    "values NaN": turn("values", lambda t: t * NAN),
    "values infinite": turn("values", lambda t: t * INF),
    "values below 0": turn("values", lambda t: -t),
    "values ascending": turn("values", lambda t: t.flip(0)),
    "values whole": turn("values", lambda t: (1000 * t).long()),
    "values in half": turn("values", torch.Tensor.half),
    "values complex": turn("values", lambda t: t.to(torch.complex64)),
    "values in a table": turn("values", lambda t: t[None]),
    "values shorter": turn("values", lambda t: t[:3]),
    "value alone": turn("values", lambda t: t[0]),
    "no values": without("values"),
    "vectors times 3": turn("vectors", lambda t: 3 * t),
    "vectors times 1.01": turn("vectors", lambda t: 1.01 * t),
    "vectors NaN": turn("vectors", lambda t: t * NAN),
    "vectors in bytes": turn("vectors", lambda t: t.to(torch.uint8)),
    "vectors in half, yet certified": turn("vectors", torch.Tensor.half),
    "vectors twice as long": turn("vectors", lambda t: torch.cat([t, t])),
    "vectors on their side": turn("vectors", lambda t: t.T),
    "vectors flat": turn("vectors", torch.Tensor.flatten),
    "vectors fewer": turn("vectors", lambda t: t[:, :3]),
    "vectors with a blank one": turn("vectors", blank),
    "vectors with one twice": turn("vectors", lambda t: t[:, [0, 1, 2, 3, 3]]),
    "no vectors": without("vectors"),
    "a tensor more": add("more", torch.ones(3)),
    "probes": add("probe.inputs", torch.ones(3)),
    "columns of no data": turn("columns.0:3", lambda t: 0 * t),
    "columns NaN": turn("columns.0:3", lambda t: t * NAN),
    "columns backwards": turn("columns.0:3", lambda t: t[[0, 1, 2, 4, 3]]),
    "columns below no spread": turn("columns.0:3", lambda t: -t),
    "columns in float32": turn("columns.0:3", Tensor.float),
    "columns of another width": add("columns.0:2", torch.ones(5, 3).double()),
    "samples": add("samples", torch.arange(3)),
    "samples in floats": add("samples", torch.ones(3)),
    "no sketch": without("sketch.y"),
    "sketch NaN": turn("sketch.y", lambda t: t * NAN),
    "sketch whole": turn("sketch.y", torch.Tensor.long),
    "sketch in half": turn("sketch.y", torch.Tensor.half),
    "sketch shorter": turn("sketch.y", lambda t: t[1:]),
    "sketch narrower": turn("sketch.y", lambda t: t[:, 1:]),
    "sketch with a tensor more": add("sketch.more", torch.ones(3)),
    "no norm": without("sketch.squared_norm"),
    "norm below 0": turn("sketch.squared_norm", lambda t: -t),
    "norm in a list": turn("sketch.squared_norm", lambda t: t[None]),
    "norm in float32": turn("sketch.squared_norm", torch.Tensor.float),
    "another norm": turn("sketch.squared_norm", lambda t: 2 * t),
    "held-out scores NaN": turn("calibration", lambda t: t * NAN),
    "held-out scores infinite": turn("calibration", lambda t: t / 0),
    "held-out scores whole": turn("calibration", torch.Tensor.long),
    "held-out scores in a table": turn("calibration", lambda t: t[None]),
    "held-out scores of none": turn("calibration", lambda t: t[:0]),
    "held-out scores in another order": turn("calibration", lambda t: t.flip(0)),
    "groups out of nowhere": add("calibration_groups", torch.arange(7)),
}  # fmt: skip

# of other monitors than the usual one
OTHERS: dict[str, tuple[str, Change]] = {
    "indefinite, yet certified": ("two_sided", put("basis.certified", True)),
    "other halves": ("two_sided", turn("sketch.w", lambda t: t[:, 1:])),
    "filled beyond its end": ("directions", put("state.numbers.filled", 10**6)),
    "filled by half": ("directions", put("state.numbers.filled", 1.5)),
    "filled below 0": ("directions", put("state.numbers.filled", -1)),
    "keeps nothing": ("directions", put("state.numbers.kept", 0)),
    "keeps everything": ("directions", put("state.numbers.kept", 128)),
    "loses nothing known": ("directions", drop("state.numbers.delta")),
    "loses less than nothing": ("directions", put("state.numbers.delta", -1.0)),
    "buffer on its side": ("directions", turn("sketch.buffer", lambda t: t.T)),
    "rows beyond their end": ("rows", put("state.numbers.filled", 10**6)),
    "rows uncounted": ("rows", drop("state.numbers.filled")),
    "rows of other weights": ("rows", turn("sketch.rows", lambda t: t[:, 1:])),
    "rows in one number": ("rows", turn("sketch.rows", lambda t: t[0, 0])),
    "groups in floats": ("groups", turn("calibration_groups", torch.Tensor.double)),
    "groups of fewer": ("groups", turn("calibration_groups", lambda t: t[1:])),
    "groups alone": ("groups", without("calibration")),
    "half times 2": ("half", turn("vectors", lambda t: 2 * t)),
    "half, yet certified": ("half", put("basis.certified", True)),
}

HARMLESS = {
    "notes that are deep",
    "what nobody reads",
    "probes",
    "samples",
    "held-out scores in another order",
}
CASES = {name: ("nystrom", change) for name, change in CHANGES.items()} | OTHERS


@pytest.mark.parametrize("name", CASES)
def test_a_crafted_monitor_is_refused_or_harmless(
    name: str, originals: Path, tmp_path: Path
) -> None:
    which, change = CASES[name]
    path = copied(originals, which, tmp_path)
    craft(path, change)
    if name not in HARMLESS:
        # that one may be somebody's own, to be passed again
        error = OptionError if name == "likelihood nobody knows" else ArtifactError
        with pytest.raises(error):
            answers(path)
        return
    for found, wanted in zip(answers(path), answers(originals / which), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", SKETCHES)
def test_an_honest_file_is_taken(name: str, originals: Path, tmp_path: Path) -> None:
    path = copied(originals, name, tmp_path)
    craft(path, lambda header, tensors: None)
    assert all(map(torch.equal, answers(path), answers(originals / name)))


def split(originals: Path, folder: Path) -> list[Path]:
    """Cut a monitor into two parts of its weights, as two processes save it."""
    parts = [folder / f"nystrom.{index}-of-2" for index in range(2)]
    for index, path in enumerate(parts):
        shutil.copy(originals / "nystrom", path)
        start, stop = (0, 15) if index == 0 else (15, 44)

        def cut(
            header: dict[str, Any],
            tensors: dict[str, Tensor],
            shard: tuple[int, int, int] = (index, start, stop),
        ) -> None:
            index, start, stop = shard
            header["shard"] = {"index": index, "count": 2, "start": start, "stop": stop}
            for name in ("vectors", "sketch.y"):
                tensors[name] = tensors[name][start:stop].contiguous()

        craft(path, cut)
    return parts


SHARDS: dict[str, Change] = {
    "another place": put("shard.start", 14),
    "the same place": put("shard.index", 0),
    "no place": drop("shard"),
    "a place below 0": put("shard.start", -1),
    "other values": turn("values", lambda t: t / 2),
    "other held-out scores": turn("calibration", lambda t: t / 2),
    "vectors turned round": turn("vectors", lambda t: t.flip(1)),
    "vectors times 3": turn("vectors", lambda t: 3 * t),
    "fewer rows": turn("sketch.y", lambda t: t[1:]),
    "no held-out scores": without("calibration"),
    "another prior": put("prior_scale", 2.0),
}


@pytest.mark.parametrize("name", ["nothing", *SHARDS])
def test_crafted_parts_of_a_monitor_are_refused(
    name: str, originals: Path, tmp_path: Path
) -> None:
    parts = split(originals, tmp_path)
    if name == "nothing":
        found, wanted = answers(tmp_path / "nystrom"), answers(originals / "nystrom")
        assert all(map(torch.equal, found, wanted))
        return
    craft(parts[1], SHARDS[name])
    with pytest.raises(ArtifactError):
        answers(tmp_path / "nystrom")
