"""Arrays, rows and loaders are taken as tensors are; scores go back as the data came."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scodkit import Categorical, Fused, Gaussian, HeteroscedasticGaussian, Monitor
from scodkit.baselines import KNN, Energy, Mahalanobis, Naive
from scodkit.errors import BatchError
from scodkit.model.kinds import over_batches

RNG = np.random.default_rng(0)
TRAIN, HELD, NEW = (RNG.normal(size=(n, 4)) for n in (200, 120, 50))
LABELS = RNG.integers(0, 3, 200)


class Table:
    """What tables have in common with arrays, and no more."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._values if dtype is None else self._values.astype(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter("abcd")  # names of columns, as of a pandas.DataFrame


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).float()


def loader(array: np.ndarray) -> DataLoader[Any]:
    return DataLoader(TensorDataset(tensor(array)), batch_size=16)


@pytest.fixture(scope="module", params=[Monitor, Fused])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Return a detector fitted on arrays, and one on tensors."""
    kind: Any = request.param

    def made(as_given: Callable[[np.ndarray], Any]) -> Any:
        own = kind(network(), Categorical(), rank=8).fit(as_given(TRAIN), progress=False)
        return own.calibrate(as_given(HELD), progress=False)

    return made(lambda x: x), made(lambda x: [*torch.split(tensor(x), 64)])


def test_arrays_are_fitted_and_scored_as_tensors_are(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    found, wanted = ours(NEW), theirs(tensor(NEW))
    for name in ("output", "score", "p_value"):
        value = getattr(found, name)
        assert isinstance(value, np.ndarray)
        np.testing.assert_allclose(value, getattr(wanted, name), rtol=1e-5)
    assert isinstance(ours.score(NEW), np.ndarray)
    flags = ours.flag(NEW, 0.2)
    assert flags.dtype == bool
    np.testing.assert_array_equal(flags, theirs.flag(tensor(NEW), 0.2))


@pytest.mark.parametrize(
    "given",
    [
        lambda x: [list(row) for row in x],
        list,
        Table,
        lambda x: x.astype(">f8"),
        lambda x: x[::-1][::-1],
        lambda x: x.astype(np.float32),
        lambda x: (x, LABELS[: len(x)]),
        lambda x: (x, np.array(["cat"] * len(x))),
        lambda x: {"input": x},
    ],
    ids=[
        *("lists", "flat arrays", "table", "other bytes", "steps backwards", "float32"),
        *("labels", "labels in words", "dict"),
    ],
)
def test_other_kinds_of_arrays_score_the_same(
    pair: tuple[Any, Any], given: Callable[[np.ndarray], Any]
) -> None:
    found = pair[0].score(given(NEW))
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, pair[0].score(NEW), rtol=1e-5)


def test_an_array_is_left_as_it_was() -> None:
    frozen = NEW.astype(np.float32)
    frozen.setflags(write=False)
    before = frozen.copy()
    Monitor(network(), Categorical(), 8).fit(frozen, progress=False).score(frozen)
    np.testing.assert_array_equal(frozen, before)


def test_rows_and_tables_are_fitted_as_arrays_are() -> None:
    scores = [
        Monitor(network(), Categorical(), 8).fit(given, progress=False).score(NEW)
        for given in (TRAIN, TRAIN.tolist(), list(TRAIN), Table(TRAIN), tensor(TRAIN))
    ]
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], rtol=1e-5)


def test_a_loader_is_scored_whole(
    pair: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ours, x = pair[0], tensor(NEW)
    kinds = {
        "loader": loader(NEW),
        "generator": (batch for batch in torch.split(x, 16)),
        "list of collated batches": [[batch] for batch in torch.split(x, 16)],
        "list of dicts": [{"input": batch} for batch in torch.split(x, 16)],
    }
    wanted = ours(x)
    for name, given in kinds.items():
        found = ours(given, progress=False)
        assert isinstance(found.score, Tensor), name
        torch.testing.assert_close(found.score, wanted.score, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found.output, wanted.output)
        assert torch.equal(found.p_value, wanted.p_value)
    assert not capsys.readouterr().err
    assert torch.equal(ours.flag(loader(NEW), 0.2), ours.flag(x, 0.2))
    assert "scoring" in capsys.readouterr().err


def test_a_loader_of_arrays_gives_arrays(pair: tuple[Any, Any]) -> None:
    found = pair[0].score((part for part in np.split(NEW, 5)), progress=False)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, pair[0].score(NEW), rtol=1e-5)


def test_a_loader_is_read_as_scores_are_made(pair: tuple[Any, Any]) -> None:
    alive: list[int] = []

    def batches() -> Iterator[Tensor]:
        for i in range(4):
            alive.append(i)
            yield tensor(NEW)

    assert len(pair[0].score(batches(), progress=False)) == 4 * len(NEW)
    assert alive == [0, 1, 2, 3]


def test_functions_that_pick_inputs_see_what_came() -> None:
    def pick(batch: Any) -> Any:
        assert isinstance(batch, np.ndarray)
        return batch.transpose(1, 0)  # numpy's, not torch's

    monitor = Monitor(network(), Categorical(), 8, inputs=pick).fit([TRAIN.T], progress=False)
    plain = Monitor(network(), Categorical(), 8).fit([TRAIN], progress=False)
    np.testing.assert_allclose(monitor.score(NEW.T), plain.score(NEW), rtol=1e-5)


def test_a_tuple_of_lists_is_a_batch_if_inputs_are_picked() -> None:
    """As collation by ``tuple(zip(*samples))`` gives them, for boxes of images."""
    samples = tensor(TRAIN)
    batch = tuple(samples[:6]), ({"box": 1},) * 6
    monitor = Monitor(network(), Categorical(), 8, inputs=lambda b: torch.stack(b[0]))
    monitor.fit([batch], progress=False)
    found = monitor.score(batch)
    torch.testing.assert_close(monitor.score(([*samples[:2]], ())), found[:2])
    torch.testing.assert_close(monitor.score([batch, batch], progress=False), found.repeat(2))


def test_rows_of_several_lengths_and_masked_entries_are_refused() -> None:
    monitor = Monitor(network(), Categorical(), 8)
    masked = np.ma.masked_less(TRAIN, -1.0)
    for bad, says in (([[1.0, 2.0], [1.0]], "rows of one length"), (masked, "x.filled")):
        with pytest.raises(BatchError, match=says):
            monitor.fit(bad, progress=False)
    monitor.fit(TRAIN, progress=False)
    with pytest.raises(BatchError, match=r"x\.filled"):
        monitor.score(masked)
    whole = np.ma.masked_array(TRAIN, mask=False)
    np.testing.assert_array_equal(monitor.score(whole), monitor.score(TRAIN))


def test_anything_iterable_may_be_a_batch_if_inputs_are_picked() -> None:
    table = Table(tensor(NEW).numpy())

    class Batch:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __iter__(self) -> Iterator[Tensor]:
            return iter(self.x)

    monitor = Monitor(network(), Categorical(), 8, inputs=lambda batch: batch.x)
    monitor.fit([Batch(tensor(TRAIN))], progress=False)
    assert monitor.score(Batch(tensor(np.asarray(table)))).shape == (50,)


@pytest.mark.parametrize("method", [Energy, KNN, Mahalanobis])
def test_baselines_take_arrays_and_loaders(method: Any) -> None:
    targets = (LABELS,) if method is Mahalanobis else ()
    ours = method(network(), Categorical()).fit(TRAIN, *targets, progress=False)
    batches = DataLoader(TensorDataset(tensor(TRAIN), torch.from_numpy(LABELS)), batch_size=64)
    theirs = method(network(), Categorical()).fit(batches, progress=False)
    found = ours.score(NEW)
    assert isinstance(found, np.ndarray)
    wanted = theirs.score(tensor(NEW))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    torch.testing.assert_close(
        ours.score(loader(NEW), progress=False), wanted, rtol=1e-4, atol=1e-6
    )


def test_labels_beside_samples_are_ignored_with_a_word() -> None:
    with pytest.warns(UserWarning, match="labels are not used"):
        monitor = Monitor(network(), Categorical(), 8).fit(TRAIN, LABELS, progress=False)
    plain = Monitor(network(), Categorical(), 8).fit(TRAIN, progress=False)
    np.testing.assert_array_equal(monitor.score(NEW), plain.score(NEW))


def test_labels_beside_held_out_data_are_ignored_with_a_word(pair: tuple[Any, Any]) -> None:
    own = copy.copy(pair[0])
    with pytest.warns(UserWarning, match="labels are not used"):
        own.calibrate(HELD, LABELS[:120], progress=False)
    np.testing.assert_array_equal(own.flag(NEW), pair[0].flag(NEW))


def test_an_explanation_has_scores_as_they_are_returned(pair: tuple[Any, Any]) -> None:
    for given in (NEW, tensor(NEW)):
        told, scored = pair[0].explain(given), pair[0](given)
        assert type(told.score) is type(scored.score)
        assert type(told.p_value) is type(scored.p_value)
        np.testing.assert_allclose(told.score, scored.score, rtol=1e-4)
        assert "score" in told.words(0)
        assert "score" in str(told)
    if isinstance(pair[0], Monitor):
        assert pair[0].explain(NEW).plot(1).axes


@pytest.mark.parametrize("method", [Energy, KNN])
def test_baselines_that_use_no_targets_say_so(method: Any) -> None:
    with pytest.warns(UserWarning, match=f"labels are not used: {method.__name__} learns"):
        method(network(), Categorical()).fit(TRAIN, LABELS, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Mahalanobis(network(), Categorical()).fit(TRAIN, LABELS, progress=False)


def test_a_missing_target_is_asked_for_as_it_is_typed() -> None:
    with pytest.raises(BatchError, match=r"type fit\(x, y\), or let the loader yield"):
        Mahalanobis(network(), Categorical()).fit(TRAIN, progress=False)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_single_column_has_any_strides(dtype: str) -> None:
    """Numpy's ``x[:, None]`` has a stride of 0, and is contiguous all the same."""
    column = np.linspace(0, 1, 80, dtype=dtype)[:, None]
    plain = torch.linspace(0, 1, 80)[:, None].clone()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))
    expected = Monitor(net, Categorical(), 4).fit(plain, progress=False).score(plain)
    for given in (column, [column], (part for part in np.split(column, 4))):
        monitor = Monitor(net, Categorical(), 4).fit(given, progress=False)
        np.testing.assert_allclose(monitor.score(column), expected, rtol=1e-3, atol=1e-6)
        monitor.calibrate([column[:40] + 0.001, column[40:] + 0.001], progress=False)
        assert monitor.flag(column).shape == (80,)
        assert monitor.explain(column).score.shape == (80,)
    fused = Fused(net, Categorical()).fit([column], progress=False)
    assert fused.calibrate([column + 0.001], progress=False).score(column).shape == (80,)


@pytest.mark.parametrize("method", [Energy, KNN])
def test_a_list_of_two_batches_is_refused_by_baselines_too(method: Any) -> None:
    ours = method(network(), Categorical())
    if method is KNN:
        ours.fit(TRAIN, progress=False)
    for given in ([tensor(NEW), tensor(NEW)], [NEW, NEW], (NEW, NEW)):
        with pytest.raises(BatchError, match=r"monitor.score\(iter\(batches\)\)"):
            ours.score(given)
    assert len(ours.score(iter([NEW, NEW]), progress=False)) == 2 * len(NEW)
    assert len(ours.score([tensor(NEW), torch.zeros(len(NEW), dtype=torch.int64)])) == len(NEW)


def test_inputs_that_are_their_targets_are_one_batch_where_the_fit_had_them() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    pairs = DataLoader(TensorDataset(tensor(TRAIN), tensor(TRAIN)), batch_size=64)
    fitted = KNN(net, Gaussian()).fit(pairs, progress=False)
    assert len(fitted.score((tensor(NEW), tensor(NEW)))) == len(NEW)
    assert len(Naive(net, HeteroscedasticGaussian()).score(pairs, progress=False)) == len(TRAIN)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([NEW, NEW], "monitor.score\\(iter\\(batches\\)\\)"),
        ([tensor(NEW)] * 3, "expected one batch, got 3 tensors"),
        (np.array([["a", "b"]]), "array of numbers"),
        ([[1.0, 2.0], [3.0]], "rows of one length"),
        (NEW[0], "for a single sample type x\\[None\\]"),
        (TensorDataset(tensor(NEW)), "type DataLoader\\(dataset, batch_size=64\\)"),
    ],
    ids=["two arrays", "three tensors", "words", "ragged rows", "one sample", "a data set"],
)
def test_what_cannot_be_a_batch_is_refused(
    pair: tuple[Any, Any], given: Any, words: str
) -> None:
    with pytest.raises(BatchError, match=words):
        pair[0].score(given)


@pytest.mark.parametrize(
    ("samples", "labels", "words"),
    [(TRAIN, LABELS[:7], "a label for each of 200"), (loader(TRAIN), LABELS, "its own")],
)
def test_labels_that_do_not_fit_are_refused(samples: Any, labels: Any, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        Mahalanobis(network(), Categorical()).fit(samples, labels, progress=False)


def test_outputs_of_several_shapes_cannot_be_joined() -> None:
    batches = [torch.zeros(2, 5), torch.zeros(2, 7)]
    with pytest.raises(BatchError, match="outputs of one shape"):
        over_batches(lambda x: x, iter(batches), iter)
