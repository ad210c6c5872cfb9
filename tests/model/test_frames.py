"""Columns of data frames are told apart by name, in the order of the fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from scodkit import Categorical, Fused, Monitor
from scodkit.baselines import KNN, Energy
from scodkit.errors import BatchError, MergeError
from scodkit.model.frames import labels_of

pandas = pytest.importorskip("pandas")

NAMES = ["age", "bmi", "bp", "sex"]
RNG = np.random.default_rng(0)
TRAIN, HELD, NEW = (
    pandas.DataFrame(RNG.normal(size=(n, 4)) * [1, 2, 3, 4], columns=NAMES)
    for n in (200, 120, 50)
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def reversed_columns(frame: Any) -> Any:
    return frame[frame.columns[::-1]]


def made(kind: Any, train: Any = TRAIN) -> Any:
    own = kind(network(), Categorical()).fit(train, progress=False)
    return own if kind is KNN else own.calibrate(reversed_columns(HELD), progress=False)


@pytest.mark.parametrize("kind", [Monitor, Fused, KNN])
def test_scores_do_not_depend_on_the_order_of_columns(kind: Any, tmp_path: Path) -> None:
    ours = made(kind)
    expected = ours.score(NEW)
    np.testing.assert_allclose(expected, ours.score(NEW.to_numpy()), rtol=1e-5)
    np.testing.assert_array_equal(ours.score(reversed_columns(NEW)), expected)
    found = ours.score(iter([NEW, reversed_columns(NEW)]), progress=False)
    np.testing.assert_array_equal(found, np.tile(expected, 2))
    ours.save(tmp_path / "x.scod")
    again = kind.load(tmp_path / "x.scod", ours.model)
    np.testing.assert_array_equal(again.score(reversed_columns(NEW)), expected)
    with pytest.raises(BatchError, match="without bp"):
        again.score(NEW.drop(columns="bp"))


@pytest.mark.parametrize("kind", [Monitor, Fused, KNN])
def test_a_fit_reads_all_frames_in_the_order_of_the_first(kind: Any) -> None:
    mixed = made(kind, [TRAIN[:100], reversed_columns(TRAIN[100:])])
    plain = made(kind, [TRAIN[:100], TRAIN[100:]])
    np.testing.assert_allclose(mixed.score(NEW), plain.score(NEW), rtol=1e-6)


@pytest.mark.parametrize("kind", [Monitor, Fused])
def test_new_data_is_added_in_the_order_of_the_fit(kind: Any) -> None:
    more = kind(network(), Categorical()).fit(TRAIN[:100], progress=False)
    plain = kind(network(), Categorical()).fit(TRAIN[:100], progress=False)
    more.update(reversed_columns(TRAIN[100:]), progress=False)
    plain.update(TRAIN[100:], progress=False)
    for own in (more, plain):
        own.calibrate(HELD, progress=False)
    np.testing.assert_allclose(more.score(reversed_columns(NEW)), plain.score(NEW), rtol=1e-6)


def test_fits_of_other_columns_are_not_merged() -> None:
    one = Monitor(network(), Categorical()).fit(TRAIN[:100], progress=False)
    other = Monitor(network(), Categorical())
    other.fit(reversed_columns(TRAIN[100:]), progress=False)
    with pytest.raises(MergeError, match="age, bmi, bp, sex and sex, bp, bmi, age"):
        one.merge(other)
    nameless = Monitor(network(), Categorical())
    nameless.fit(TRAIN[100:].to_numpy(), progress=False)
    assert nameless.merge(one).fitted.column_names == {"0": NAMES}
    numbered = Monitor(network(), Categorical())
    numbered.fit(pandas.DataFrame(TRAIN[100:].to_numpy()), progress=False)
    assert one.merge(numbered).fitted.column_names == {"0": NAMES}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.assign(z=1.0), r"with z, which .*; type x.drop\(columns=\['z'\]\)"),
        (lambda x: x.drop(columns="bp"), "got one without bp; name the columns"),
        (
            lambda x: x.rename(columns={"bmi": "bmmi"}),
            r"did you mean 'bmi' by 'bmmi'\? Type x.rename\(columns={'bmmi': 'bmi'}\)",
        ),
        (lambda x: pandas.concat([x, x[["age"]]], axis=1), "age more than once"),
    ],
    ids=["too many", "too few", "a slip", "twice"],
)
@pytest.mark.parametrize("kind", [Monitor, Fused, KNN])
def test_other_columns_are_refused_by_name(kind: Any, change: Any, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        made(kind).score(change(NEW))


def test_a_frame_after_a_fit_without_names_and_the_other_way_goes_by_position() -> None:
    numbered = pandas.DataFrame(NEW.to_numpy())
    named, nameless = made(Monitor), made(KNN, TRAIN.to_numpy())
    np.testing.assert_array_equal(named.score(numbered), named.score(NEW))
    np.testing.assert_array_equal(nameless.score(NEW), nameless.score(NEW.to_numpy()))
    found = made(KNN, pandas.DataFrame(TRAIN.to_numpy()))
    np.testing.assert_array_equal(found.score(NEW), nameless.score(NEW))
    np.testing.assert_array_equal(found.score(reversed_columns(numbered)), nameless.score(NEW))


def test_functions_that_pick_inputs_choose_columns_themselves() -> None:
    def pick(frame: Any) -> Any:
        return torch.tensor(frame[NAMES].to_numpy(), dtype=torch.float32)

    picking = Monitor(network(), Categorical(), inputs=pick).fit([TRAIN], progress=False)
    found = picking.score(reversed_columns(NEW).assign(z=1.0))
    np.testing.assert_allclose(found, made(Monitor).score(NEW), rtol=1e-4)


@pytest.mark.parametrize("kind", [Monitor, Fused])
def test_an_explanation_has_the_names_in_the_order_of_the_fit(kind: Any) -> None:
    far = NEW[:1].assign(age=30.0)
    ours = made(kind)
    for given in (far, reversed_columns(far), far.to_numpy()):
        assert ours.explain(given).words(0).startswith("age = 30 is far outside")


def test_names_given_for_a_frame_are_those_of_its_own_order() -> None:
    far = reversed_columns(NEW[:1].assign(age=30.0))
    told = made(Monitor).explain(far, columns=list(far.columns))
    assert told.words(0).startswith("age = 30 is far outside")


def test_labels_that_are_no_names_are_shown_as_text() -> None:
    dated = TRAIN.set_axis(pandas.date_range("2026-01-01", periods=4), axis=1)
    told = made(Monitor, dated).explain(dated[:1]).columns
    assert told.names[0].startswith("2026-01-01")


def test_methods_that_learn_nothing_remember_columns() -> None:
    energy = Energy(network(), Categorical()).fit(TRAIN)
    expected = energy.score(NEW.to_numpy())
    np.testing.assert_array_equal(energy.score(reversed_columns(NEW)), expected)
    found = energy.score(iter([NEW, reversed_columns(NEW)]), progress=False)
    np.testing.assert_array_equal(found, np.tile(expected, 2))
    with pytest.raises(BatchError, match="without bp"):
        energy.score(NEW.drop(columns="bp"))


def test_frames_of_labels_are_not_looked_at() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    labels = pandas.DataFrame({"y": np.zeros(len(TRAIN))})
    monitor = Monitor(Named(), Categorical())
    monitor.fit([{"x": TRAIN, "labels": labels}], progress=False)
    renamed = labels[: len(NEW)].set_axis(["z"], axis=1)
    monitor.score({"x": reversed_columns(NEW), "labels": renamed})
    assert monitor.fitted.column_names == {"x": NAMES}


def test_baselines_without_a_fit_take_frames_by_position() -> None:
    energy = Energy(network(), Categorical())
    np.testing.assert_array_equal(energy.score(NEW), energy.score(NEW.to_numpy()))


def test_what_is_no_data_frame_has_no_names() -> None:
    class Odd(np.ndarray):  # type: ignore[type-arg]
        columns = (np.zeros(3), np.zeros(3))

    assert labels_of(NEW) == NAMES
    assert labels_of(NEW.to_numpy()) is None
    assert labels_of(NEW.to_numpy().view(Odd)) is None
