"""Checkpoints, alarms, baselines and bytes that are not what they must be: refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crafted import INF, NAN, Change, add, craft, drop, put, turn, without
from scodkit import Categorical, Monitor
from scodkit.alarms import DriftAlarm, OnlineDiscoveries, RolloutAlarm
from scodkit.baselines import KNN
from scodkit.calibration import Calibration
from scodkit.errors import CorruptArtifactError, ScodError
from scodkit.numerics import artifact
from scodkit.sketch import Nystrom
from small_monitors import data, network


def fit(path: Path, batches: list[Tensor]) -> Monitor:
    monitor = Monitor(network(), Categorical(), rank=5, sketch=Nystrom(size=10))
    return monitor.fit(batches, checkpoint=path, every=1, progress=False)


CHECKPOINTS: dict[str, Change] = {
    **{f"no {key}": drop(key) for key in ("state", "identity", "samples", "skipped")},
    **{f"{key} is true": put(key, True) for key in ("state", "identity", "skipped", "samples")},
    "no batches": without("batches"),
    "batches in floats": turn("batches", torch.Tensor.double),
    "batches of batches": turn("batches", lambda t: t[None]),
    "skipped below 0": put("skipped", -1),
    "half a sample": put("samples", 1.5),
    "fewer samples than in the sketch": put("samples", 3),
    "more skipped than there were": put("skipped", 30),
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
    assert artifact.header_of(path) in ({}, {"format": 1, "kind": "monitor"})
