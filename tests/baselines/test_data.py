"""What baselines read, what they stand on, and how they say what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from baseline_contracts import network, some
from scodkit import Categorical, Heads
from scodkit.baselines import KNN, Energy, IdentityCurvature, MaxLogit, Naive
from scodkit.baselines.baseline import TrainingData, check_finite, whole_number
from scodkit.baselines.kfac_laplace import peer
from scodkit.errors import (
    BatchError,
    MismatchError,
    MissingPeerError,
    NonFiniteError,
    OptionError,
)
from scodkit.model.network import Network

X, Y = torch.randn(4, 2), torch.arange(4)


def data(loader: object, **options: object) -> TrainingData:
    return TrainingData(Network(nn.Linear(2, 3)), loader, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        [X, Y, "name"],
        {"input": X, "labels": Y},
        {"input": X, "label": Y},
        {"input": X, "targets": Y},
    ],
)
def test_targets_are_found_where_they_usually_are(batch: object) -> None:
    ((call, targets),) = data([batch]).pairs()
    assert torch.equal(call.tensors()[0], X)
    assert torch.equal(targets, Y)


def test_targets_can_be_picked() -> None:
    ((_, targets),) = data([(X, "id", Y)], targets=lambda batch: batch[2]).pairs()
    assert torch.equal(targets, Y)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (X, "got none"),
        ((X, Y[:3]), "got 3 of them"),
        ((X, "cat"), "got str"),
        ((X, torch.tensor(1)), "a single"),
        ({"input": X}, "got none"),
    ],
)
def test_missing_targets_are_named(batch: object, said: str) -> None:
    with pytest.raises(BatchError, match=said) as error:
        list(data([batch]).pairs())
    assert "4 targets" in str(error.value)
    assert "targets=lambda" in str(error.value)


def test_a_pass_can_be_repeated_and_empty_batches_do_not_matter() -> None:
    found = data([(X, Y), (X[:0], Y[:0]), (X[:1], Y[:1])])
    for _ in range(2):
        assert [call.batch_size for call in found.calls()] == [4, 1]
    found.check_repeatable("the test")


def test_an_iterator_is_refused_by_those_who_read_twice() -> None:
    with pytest.raises(OptionError, match=r"more than once.*DataLoader"):
        data(iter([(X, Y)])).check_repeatable("the test")


@pytest.mark.parametrize("loader", [[], [(X[:0], Y[:0])]])
def test_no_samples_are_refused(loader: list[object]) -> None:
    with pytest.raises(BatchError, match="expected"):
        list(data(loader).calls())


def test_check_finite_names_the_row() -> None:
    assert check_finite(X, "features") is X
    bad = X.clone()
    bad[2, 1] = torch.nan
    with pytest.raises(NonFiniteError, match=r"features.*row 2"):
        check_finite(bad, "features")
    with pytest.raises(NonFiniteError, match="row 0"):
        check_finite(torch.tensor([torch.inf, 1.0]), "targets")


@pytest.mark.parametrize("name", ["laplace", "laplace.curvature"])
def test_a_missing_library_says_what_to_type(name: str, monkeypatch) -> None:
    for loaded in [m for m in sys.modules if m.split(".")[0] == name.split(".")[0]]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(MissingPeerError, match=r"pip install --no-deps .*curvlinops"):
        peer(name)


def test_what_to_type_is_what_the_project_installs() -> None:
    from scodkit.baselines.kfac_laplace import _INSTALL

    lines = (Path(__file__).parents[2] / "peers.txt").read_text().splitlines()
    pinned = {line for line in lines if "==" in line}
    assert set(_INSTALL.split()) <= pinned


def test_a_file_of_another_method_is_refused(tmp_path: Path) -> None:
    model = network("categorical")
    Energy(model, Categorical(), temperature=3.0).save(tmp_path / "method")
    with pytest.raises(MismatchError, match=r"a Energy; type Energy.load"):
        MaxLogit.load(tmp_path / "method", model)
    assert Energy.load(tmp_path / "method", model).temperature == 3.0


def test_a_misspelt_option_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        Energy(network("categorical"), Categorical(), temprature=5.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["model", "parameters"])
def test_what_a_method_was_made_for_cannot_be_exchanged(name: str) -> None:
    method = IdentityCurvature(network("categorical"), Categorical())
    before = method.score(some())
    with pytest.raises(AttributeError, match=rf"a new IdentityCurvature for another {name}"):
        setattr(method, name, network("categorical", seed=1))
    assert torch.equal(method.score(some()), before)


def test_a_class_in_place_of_a_likelihood_says_what_to_type() -> None:
    with pytest.raises(OptionError, match=r"type Categorical\(\)"):
        Naive(network("categorical"), Categorical)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2.5, "3", True, 0, None])
def test_counts_are_whole_numbers(value: object) -> None:
    with pytest.raises(OptionError, match="rank"):
        whole_number("rank", value)


def test_counts_of_numpy_become_plain() -> None:
    found = whole_number("rank", np.int64(3))
    assert (found, type(found)) == (3, int)


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(OptionError, match=r"expected an nn.Module, got str"):
        Naive("model", Categorical())  # type: ignore[arg-type]


def test_inputs_and_outputs_are_picked_as_for_a_monitor() -> None:
    model = network("categorical")
    plain = Naive(model, Categorical()).score(some())
    wrapped = Naive(
        model,
        Categorical(),
        inputs=lambda batch: batch["image"],
        outputs=lambda output: output + 1.0,  # which entropies do not see
    )
    torch.testing.assert_close(wrapped.score({"image": some(), "n": 1}), plain)


def test_a_baseline_of_several_heads_is_refused_with_what_to_type() -> None:
    for heads in ({"class": Categorical()}, (Categorical(), None), Heads({"a": Categorical()})):
        with pytest.raises(OptionError, match=r"likelihood of one output for KNN.*outputs=lam"):
            KNN(nn.Linear(2, 3), heads)  # type: ignore[arg-type]
