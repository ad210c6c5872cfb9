"""Made-up inputs in a file: they tell another model of the same weights, and hold no data."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from cases import CASES, Case, mlp
from saved_monitors import Saved
from scodkit import Categorical, Gaussian, Monitor, Task, predicted_class
from scodkit.errors import (
    CorruptArtifactError,
    MismatchError,
    NoProbesWarning,
    RepeatedDataWarning,
)
from scodkit.fit.probes import Probes, check_probes
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.numerics import artifact
from scodkit.sharded import ShardedMonitor

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))


def network(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), activation(), nn.Linear(6, 4))


def fitted(model: nn.Module | None = None, batch: Any = X, **options) -> Monitor:
    model = network() if model is None else model
    return Monitor(model, Categorical(), rank=4, **options).fit([batch], progress=False)


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["scodkit"])


# --- What is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Monitor, ShardedMonitor])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Identity])
def test_the_same_weights_in_another_architecture(path: Path, kind, activation) -> None:
    kind(network(), Categorical(), rank=4).fit([X], progress=False).save(path)
    kind.load(path, network())
    with pytest.raises(MismatchError, match=r"made-up inputs.*build the model as it was then"):
        kind.load(path, network(activation))


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "inputs": (lambda batch: batch["a"], lambda batch: batch["b"]),
    "outputs": (lambda out: out, lambda out: 2 * out),
    "by": (predicted_class, lambda out: out.argmin(1)),
    "task": (lambda out: out[:, :2], lambda out: out[:, 2:]),
}


@pytest.mark.filterwarnings("ignore:.*held-out samples were fitted")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_function(path: Path, name: str) -> None:
    same, other = FUNCTIONS[name]
    batch = {"a": X, "b": 3 + X, "label": torch.arange(20)} if name == "inputs" else X
    if name == "task":
        same, other = Task(same), Task(other)
    monitor = fitted(batch=batch, **({} if name == "by" else {name: same}))
    monitor.calibrate([batch], by=same if name == "by" else None, progress=False)
    monitor.save(path)
    again = Monitor.load(path, network(), **{name: same})
    assert torch.equal(again.score(batch), monitor.score(batch))
    with pytest.raises(MismatchError, match=f"made-up inputs, but .*{name}="):
        Monitor.load(path, network(), **{name: other})


def test_a_task_with_another_metric(path: Path) -> None:
    def outcome(output: Tensor) -> Tensor:
        return output[:, :2]

    fitted(task=Task(outcome, Gaussian(2.0))).save(path)
    Monitor.load(path, network(), task=Task(outcome, Gaussian(2.0)))
    with pytest.raises(MismatchError, match="task="):
        Monitor.load(path, network(), task=Task(outcome, Gaussian(3.0)))


def test_a_function_that_fails_on_what_it_took_at_the_fit(path: Path) -> None:
    batch = {"a": X, "label": torch.arange(20)}
    fitted(batch=batch, inputs=lambda batch: batch["a"]).save(path)
    with pytest.raises(MismatchError, match="KeyError: 'other'"):
        Monitor.load(path, network(), inputs=lambda batch: batch["other"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_no_difference(path: Path, dtype: torch.dtype) -> None:
    rounding = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    model, batch = network().to(dtype), X.to(dtype)
    fitted(model, batch, outputs=lambda out: out).save(path)
    Monitor.load(path, model, outputs=lambda out: out * (1 + rounding))
    with pytest.raises(MismatchError, match="outputs="):
        Monitor.load(path, model, outputs=lambda out: out * 1.2)


# --- Whatever the model takes --------------------------------------------------------------


class Columns(nn.Module):
    """A vocabulary for each of two columns, and a mask, which says what not to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Embedding(3, 4), nn.Embedding(90, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found = torch.stack([self.small(x[:, 0]), self.large(x[:, 1])], 1)
        weights = found.sum(2).masked_fill(mask, -torch.inf).softmax(1)
        return (weights[..., None] * found).sum(1)


def columns() -> tuple[Tensor, Tensor]:
    both = [torch.arange(20) % 3, torch.arange(1, 81, 4)]
    return torch.stack(both, 1), torch.zeros(20, 2, dtype=torch.bool)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
def test_models_of_all_kinds_are_asked(path: Path, case: Case) -> None:
    model, call = case.model(3), case.inputs(12, 3)
    batch = dict(call.kwargs) or (call.args[0], torch.zeros(12))
    monitor = fitted(model, batch)
    assert monitor.fitted.probes is not None
    assert monitor.fitted.probes.picked
    monitor.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = Monitor.load(path, model)
    assert torch.equal(loaded.score(batch), monitor.score(batch))


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
def test_integers_are_drawn_where_every_column_has_them(path: Path) -> None:
    model = Columns()
    fitted(model, columns(), inputs=lambda batch: batch).save(path)
    drawn = header_of(path)["probes"]["batch"]["tuple"][0]["tensor"]
    assert (drawn["low"], drawn["high"]) == (1, 2)
    Monitor.load(path, model, inputs=lambda batch: batch)


def test_a_loader_of_single_samples(path: Path) -> None:
    monitor = Monitor(network(), Categorical(), rank=4).fit(X.split(1), progress=False)
    monitor.save(path)
    assert header_of(path)["probes"]["batch"]["tensor"]["shape"] == [1, 3]
    with pytest.raises(MismatchError, match="made-up"):
        Monitor.load(path, network(nn.ReLU))


def test_a_batch_that_cannot_be_described_leaves_the_call_itself(path: Path) -> None:
    def pick(batch: dict[str, Any]) -> Tensor:
        return batch["x"]

    batch = {"x": X, "who": [f"somebody-{i}" for i in range(20)]}
    fitted(batch=batch, inputs=pick).save(path)
    assert b"somebody" not in path.read_bytes()
    assert not header_of(path)["probes"]["picked"]
    Monitor.load(path, network(), inputs=pick)
    with pytest.raises(MismatchError, match="made-up"):
        Monitor.load(path, network(nn.ReLU), inputs=pick)


def test_no_data_is_in_the_file(path: Path) -> None:
    monitor = fitted(batch=(X, torch.arange(100, 120)))
    monitor.save(path, sketch=False)
    header, tensors = artifact.read(path, "monitor")
    kept = [tensors[name] for name in tensors if name.startswith("probe.")]
    assert [tuple(tensor.shape) for tensor in kept] == [(4, 4)]
    extremes = {float(X.min()), float(X.max())}
    text = json.dumps(header)
    assert [x for x in X.flatten().tolist() if repr(x) in text and x not in extremes] == []


def test_large_outputs_are_kept_in_part() -> None:
    model = nn.Linear(3, 10_000)
    probes = Probes.of(Network(model), X, Inputs((X,), {}))
    assert probes is not None
    assert probes.answers["output"].shape == (4, 3334)
    check_probes(probes, Network(model))
    with pytest.raises(MismatchError, match="made-up"):
        check_probes(probes, Network(model, outputs=lambda out: out.flip(1)))


class CallCounting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = mlp(4), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1  # a list is the same in the twin that is run
        assert len(x) <= 20
        return self.body(x)


def test_a_load_runs_the_model_on_the_probes_alone(path: Path) -> None:
    model = CallCounting()
    fitted(model).save(path)
    model.calls[0] = 0
    Monitor.load(path, model)
    assert model.calls == [1]  # which shows that the twin can be run, too


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_model_that_is_known_to_be_deterministic_is_asked_once(deterministic: bool) -> None:
    model = CallCounting()
    network, call = Network(model), Inputs((X,), {})
    with torch.no_grad():
        network(call)
    model.calls[0] = 0
    assert Probes.of(network, X, call, deterministic=deterministic) is not None
    assert model.calls == [1 if deterministic else 2]


def test_merged_and_updated_monitors_keep_them(path: Path) -> None:
    model = network()
    one, two = fitted(model), fitted(model, X + 1)
    probes = one.fitted.probes
    assert probes is not None
    assert one.merge(two).fitted.probes is probes
    assert one.update([X + 2], progress=False).fitted.probes is probes
    one.save(path)
    with pytest.raises(MismatchError, match="made-up"):
        Monitor.load(path, network(nn.ReLU))


# --- Files without -------------------------------------------------------------------------


class Picky(nn.Module):
    """Fails on numbers it was not trained on, or has no answer for them, or a new one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(3, 4), how

    def forward(self, x: Tensor) -> Tensor:
        known = bool((x.unsqueeze(1) == X).all(2).any(1).all())
        if not known and self.how == "fails":
            raise ValueError("never seen such numbers")
        if not known and self.how == "nan":
            return self.layer(x) * torch.nan
        return self.layer(x) if known else self.layer(x) + torch.randn(1)


@pytest.mark.parametrize("how", ["fails", "nan", "random"])
def test_models_that_cannot_be_asked_are_fitted_all_the_same(path: Path, how: str) -> None:
    model = Picky(how)
    monitor = Monitor(model, Categorical(), rank=4, parameters=["layer.weight"])
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # it asks for values, which the fast engines do not like
        monitor.fit([X], progress=False)
    assert monitor.fitted.probes is None
    monitor.save(path)
    with pytest.warns(NoProbesWarning, match="the model takes none"):
        Monitor.load(path, model)


def test_older_files_load_with_a_notice_and_have_them_after_an_update() -> None:
    saved = Saved("nystrom")
    with pytest.warns(NoProbesWarning, match="earlier version.*another architecture"):
        monitor = saved.loaded()
    assert monitor.fitted.probes is None
    with pytest.warns(RepeatedDataWarning, match="nobody can tell"):  # nor digests of samples
        monitor.update(saved.inputs("second"), progress=False)
    assert monitor.fitted.probes is not None


TAMPERINGS: dict[str, Callable[[dict[str, Any]], object]] = {
    "shape": lambda probes: probes["batch"]["tensor"].update(shape=[2**40]),
    "negative": lambda probes: probes["batch"]["tensor"].update(shape=[-1]),
    "dtype": lambda probes: probes["batch"]["tensor"].update(dtype="load"),
    "kind": lambda probes: probes.update(batch={"object": 1}),
    "no kind": lambda probes: probes.update(batch=7),
    "range": lambda probes: probes["batch"]["tensor"].update(low="0"),
    "more": lambda probes: probes.update(path="/"),
    "fewer": lambda probes: probes.pop("batch"),
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_crafted_files_are_refused(path: Path, tampering: str) -> None:
    fitted().save(path)
    header, tensors = artifact.read(path, "monitor")
    TAMPERINGS[tampering](header["probes"])
    artifact.write(path, "monitor", header, tensors)
    with pytest.raises(CorruptArtifactError, match="expected probe inputs"):
        Monitor.load(path, network())
