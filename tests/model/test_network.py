"""Batches in, outputs out, and the model left as it was found."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import conv_batchnorm, mlp
from scodkit.errors import BatchError
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network

X = torch.arange(6.0).reshape(2, 3)
Y = torch.tensor([0, 1])
IDS = torch.tensor([[1, 2], [3, 4]])
MASK = torch.tensor([[1, 1], [1, 0]])
WAIT_S = 20.0


class Keywords(nn.Module):
    """Takes keywords, and would take labels too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None
    ) -> Tensor:
        assert labels is None
        embedded = self.embed(input_ids)
        if attention_mask is not None:
            embedded = embedded * attention_mask[..., None]
        return embedded.sum(1)


class AnyKeywords(Keywords):
    """Takes whatever it is given."""

    def forward(self, **kwargs: Any) -> Tensor:
        return super().forward(**kwargs)


class Returns(nn.Module):
    """Returns whatever a function makes of its input."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


@dataclass
class ModelOutput:
    """What Hugging Face models return."""

    logits: Any
    loss: Tensor | None = None


def assert_called_with(call: Inputs, args: list[Any], kwargs: dict[str, Any]) -> None:
    assert len(call.args) == len(args)
    assert call.kwargs.keys() == kwargs.keys()
    pairs = [*zip(call.args, args, strict=True), *((call.kwargs[k], kwargs[k]) for k in kwargs)]
    for got, expected in pairs:
        assert torch.equal(got, expected) if isinstance(got, Tensor) else got == expected


# --- Batches -------------------------------------------------------------------------------

DICT = {"input_ids": IDS, "attention_mask": MASK}


@pytest.mark.parametrize(
    ("model", "batch", "args", "kwargs"),
    [
        pytest.param(mlp(2), X, [X], {}, id="tensor"),
        pytest.param(mlp(2), (X, Y), [X], {}, id="tuple"),
        pytest.param(mlp(2), [X, Y], [X], {}, id="list"),
        pytest.param(mlp(2), [X], [X], {}, id="list-of-one"),
        pytest.param(mlp(2), ((X, Y), Y), [X, Y], {}, id="tuple-of-positionals"),
        pytest.param(Keywords(), DICT, [], DICT, id="dict"),
        pytest.param(Keywords(), UserDict(DICT), [], DICT, id="mapping"),
        pytest.param(Keywords(), DICT | {"labels": Y}, [], DICT, id="dict-labels"),
        pytest.param(Keywords(), DICT | {"index": Y}, [], DICT, id="dict-unknown"),
        pytest.param(Keywords(), (DICT, Y), [], DICT, id="tuple-of-dict"),
        pytest.param(
            AnyKeywords(),
            DICT | {"label": Y, "labels": Y, "target": Y, "targets": Y},
            [],
            DICT,
            id="any-keywords-labels",
        ),
        pytest.param(
            AnyKeywords(), {"x": X, "scale": 2.0}, [], {"x": X, "scale": 2.0}, id="any-keywords"
        ),
    ],
)
def test_batches_of_every_form(
    model: nn.Module, batch: Any, args: list[Any], kwargs: dict[str, Any]
) -> None:
    assert_called_with(Network(model).inputs_of(batch), args, kwargs)


@pytest.mark.parametrize(
    ("pick", "args", "kwargs"),
    [
        (lambda batch: batch["image"], [X], {}),
        (lambda batch: (batch["image"], batch["mask"]), [X, MASK], {}),
        (lambda batch: {"input": batch["image"]}, [], {"input": X}),
    ],
)
def test_inputs_picks_what_goes_in(
    pick: Callable[[Any], Any], args: list[Any], kwargs: dict[str, Any]
) -> None:
    network = Network(mlp(2), inputs=pick)
    assert_called_with(network.inputs_of({"image": X, "mask": MASK, "label": Y}), args, kwargs)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (3, r"got int; pass inputs=lambda batch"),
        ("text", r"got str; pass inputs=lambda batch"),
        (None, r"got NoneType; pass inputs=lambda batch"),
        ([], r"at least one tensor.*got \[\]; pick them"),
        ([["a", "b"], Y], r"at least one tensor.*got \[.str., .str.\]; pick them"),
        ({"labels": Y}, r"a dict with inputs.*input_ids, .*got labels; .*inputs=lambda batch"),
        ({"input_ids": [1, 2]}, r"at least one tensor.*got \['list'\]; pick them"),
        (torch.tensor(1.0), r"first axis, got shapes \[\(\)\]; pick or reshape them"),
        (
            {"input_ids": IDS, "attention_mask": MASK[:1]},
            r"shapes \[\(2, 2\), \(1, 2\)\]; pick",
        ),
        ({"input_ids": IDS, "attention_mask": torch.tensor(1)}, r"\[\(2, 2\), \(\)\]; pick"),
    ],
)
def test_batches_without_a_batch_of_tensors_are_refused(batch: Any, says: str) -> None:
    with pytest.raises(BatchError, match=says):
        Network(Keywords()).inputs_of(batch)


def test_samples_cuts_every_tensor_and_nothing_else() -> None:
    call = Inputs((X, "nearest"), {"mask": MASK, "scale": 2.0}).samples(slice(1, 2))
    assert call.batch_size == 1
    assert torch.equal(call.args[0], X[1:])
    assert torch.equal(call.kwargs["mask"], MASK[1:])
    assert call.args[1] == "nearest"
    assert call.kwargs["scale"] == 2.0


# --- Outputs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "outputs", "expected"),
    [
        pytest.param(lambda x: x, None, X, id="tensor"),
        pytest.param(lambda x: x[:, 0], None, X[:, :1], id="one-axis"),
        pytest.param(lambda x: x.reshape(2, 3, 1), None, X.reshape(2, 3, 1), id="map"),
        pytest.param(lambda x: ModelOutput(x), None, X, id="logits"),
        pytest.param(lambda x: (x, 2 * x), lambda out: out[1], 2 * X, id="picked"),
        pytest.param(lambda x: ModelOutput(x), lambda out: 3 * out.logits, 3 * X, id="both"),
        pytest.param(lambda x: x, lambda out: out[:, 1], X[:, 1:2], id="picked-one-axis"),
    ],
)
def test_outputs_of_every_form(
    make: Callable[[Tensor], Any], outputs: Callable[[Any], Tensor] | None, expected: Tensor
) -> None:
    network = Network(Returns(make), outputs=outputs)
    call = network.inputs_of(X)
    assert torch.equal(network(call), expected)
    assert torch.equal(network.at({}, call), expected)


@pytest.mark.parametrize(
    ("make", "outputs", "says"),
    [
        (lambda x: (x, x), None, r"got tuple; .*outputs=lambda out: out\[0\]"),
        (lambda x: {"logits": x}, None, r"got dict; .*outputs=lambda out"),
        (lambda x: ModelOutput([x]), None, r"got ModelOutput; .*outputs=lambda out"),
        (lambda x: x, lambda out: None, r"got NoneType; .*outputs=lambda out"),
        (lambda x: x.sum(), None, r"shape \(2, \.\.\.\).*got \(\); .*outputs=lambda out"),
        (lambda x: x.T, None, r"shape \(2, \.\.\.\).*got \(3, 2\); .*outputs=lambda out"),
        (lambda x: x, lambda out: out[0], r"shape \(2, \.\.\.\).*got \(3,\); .*outputs="),
    ],
)
def test_outputs_of_the_wrong_form_are_refused(
    make: Callable[[Tensor], Any], outputs: Callable[[Any], Any] | None, says: str
) -> None:
    network = Network(Returns(make), outputs=outputs)
    with pytest.raises(BatchError, match=says):
        network(network.inputs_of(X))


def test_at_replaces_some_weights_for_one_call() -> None:
    model = mlp(2)
    network = Network(model)
    call = network.inputs_of(X)
    before = network(call)
    shifted = network.at({"2.bias": model[2].bias.detach() + 1.0}, call)
    torch.testing.assert_close(shifted, before + 1.0)
    assert torch.equal(network(call), before)


# --- Wrappers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        nn.DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
        lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    ],
    ids=["bare", "parallel", "compiled", "parallel-compiled", "compiled-parallel"],
)
def test_wrappers_are_looked_through(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp(2)
    network = Network(wrap(model))
    assert network.model is model
    assert torch.equal(network(network.inputs_of((X, Y))), model(X))


def test_a_wrapped_model_names_its_keywords() -> None:
    call = Network(nn.DataParallel(Keywords())).inputs_of(DICT | {"index": Y})
    assert call.kwargs.keys() == DICT.keys()


@pytest.mark.parametrize("model", [mlp(2), nn.Tanh()], ids=["with", "without-parameters"])
def test_device_is_that_of_the_weights(model: nn.Module) -> None:
    assert Network(model).device == torch.device("cpu")


# --- Eval mode -----------------------------------------------------------------------------


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def mixed() -> nn.Module:
    model = conv_batchnorm(2).train()
    model[1].eval()
    return model


@pytest.mark.parametrize(
    "build",
    [mixed, lambda: mlp(2).train(), lambda: mlp(2).eval()],
    ids=["mixed", "train", "eval"],
)
def test_what_is_run_is_in_eval_mode_and_the_model_in_its_own(
    build: Callable[[], nn.Module],
) -> None:
    model = build()
    before = modes(model)
    network, call = Network(model), Inputs((torch.randn(2, 1, 4, 4),), {})
    with network.evaluating(), Network(nn.DataParallel(model)).evaluating():
        assert not any(modes(network.running(call)))
        assert modes(model) == before
    assert modes(model) == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluating_makes_gradients_possible_and_restores_the_mode(mode: type) -> None:
    model = mlp(2)
    network = Network(model)
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        call = network.inputs_of(torch.ones(2, 3))
        with network.evaluating():
            gradient = torch.autograd.grad(network(call).sum(), model[0].weight)[0]
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert not gradient.is_inference()
    expected = torch.autograd.grad(model(torch.ones(2, 3)).sum(), model[0].weight)[0]
    torch.testing.assert_close(gradient, expected)


def test_inputs_made_in_inference_mode_can_be_saved_for_backward() -> None:
    network = Network(mlp(2))
    with torch.inference_mode():
        x = torch.ones(2, 3)
        inside = network.inputs_of(x)
    outside = network.inputs_of((x, Y))
    for call in (inside, outside):
        assert not call.args[0].is_inference()


def test_ordinary_inputs_are_not_copied() -> None:
    assert Network(mlp(2)).inputs_of(X).args[0].data_ptr() == X.data_ptr()


def test_one_thread_at_a_time_holds_a_network() -> None:
    network = Network(mixed())
    first_inside, second_asked, second_inside = (threading.Event() for _ in range(3))

    def first() -> bool:
        with network.evaluating():
            first_inside.set()
            assert second_asked.wait(WAIT_S)
            return second_inside.wait(0.2)

    def second() -> None:
        assert first_inside.wait(WAIT_S)
        second_asked.set()
        with network.at_precision(torch.bfloat16).evaluating():
            second_inside.set()

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(first), pool.submit(second)
        assert not one.result(WAIT_S)
        two.result(WAIT_S)


def test_another_monitor_of_the_model_is_not_held_up() -> None:
    model = mlp(2)

    def other() -> bool:
        with Network(model).evaluating():
            return True

    with ThreadPoolExecutor(1) as pool, Network(model).evaluating():
        assert pool.submit(other).result(WAIT_S)


def test_weights_replaced_by_two_threads_stay_apart() -> None:
    both_inside = threading.Barrier(2)

    class Meeting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            # where calls take turns the other one never comes
            with contextlib.suppress(threading.BrokenBarrierError):
                both_inside.wait(0.2)
            y = x * self.weight[0, 0]
            with contextlib.suppress(threading.BrokenBarrierError):
                both_inside.wait(0.2)
            return y

    model = Meeting(1, 1, bias=False)
    own = model.weight
    network = Network(model)

    def scaled(factor: float) -> Tensor:
        with network.evaluating():
            return network.at({"weight": torch.full((1, 1), factor)}, network.inputs_of(X))

    with ThreadPoolExecutor(2) as pool:
        two, three = pool.map(scaled, [2.0, 3.0])
    assert torch.equal(two, 2 * X)
    assert torch.equal(three, 3 * X)
    assert model.weight is own


def test_many_threads_never_see_another_mode() -> None:
    model = mixed()
    before = modes(model)
    start = threading.Barrier(6)

    def work(_: int) -> bool:
        start.wait(WAIT_S)
        same = True
        for _round in range(10):
            with Network(model).evaluating():
                time.sleep(1e-4)  # let another thread run
                same &= modes(model) == before
        return same

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))
    assert modes(model) == before
