"""Files whose digest is right and whose contents are not: refused, or without effect."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import mlp
from crafted import Change, add, craft, drop, put, turn, without
from scodkit import Categorical, Monitor, artifact, predicted_class
from scodkit.alarms import DriftAlarm, OnlineDiscoveries, RolloutAlarm
from scodkit.baselines import KNN
from scodkit.calibration import Calibration
from scodkit.errors import ArtifactError, CorruptArtifactError, OptionError, ScodError
from scodkit.sketch import Exact, FrequentDirections, Nystrom, TwoSided


def network() -> nn.Module:
    torch.manual_seed(0)
    return mlp(4)


def data(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


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
NAN, INF = float("nan"), float("inf")


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
    "parts of text": put("parts", "all"),
    "parts with less": drop("parts"),
    "parts backwards": put("parts.0.stop", -1),
    "parts from the end": put("parts.0.start", 10**6),
    "parts with more": put("parts.0.more", 1),
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
    "probes in a list": put("probes", []),
    "a range of text": put("input_range", "0 to 1"),
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
    "parts with less",
    "notes that are deep",
    "an engine",
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


def fit(path: Path, batches: list[Tensor]) -> Monitor:
    monitor = Monitor(network(), Categorical(), rank=5, sketch=Nystrom(size=10))
    return monitor.fit(batches, checkpoint=path, every=1, progress=False)


CHECKPOINTS: dict[str, Change] = {
    **{f"no {key}": drop(key) for key in ("state", "identity", "batches", "data_digest")},
    **{f"{key} is true": put(key, True) for key in ("state", "identity", "batches", "samples")},
    "batches below 0": put("batches", -1),
    "half a batch": put("batches", 1.5),
    "fewer samples than in the sketch": put("samples", 3),
    "more skipped than there were": put("skipped", 30),
    "a digest of no text": put("data_digest", 3),
    "another size": put("state.columns", 12),
    "other weights": put("state.num_parameters", 5),
    "a sketch of other weights": turn("state.y", lambda t: t[1:]),
    "a sketch in float64": turn("state.y", torch.Tensor.double),
    "a sketch in half": turn("state.y", torch.Tensor.half),
    "a sketch NaN": turn("state.y", lambda t: t * NAN),
    "no sketch": without("state.y"),
    "no norm": without("state.squared_norm"),
    "a norm below 0": turn("state.squared_norm", lambda t: -t),
    "more": add("more", torch.ones(2)),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_crafted_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    path, batches = tmp_path / "fit.ckpt", [data(6, seed) for seed in range(3)]
    whole = fit(path, batches)
    assert torch.equal(fit(path, batches).basis.vectors, whole.basis.vectors)  # gone on with
    craft(path, CHECKPOINTS[name])
    with pytest.raises(CorruptArtifactError):
        fit(path, batches)


def drift() -> DriftAlarm:
    alarm = DriftAlarm(Calibration(torch.arange(50.0)), false_alarm=0.1, seed=1)
    alarm.push_many(torch.arange(20.0))
    return alarm


def rollout() -> RolloutAlarm:
    alarm = RolloutAlarm([torch.rand(9) for _ in range(30)], 0.1, window=3)
    for score in (0.1, 0.2, 0.3, 0.4):
        alarm.push(score)
    return alarm


def online() -> OnlineDiscoveries:
    alarm = OnlineDiscoveries(0.2, smallest=1e-4)
    for p_value in (0.001, 0.5, 0.9):
        alarm.push(p_value)
    return alarm


ALARMS: dict[str, tuple[Callable[[], Any], Change]] = {
    "rate 0": (drift, put("false_alarm", 0)),
    "rate true": (drift, put("false_alarm", True)),
    "no rate": (drift, drop("false_alarm")),
    "wealth NaN": (drift, put("log_wealth", NAN)),
    "shares of two": (drift, put("_shares", [0.5, 0.5])),
    "shares above all": (drift, put("_shares", [1.0, 1.0, 1.0, 1.0])),
    "shares below 0": (drift, put("_shares", [2.0, -1.0, 0.0, 0.0])),
    "steps beyond": (drift, put("_steps", 21)),
    "alarm beyond": (drift, put("alarmed_at", 21)),
    "seen below 0": (drift, put("num_seen", -1)),
    "more seen than kept": (drift, put("num_seen", 70)),
    "no random numbers": (drift, drop("random")),
    "random text": (drift, put("random.state.state", "1")),
    "random numbers of another kind": (drift, put("random.bit_generator", "MT19937")),
    "random numbers below 0": (drift, put("random.state.inc", -1)),
    "random numbers beyond": (drift, put("random.state.state", 2**128)),
    "scores descending": (drift, turn("scores", lambda t: t.flip(0))),
    "scores NaN": (drift, turn("scores", lambda t: t * NAN)),
    "scores in a table": (drift, turn("scores", lambda t: t[None])),
    "scores in float32": (drift, turn("scores", torch.Tensor.float)),
    "no scores": (drift, without("scores")),
    "window 0": (rollout, put("window", 0)),
    "threshold infinite": (rollout, put("threshold", INF)),
    "threshold of nobody": (rollout, put("threshold", 1e9)),
    "frames below 0": (rollout, put("num_frames", -1)),
    "frames other than the last": (rollout, put("num_frames", 2)),
    "no longest": (rollout, put("_longest", 0)),
    "last NaN": (rollout, turn("last", lambda t: t * NAN)),
    "last below all": (rollout, turn("last", lambda t: t - INF)),
    "statistic NaN": (rollout, turn("statistic", lambda t: t * NAN)),
    "statistic of nothing": (rollout, turn("statistic", lambda t: t - INF)),
    "held-out none": (rollout, turn("held_out", lambda t: t[:0])),
    "held-out NaN": (rollout, turn("held_out", lambda t: t * NAN)),
    "confidence 1": (rollout, put("confidence", 1)),
    "share 1": (online, put("fdr", 1.0)),
    "found more than seen": (online, put("num_found", 4)),
    "seen by half": (online, put("num_seen", 3.5)),
    "smallest 0": (online, put("smallest", 0)),
    "warned by 1": (online, put("_warned", 1)),
    "a tensor more": (online, add("more", torch.ones(2))),
}


@pytest.mark.parametrize("name", ALARMS)
def test_a_crafted_alarm_is_refused(name: str, tmp_path: Path) -> None:
    make, change = ALARMS[name]
    alarm, path = make(), tmp_path / "alarm"
    alarm.save(path)
    type(alarm).load(path)
    craft(path, change)
    with pytest.raises(CorruptArtifactError):
        type(alarm).load(path)


BASELINES: dict[str, Change] = {
    "no options": drop("options"),
    "options of another": put("options.more", 1),
    "options in text": put("options.k", "3"),
    "no likelihood": drop("likelihood"),
    "a sketch as likelihood": put("likelihood", {"type": "Exact"}),
    "fingerprints in numbers": put("fingerprints", [1]),
    "no bank": without("bank"),
    "a bank of NaN": turn("bank", lambda t: t * NAN),
    "more": add("more", torch.ones(2)),
}


@pytest.mark.parametrize("name", BASELINES)
def test_a_crafted_baseline_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "knn"
    KNN(network(), Categorical(), k=3).fit([data(9)], progress=False).save(path)
    KNN.load(path, network())
    craft(path, BASELINES[name])
    with pytest.raises(ScodError):
        KNN.load(path, network())


def written(header: bytes, rest: bytes = b"", length: int | None = None) -> bytes:
    size = len(header) if length is None else length
    return struct.pack("<Q", size) + header + rest


def with_text(text: str) -> bytes:
    return written(json.dumps({"__metadata__": {"scodkit": text}}).encode())


def one_tensor(**about: object) -> bytes:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **about}
    meta = {"scodkit": json.dumps({"format": 1, "kind": "monitor"})}
    return written(json.dumps({"__metadata__": meta, "a": entry}).encode(), bytes(4))


BYTES = {
    "nothing": b"",
    "a header beyond the end": written(b"{}", length=2**63),
    "a header of all there is": written(b"{}", length=2**64 - 1),
    "a header of bytes": written(bytes(range(128, 256))),
    "a header in a list": written(b"[]"),
    "a deep header": written(b"[" * 200_000 + b"]" * 200_000),
    "deep metadata": with_text("[" * 200_000 + "]" * 200_000),
    "deep notes": with_text('{"notes": ' + "[" * 200_000 + "]" * 200_000 + "}"),
    "a number of 10,000 digits": with_text('{"format": ' + "1" * 10_000 + "}"),
    "a number in a note": with_text('{"format": 1, "notes": {"n": ' + "1" * 10_000 + "}}"),
    "no object": with_text("3"),
    "half an object": with_text('{"format": 1'),
    "metadata of numbers": written(b'{"__metadata__": {"scodkit": 3}}'),
    "a tensor beyond the end": one_tensor(shape=[2**40], data_offsets=[0, 2**42]),
    "a tensor backwards": one_tensor(data_offsets=[4, 0]),
    "a tensor of negative size": one_tensor(shape=[-1]),
    "a tensor of another size": one_tensor(shape=[7]),
    "a tensor of nothing, often": one_tensor(shape=[2**62, 0, 2**62], data_offsets=[0, 0]),
    "a tensor of no type": one_tensor(dtype="F31"),
    "a tensor of rare type": one_tensor(dtype="F8_E8M0", shape=[4]),
    "a tensor of bits": one_tensor(dtype="F4", shape=[8]),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_any_kind_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.scod"
    path.write_bytes(BYTES[name])
    with pytest.raises(CorruptArtifactError):
        Monitor.load(path, network())
    assert artifact.header_of(path) in (None, {"format": 1, "kind": "monitor"})
