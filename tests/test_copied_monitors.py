"""A monitor is copied and pickled with its model, and is then as good as the first."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import joblib
import pytest
import torch
from torch import Tensor, nn

from scodkit import Categorical, Gaussian, Monitor, Task
from scodkit.baselines import DeepEnsemble, Energy, LocalEnsemble, Mahalanobis
from scodkit.errors import OptionError, ScodError
from scodkit.likelihoods import MonteCarlo


def pickled(detector: Any) -> Any:
    return pickle.loads(pickle.dumps(detector))


def dumped(detector: Any) -> Any:
    file = io.BytesIO()
    joblib.dump(detector, file)
    return joblib.load(file)


COPIES = [copy.copy, copy.deepcopy, pickled, dumped]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def monitor(**options: Any) -> Monitor:
    made = Monitor(network(), Categorical(), rank=5, **options)
    made.fit([torch.randn(32, 4)], progress=False)
    return made.calibrate([torch.randn(120, 4)], progress=False)


def doubled(batch: Tensor) -> Tensor:
    return 2 * batch


@pytest.mark.parametrize("made_by", COPIES)
def test_a_copy_scores_flags_updates_and_saves_as_the_monitor(
    made_by: Callable[[Monitor], Monitor], tmp_path
) -> None:
    whole, x = monitor(), torch.randn(6, 4)
    copied = made_by(whole)
    assert torch.equal(copied.score(x), whole.score(x))
    assert torch.equal(copied.flag(x, 0.1), whole.flag(x, 0.1))
    copied.save(tmp_path / "copy.scod")
    found = Monitor.load(tmp_path / "copy.scod", whole.model)
    assert torch.equal(found.score(x), whole.score(x))


@pytest.mark.parametrize("made_by", COPIES[1:])
def test_a_deep_copy_has_a_model_of_its_own(made_by: Callable[[Monitor], Monitor]) -> None:
    whole, x = monitor(), torch.randn(6, 4)
    before = whole.score(x)
    copied = made_by(whole)
    with torch.no_grad():
        for parameter in copied.model.parameters():
            parameter.zero_()
    assert torch.equal(whole.score(x), before)
    assert copied._scorer._network is copied._network


def test_a_pair_that_is_copied_together_stays_together() -> None:
    whole = monitor()
    model, copied = copy.deepcopy((whole.model, whole))
    assert copied.model is model


def test_a_copy_is_made_while_others_score() -> None:
    whole, x = monitor(), torch.randn(6, 4)
    expected, stop = whole.score(x), threading.Event()

    def score() -> None:
        while not stop.is_set():
            whole.score(x)

    thread = threading.Thread(target=score)
    thread.start()
    try:
        assert all(torch.equal(pickled(whole).score(x), expected) for _ in range(5))
    finally:
        stop.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_recording_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0])
    monkeypatch.setattr("scodkit.scoring.compiled._seconds", lambda _: next(times))
    whole, x = monitor(), torch.randn(2, 4)
    whole.compile(x)
    assert whole._scorer._captured is not None
    for copied in (copy.deepcopy(whole), pickled(whole)):
        assert copied._scorer._captured is None
        torch.testing.assert_close(copied.score(x), whole.score(x))
    assert whole._scorer._captured is not None


def scores_of(found: Monitor, x: Tensor) -> list[float]:
    return found.score(x).tolist()


def test_a_monitor_is_sent_to_a_process_that_was_started_anew() -> None:
    whole, x = monitor(inputs=doubled), torch.randn(6, 4)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(scores_of, whole, x).result()
    assert found == pytest.approx(whole.score(x).tolist(), rel=1e-6)


@pytest.mark.parametrize("made_by", COPIES)
@pytest.mark.parametrize("kind", [Energy, Mahalanobis, LocalEnsemble, DeepEnsemble])
def test_baselines_are_copied_too(kind: Any, made_by: Callable[[Any], Any]) -> None:
    model = [network(), network(1)] if kind is DeepEnsemble else network()
    options = {"rank": 3} if kind is LocalEnsemble else {}
    method = kind(model, Categorical(), **options)
    method.fit([(torch.randn(32, 4), torch.arange(32) % 3)], progress=False)
    x = torch.randn(6, 4)
    torch.testing.assert_close(made_by(method).score(x), method.score(x))


def poisson(output: Tensor) -> torch.distributions.Poisson:
    return torch.distributions.Poisson(output.exp())


@pytest.mark.parametrize(
    ("likelihood", "options", "named"),
    [
        (Gaussian(), {"inputs": lambda batch: batch}, "inputs"),
        (Gaussian(), {"outputs": lambda out: out}, "outputs"),
        ({"0": Gaussian()}, {"outputs": lambda out: {"0": out}}, "outputs"),
        (Gaussian(), {"task": Task(lambda out: out[:, :1])}, "outcome"),
        (Gaussian(), {"parameters": lambda name, _: name == "0.weight"}, "selection"),
        (MonteCarlo(lambda out: poisson(out)), {}, "family"),
    ],
)
def test_functions_without_a_name_are_refused_by_pickle_alone(
    likelihood: Any, options: dict[str, Any], named: str
) -> None:
    found = Monitor(network(), likelihood, rank=2, **options)
    found.fit([torch.randn(8, 4)], progress=False)
    x = torch.randn(3, 4)
    for made_by in (copy.copy, copy.deepcopy):
        assert torch.equal(made_by(found).score(x), found.score(x))
    with pytest.raises(OptionError, match=rf"<lambda> as {named}; .*def.*save\(path\)") as said:
        pickle.dumps(found)
    assert isinstance(said.value, ScodError)


def test_functions_that_are_stored_by_value_need_no_name() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    found = monitor(inputs=lambda batch: batch)
    x = torch.randn(3, 4)
    assert torch.equal(pickle.loads(cloudpickle.dumps(found)).score(x), found.score(x))


def test_targets_without_a_name_are_refused_too() -> None:
    method = Energy(network(), Categorical(), targets=lambda batch: batch[1])
    with pytest.raises(OptionError, match="<lambda> as targets"):
        pickle.dumps(method)
