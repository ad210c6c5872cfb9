"""Saved and recorded `Fused`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from test_fused import KINDS, made, network, samples
from torch import nn

from scodkit import Budget, Categorical, Fused, Gaussian, Monitor, predicted_class
from scodkit.errors import (
    CaptureError,
    CaptureWarning,
    CorruptArtifactError,
    MismatchError,
    ScodError,
)
from scodkit.numerics import artifact


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "poisson"])
def test_a_loaded_detector_scores_the_same_bits(kind: str, path: Path) -> None:
    build, likelihood, _ = KINDS[kind]
    fused, x = made(build(), likelihood, prior_scale=0.5), samples(9, 4)
    fused.save(path)
    loaded = Fused.load(path, fused.model)
    assert repr(loaded) == repr(fused)
    assert loaded.summary() == fused.summary()
    assert loaded.memory() == fused.memory()
    assert torch.equal(loaded(x).p_value, fused(x).p_value)
    assert torch.equal(loaded.score(x), fused.score(x))
    again = path.with_name("again")
    loaded.save(again)
    assert torch.equal(Fused.load(again, fused.model).score(x), fused.score(x))


def test_what_is_loaded_can_be_gone_on_with(path: Path) -> None:
    fused = Fused(network(), Categorical()).fit([samples(100, 1)], progress=False)
    fused.save(path)
    loaded = Fused.load(path, fused.model)
    assert loaded.calibration is None
    for own in (fused, loaded):
        own.update([samples(60, 2)], progress=False)
        own.calibrate([samples(200, 3)], progress=False)
    torch.testing.assert_close(loaded.score(samples(9, 4)), fused.score(samples(9, 4)))
    fused.save(path, sketch=False)
    with pytest.raises(ScodError, match="sketch"):
        Fused.load(path, fused.model).update([samples(60, 5)], progress=False)


def test_functions_have_to_be_the_same(path: Path) -> None:
    fused = made(network(), Categorical())
    fused.calibrate([samples(600, 3)], by=predicted_class, progress=False)
    fused.save(path)
    with pytest.raises(MismatchError, match="by="):
        Fused.load(path, fused.model)
    with pytest.raises(MismatchError, match="by= gives others"):
        Fused.load(path, fused.model, by=lambda output: 1 - predicted_class(output))
    loaded = Fused.load(path, fused.model, by=predicted_class)
    assert torch.equal(loaded(samples(9, 4)).p_value, fused(samples(9, 4)).p_value)


def test_other_files_and_other_models_are_refused(path: Path) -> None:
    fused = made(network(), Categorical())
    fused.save(path)
    with pytest.raises(MismatchError):
        Fused.load(path, network(seed=1))
    with pytest.raises(CorruptArtifactError):
        Monitor.load(path, fused.model)
    fused.monitor.save(path)
    with pytest.raises(CorruptArtifactError):
        Fused.load(path, fused.model)


CRAFTED = {
    "no monitor": lambda header, tensors: tensors.pop("monitor"),
    "another monitor": lambda header, tensors: tensors["monitor"].mul_(3),
    "a short bank": lambda header, tensors: tensors.update(
        {"features.samples": tensors["features.samples"][:5]}
    ),
    "no keys": lambda header, tensors: tensors.pop("features.keys"),
    "a NaN": lambda header, tensors: tensors["features.means"].fill_(torch.nan),
    "a count that is no number": lambda header, tensors: tensors["features.counts"].fill_(
        torch.nan
    ),
    "no samples": lambda header, tensors: tensors.update(
        {name: tensors[name][:0] for name in ("features.samples", "features.keys")}
    ),
    "a layer of other weights": lambda header, tensors: header.update(layer="0"),
    "negative counts": lambda header, tensors: tensors["features.counts"].neg_(),
    "no features": lambda header, tensors: [
        tensors.pop(name) for name in list(tensors) if name.startswith("features.")
    ],
    "no spread": lambda header, tensors: tensors["standard.spread"].zero_(),
    "a negative weight": lambda header, tensors: tensors["standard.weight"].neg_(),
    "three parts": lambda header, tensors: tensors.update(
        {"standard.median": tensors["standard.median"][:3]}
    ),
    "another recipe": lambda header, tensors: header.update(parts=["scod"]),
    "a range of another width": lambda header, tensors: tensors.update(
        {"range.0:4": tensors["range.0:4"][:, :3].clone()}
    ),
    "a range from high to low": lambda header, tensors: tensors["range.0:4"].neg_(),
    "a range without an end": lambda header, tensors: tensors["range.0:4"][4].fill_(torch.inf),
    "no scores": lambda header, tensors: tensors.pop("calibration"),
    "no layer": lambda header, tensors: header.update(layer=None),
    "a negative number": lambda header, tensors: header.update(most=-1),
    "text for a flag": lambda header, tensors: header.update(closed="yes"),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_crafted_files_are_refused(what: str, path: Path) -> None:
    fused = made(network(), Categorical())
    fused.save(path)
    header, tensors = artifact.read(path, "fused")
    for key in ("format", "kind", "digest"):
        header.pop(key, None)
    CRAFTED[what](header, tensors)
    artifact.write(path, "fused", header, tensors)  # with a digest that is right
    with pytest.raises(ScodError):
        Fused.load(path, fused.model)


def test_copies_and_pickles_score_the_same() -> None:
    fused, x = made(network(), Categorical(), budget=Budget(2**26)), samples(9, 4)
    for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert torch.equal(copied.score(x), fused.score(x))


# torch's compiler says so of itself
COMPILER = "ignore:.*torch.jit.*"


@pytest.mark.slow
@pytest.mark.filterwarnings(COMPILER)
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()])
@pytest.mark.parametrize("size", [1, 16])
def test_a_recording_scores_the_same(likelihood: object, size: int) -> None:
    model = network().float()
    fused = Fused(model, likelihood)  # type: ignore[arg-type]
    fused.fit([samples(160, 1).float()], progress=False)
    fused.calibrate([samples(200, 3).float()], progress=False)
    x, y = samples(size, 4).float(), samples(size, 5).float()
    expected = fused.score(y)
    recorded = fused.compile(x)
    torch.testing.assert_close(recorded.score(y), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(recorded(y).output, model(y))
    y[0, 0] = torch.nan
    assert bool(recorded.score(y)[0].isinf())
    torch.testing.assert_close(
        recorded.score(samples(3, 6).float()), fused.score(samples(3, 6).float())
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(COMPILER)
def test_a_recording_of_other_weights_is_dropped() -> None:
    model = network().float()
    fused = Fused(model, Categorical()).fit([samples(160, 1).float()], progress=False)
    fused.calibrate([samples(200, 3).float()], progress=False)
    x = samples(4, 4).float()
    expected = fused.compile(x).score(x)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.warns(CaptureWarning, match=r"fused\.compile"):
        torch.testing.assert_close(fused.score(x), expected, rtol=1e-3, atol=1e-3)


def test_logits_that_take_backward_passes_are_not_recorded() -> None:
    build, likelihood, _ = KINDS["scaled logits"]
    with pytest.raises(CaptureError, match="backward passes"):
        made(build(), likelihood).compile(samples(4, 4))
