"""Saving and loading: whole or refused, in any process, with nothing executed."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from cases import mlp
from own_process import printed_by
from scodkit import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LastLayers,
    Likelihood,
    Monitor,
    MonteCarlo,
)
from scodkit.errors import (
    CorruptArtifactError,
    FormatVersionError,
    MergeError,
    MismatchError,
    OptionError,
)
from scodkit.numerics import artifact
from scodkit.sketch import (
    SRFT,
    Exact,
    Fold,
    FrequentDirections,
    Nystrom,
    Sketch,
    SparseSign,
    TwoSided,
)
from scodkit.sketch import (
    Gaussian as GaussianMap,
)
from small_monitors import data, fitted, network

SKETCHES: list[Sketch] = [
    Nystrom(size=12, map=Fold(), seed=3),
    Nystrom(size=12, map=SRFT()),
    Nystrom(size=12, map=GaussianMap()),
    Nystrom(size=12, map=SparseSign(4)),
    TwoSided(size=24),
    FrequentDirections(size=6, shrink=False),
    Exact(),
]
LIKELIHOODS: list[Likelihood] = [
    Gaussian(0.5),
    Gaussian((0.5, 1.0, 1.5, 2.0)),
    HeteroscedasticGaussian(),
    Bernoulli(),
    Categorical(directions=2),
]


@pytest.mark.parametrize("sketch", SKETCHES, ids=str)
def test_a_round_trip_changes_nothing(path: Path, sketch: Sketch) -> None:
    monitor = fitted(sketch=sketch, prior_scale=0.3, parameters=LastLayers(count=1))
    monitor.calibrate([data(20, 5)], progress=False)
    monitor.save(path)
    loaded = Monitor.load(path, network())
    x = data(6, 1)
    assert torch.equal(loaded.score(x), monitor.score(x))
    before, after = monitor(x).p_value, loaded(x).p_value
    assert before is not None
    assert after is not None
    assert torch.equal(after, before)
    assert loaded.sketch == sketch
    assert loaded.prior_scale == 0.3
    assert repr(loaded.basis.trace) == repr(monitor.basis.trace)
    # and it can go on learning
    loaded.update([data(10, 2)], progress=False)
    monitor.update([data(10, 2)], progress=False)
    assert torch.equal(loaded.score(x), monitor.score(x))


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_likelihoods_come_back(path: Path, likelihood: Likelihood) -> None:
    fitted(likelihood=likelihood).save(path)
    assert Monitor.load(path, network()).likelihood == likelihood


def test_another_process_computes_the_same_scores(path: Path) -> None:
    monitor = fitted()
    monitor.save(path)
    program = """
        import sys, torch
        from torch import nn
        from scodkit import Monitor
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        monitor = Monitor.load(sys.argv[1], model)
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
        print(monitor.score(x).tolist())
    """
    assert json.loads(printed_by(program, path)) == monitor.score(data(6, 1)).tolist()


def test_without_the_sketch_the_file_is_smaller_and_only_scores(path: Path) -> None:
    monitor = fitted()
    monitor.save(path)
    whole = path.stat().st_size
    monitor.save(path, sketch=False)
    assert path.stat().st_size < whole
    loaded = Monitor.load(path, network())
    assert torch.equal(loaded.score(data(6, 1)), monitor.score(data(6, 1)))
    with pytest.raises(MergeError, match="sketch=True"):
        loaded.update([data(5, 2)], progress=False)


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    fitted().save(path)
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptArtifactError):
            Monitor.load(path, network())


def test_a_changed_byte_is_noticed_wherever_it_is(path: Path) -> None:
    fitted().save(path)
    whole = bytearray(path.read_bytes())
    (header_length,) = struct.unpack("<Q", whole[:8])
    for position in (8 + header_length + 3, len(whole) - 1):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(CorruptArtifactError, match="digest"):
            Monitor.load(path, network())
    edited = bytes(whole).replace(rb"\"prior_scale\": 1.0", rb"\"prior_scale\": 2.0")
    assert edited != bytes(whole)
    path.write_bytes(edited)
    with pytest.raises(CorruptArtifactError, match="digest"):
        Monitor.load(path, network())


def test_foreign_files_are_refused(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        Monitor.load(path, network())
    torch.save({"a": 1}, path)
    with pytest.raises(CorruptArtifactError, match="not a scodkit file"):
        Monitor.load(path, network())
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(CorruptArtifactError, match="scodkit header"):
        Monitor.load(path, network())
    artifact.write(path, "checkpoint", {}, {"a": torch.zeros(2)})
    with pytest.raises(CorruptArtifactError, match=r"saved monitor.*saved checkpoint"):
        Monitor.load(path, network())


def test_another_format_is_refused_with_both_versions(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact, "FORMAT_VERSION", 99)
    fitted().save(path)
    monkeypatch.undo()
    with pytest.raises(FormatVersionError, match=r"expected format 1, got 99.*scodkit 0\.1"):
        Monitor.load(path, network())


def test_other_weights_are_refused_with_what_differs(path: Path) -> None:
    fitted(parameters=["2.*"]).save(path)
    other = network()
    with torch.no_grad():
        other[2].bias[0] += 1e-3
    with pytest.raises(MismatchError, match="chosen weights differ"):
        Monitor.load(path, other)
    other = network()
    with torch.no_grad():
        other[0].bias[0] += 1e-3
    with pytest.raises(MismatchError, match="other weights or buffers differ"):
        Monitor.load(path, other)
    torch.manual_seed(0)
    with pytest.raises(MismatchError, match=r"2\.weight: \(4, 5\) in the file, \(6, 5\) in"):
        Monitor.load(path, mlp(6))
    with pytest.raises(MismatchError, match="not in the model"):
        Monitor.load(path, nn.Linear(3, 4))


def test_a_model_trained_on_after_the_fit_cannot_be_saved_or_updated(path: Path) -> None:
    monitor = fitted()
    with torch.no_grad():
        monitor.model[0].weight.add_(1.0)
    with pytest.raises(MismatchError, match="fit again"):
        monitor.save(path)
    assert not path.exists()
    with pytest.raises(MismatchError, match="fit again"):
        monitor.update([data()], progress=False)


def test_functions_must_be_passed_again(path: Path) -> None:
    fitted(inputs=lambda batch: batch * 2).save(path)
    with pytest.raises(MismatchError, match="inputs="):
        Monitor.load(path, network())
    Monitor.load(path, network(), inputs=lambda batch: batch * 2)


def family(output: Tensor) -> torch.distributions.Distribution:
    return torch.distributions.Categorical(logits=output)


def test_monte_carlo_families_must_be_passed_again(path: Path) -> None:
    likelihood = MonteCarlo(family, samples=2, seed=4)
    monitor = fitted(likelihood=likelihood)
    monitor.save(path)
    with pytest.raises(OptionError, match="pass the object itself"):
        Monitor.load(path, network())
    with pytest.raises(MismatchError, match="likelihood of the fit"):
        Monitor.load(path, network(), likelihood=MonteCarlo(family, samples=3, seed=4))
    loaded = Monitor.load(path, network(), likelihood=likelihood)
    assert torch.equal(loaded.score(data(4, 1)), monitor.score(data(4, 1)))


def test_a_failed_write_leaves_the_old_file_and_no_litter(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted().save(path)
    before = path.read_bytes()

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scodkit.numerics.artifact.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        fitted().save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_any_safetensors_reader_can_open_it(path: Path) -> None:
    fitted().save(path)
    with safe_open(str(path), framework="np") as file:
        header = json.loads(file.metadata()["scodkit"])
        assert file.get_tensor("vectors").shape[1] == 5
    assert header["kind"] == "monitor"
    assert header["likelihood"]["type"] == "Categorical"
    assert header["basis"]["num_data"] == 30


def test_a_file_that_is_replaced_meanwhile_is_never_mixed(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "file"
    old, new = ({"x": torch.full((500,), float(i))} for i in range(2))
    artifact.write(path, "toy", {"version": 0}, old)

    @contextlib.contextmanager
    def opened_twice(name: str, framework: str) -> Iterator[Any]:
        """Safetensors maps a file for its header, then once more for its tensors."""
        with safe_open(name, framework) as first:
            about = first.metadata()
        artifact.write(path, "toy", {"version": 1}, new)
        with safe_open(name, framework) as second:
            keys, tensor = second.keys, second.get_tensor
            yield SimpleNamespace(metadata=lambda: about, keys=keys, get_tensor=tensor)

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "safe_open", opened_twice)
        header, tensors = artifact.read(path, "toy")  # the file that was there is still open
    assert header["version"] == 0
    assert torch.equal(tensors["x"], old["x"])
    header, tensors = artifact.read(path, "toy")
    assert header["version"] == 1
    assert torch.equal(tensors["x"], new["x"])


@pytest.mark.parametrize("letters", range(0, 64, 8))
def test_tensors_begin_where_torch_would_begin_them(path: Path, letters: int) -> None:
    # kernels choose by alignment, so the last bits of a fit that goes on would depend on it
    artifact.write(path, "test", {"name": "x" * letters}, {"a": torch.ones(3, 5)})
    _, tensors = artifact.read(path, "test")
    assert tensors["a"].data_ptr() % 64 == 0
