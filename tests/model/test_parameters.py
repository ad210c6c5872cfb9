"""Which weights are chosen, where they sit, and what their fingerprint notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cases import CASES, TiedEmbedding, conv_batchnorm, mlp
from scodkit.errors import ParameterSelectionError
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import (
    Fingerprints,
    LastLayers,
    ParameterSet,
    Selection,
    select,
    select_names,
    state_fingerprint,
)


class OutOfOrder(nn.Module):
    """Calls its layers in another order than it defines them, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2)
        self.twice = nn.Linear(2, 2)
        self.first = nn.Linear(2, 2)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.last(self.twice(self.first(x))))


class AttentionThenHead(nn.Module):
    """``out_proj`` of the attention is used, but never called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.embed = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        return self.head(self.attend(y, y, y, need_weights=False)[0].mean(1))


class SharedLayer(nn.Module):
    """One layer that two parents hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.left = nn.Sequential(nn.Linear(2, 2))
        self.right = nn.Sequential(self.left[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.right(torch.tanh(self.left(self.first(x))))


class OwnParameter(nn.Module):
    """A root module that owns a parameter beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x)


def convs_then_linears(convolutions: int, linears: int) -> nn.Module:
    convs = [nn.Conv1d(2, 2, 1) for _ in range(convolutions)]
    return nn.Sequential(*convs, nn.Flatten(), *[nn.Linear(2, 2) for _ in range(linears)])


PLANE = Inputs((torch.ones(2, 2),), {})
SIGNAL = Inputs((torch.ones(2, 2, 1),), {})
SEQUENCE = Inputs((torch.ones(2, 3, 2),), {})
TOKENS = Inputs((torch.zeros(2, 4, dtype=torch.long),), {})
TRIPLE = Inputs((torch.ones(2, 3),), {})


def chosen(selection: Selection, model: nn.Module, call: Inputs = TRIPLE) -> ParameterSet:
    network = Network(model)
    with network.evaluating():
        return select(selection, network, call)


def layers_of(parameters: ParameterSet) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] for name in parameters.names))


# --- What is chosen ------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_tiles_every_parameter_once_in_order(case) -> None:
    model = case.model(3)
    parameters = chosen("all", model, case.inputs(2, 3))
    named = dict(model.named_parameters())
    assert parameters.names == tuple(named)
    assert parameters.num_parameters == sum(p.numel() for p in named.values())
    start = 0
    for block in parameters.blocks:
        assert block.columns == slice(start, start + named[block.name].numel())
        assert block.shape == tuple(named[block.name].shape)
        start = block.columns.stop


@given(st.sets(st.sampled_from([name for name, _ in mlp(2).named_parameters()]), min_size=1))
def test_blocks_of_any_choice_tile_the_range_in_the_models_order(names: set[str]) -> None:
    model = mlp(2)
    parameters = chosen(sorted(names, reverse=True), model)
    assert parameters.names == tuple(n for n, _ in model.named_parameters() if n in names)
    columns = [i for b in parameters.blocks for i in range(b.columns.start, b.columns.stop)]
    assert columns == list(range(parameters.num_parameters))


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (["2.weight"], ("2.weight",)),
        (("2.bias", "0.weight"), ("0.weight", "2.bias")),
        (["*.bias"], ("0.bias", "2.bias")),
        (["0.*", "0.weight", "2.b*"], ("0.weight", "0.bias", "2.bias")),
        (["[2-9].*"], ("2.weight", "2.bias")),
        (lambda name, p: p.ndim == 2, ("0.weight", "2.weight")),
        (lambda name, p: name.startswith("2"), ("2.weight", "2.bias")),
    ],
)
def test_names_globs_and_callables(selection: Selection, expected: tuple[str, ...]) -> None:
    assert chosen(selection, mlp(2)).names == expected


def test_a_name_is_itself_before_it_is_a_pattern() -> None:
    model = nn.ModuleDict({"a[0]": nn.Linear(2, 1), "a0": nn.Linear(2, 1)})
    chosen = select(["a[0].weight"], Network(model), PLANE)
    assert chosen.names == ("a[0].weight",)


def test_a_resolved_set_passes_through() -> None:
    parameters = chosen(["0.*"], mlp(2))
    assert chosen(parameters, mlp(2)) is parameters


@pytest.mark.parametrize("selection", [["out.weight"], ["embed.weight"], ["*.weight"], "all"])
def test_a_tied_weight_counts_once_by_any_of_its_names(selection: Selection) -> None:
    names = chosen(selection, TiedEmbedding(5), TOKENS).names
    assert names.count("embed.weight") == 1
    assert "out.weight" not in names


def test_the_last_layer_may_own_a_tied_weight() -> None:
    assert chosen(LastLayers(count=1), TiedEmbedding(5), TOKENS).names == ("embed.weight",)


@pytest.mark.parametrize("selection", ["all", ["0.weight"], LastLayers(count=2)])
def test_frozen_parameters_count(selection: Selection) -> None:
    expected = chosen(selection, mlp(2))
    assert chosen(selection, mlp(2).requires_grad_(False)) == expected


def test_select_names_keeps_the_order_given() -> None:
    parameters = select_names(mlp(2), ["2.bias", "0.weight"])
    assert parameters.names == ("2.bias", "0.weight")
    assert [b.columns for b in parameters.blocks] == [slice(0, 2), slice(2, 17)]


def test_weights_share_memory_and_are_detached() -> None:
    model = mlp(2)
    weights = chosen(["0.*"], model).weights(model)
    assert list(weights) == ["0.weight", "0.bias"]
    assert weights["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert not any(w.requires_grad for w in weights.values())


def test_itemsize_is_that_of_the_widest_chosen_weight() -> None:
    model = mlp(2).to(torch.bfloat16)
    model[2].double()
    assert chosen(["0.*"], model).itemsize(model) == 2
    assert select_names(model, ["0.bias", "2.bias"]).itemsize(model) == 8


# --- Last layers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "call", "count", "expected"),
    [
        (lambda: mlp(2), TRIPLE, 1, ["2"]),
        (lambda: mlp(2), TRIPLE, 2, ["0", "2"]),
        (lambda: mlp(2), TRIPLE, 9, ["0", "2"]),
        (lambda: convs_then_linears(2, 2), SIGNAL, 1, ["4"]),  # count is exact, no conv rule
        (OutOfOrder, PLANE, 1, ["last"]),
        (OutOfOrder, PLANE, 2, ["last", "twice"]),
        (OutOfOrder, PLANE, 3, ["last", "twice", "first"]),
        (AttentionThenHead, SEQUENCE, 1, ["head"]),
        (AttentionThenHead, SEQUENCE, 2, ["head", "attend.out_proj"]),
        (AttentionThenHead, SEQUENCE, 3, ["head", "attend", "attend.out_proj"]),
        (SharedLayer, PLANE, 1, ["left.0"]),
        (SharedLayer, PLANE, 2, ["first", "left.0"]),
        (OwnParameter, PLANE, 1, ["inner"]),
        (OwnParameter, PLANE, 2, ["", "inner"]),
    ],
)
def test_last_layers_by_count_follow_the_calls(
    build: Callable[[], nn.Module], call: Inputs, count: int, expected: list[str]
) -> None:
    assert layers_of(chosen(LastLayers(count=count), build(), call)) == expected


@pytest.mark.parametrize(
    ("convolutions", "linears", "fraction", "layers"),
    [
        (0, 10, 0.15, 2),
        (0, 10, 0.01, 2),  # never fewer than two
        (0, 10, 0.31, 4),  # rounded up
        (0, 10, 1.0, 10),
        (0, 1, 0.5, 1),
        (0, 25, 0.28, 7),  # seven exactly, though 0.28 * 25 rounds above it
        (2, 1, 0.15, 2),  # the last convolution is among the two
        (2, 5, 0.15, 6),  # back to the last convolution
        (2, 8, 0.15, 9),  # as long as only a head follows it
        (2, 9, 0.15, 2),
        (2, 5, 1.0, 7),
        (7, 1, 0.5, 4),  # more convolutions than the last one
        (1, 0, 0.5, 1),
    ],
)
def test_last_layers_by_fraction_follow_the_paper(
    convolutions: int, linears: int, fraction: float, layers: int
) -> None:
    model = convs_then_linears(convolutions, linears)
    call = SIGNAL if convolutions else PLANE
    owners = [name for name, m in model.named_children() if list(m.parameters())]
    parameters = chosen(LastLayers(fraction=fraction), model, call)
    assert layers_of(parameters) == owners[-layers:]


def test_last_layers_leave_no_hooks_and_no_change_behind() -> None:
    model = conv_batchnorm(2).train()
    before = state_fingerprint(model)
    chosen(LastLayers(count=2), model, Inputs((torch.ones(2, 2, 5, 5),), {}))
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert state_fingerprint(model) == before
    assert all(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_last_layers_leave_no_hooks_when_the_model_raises() -> None:
    model = mlp(2)
    with pytest.raises(RuntimeError, match="shapes"):
        chosen(LastLayers(count=2), model, PLANE)
    assert not any(m._forward_pre_hooks for m in model.modules())


# --- Fingerprints --------------------------------------------------------------------------


def weights_fingerprint(parameters: ParameterSet, model: nn.Module) -> str:
    return Fingerprints.of(model, parameters).parameters


def flip_lowest_bit(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.view(torch.int32).reshape(-1)[0] ^= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fingerprint_is_a_function_of_the_weights(dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return mlp(2).to(dtype)

    parameters = chosen(["0.*"], build().float())
    assert weights_fingerprint(parameters, build()) == weights_fingerprint(parameters, build())
    assert weights_fingerprint(parameters, build()) != weights_fingerprint(
        parameters, build().half()
    )
    assert state_fingerprint(build()) == state_fingerprint(build())


@pytest.mark.parametrize("name", ["0.weight", "0.bias"])
def test_fingerprint_sees_one_bit_of_a_chosen_weight(name: str) -> None:
    model = mlp(2)
    parameters = chosen(["0.*"], model)
    before = weights_fingerprint(parameters, model), state_fingerprint(model)
    flip_lowest_bit(model.get_parameter(name))
    assert weights_fingerprint(parameters, model) != before[0]
    assert state_fingerprint(model) != before[1]


def test_fingerprint_ignores_other_weights_and_the_state_does_not() -> None:
    model = mlp(2)
    parameters = chosen(["0.*"], model)
    before = weights_fingerprint(parameters, model), state_fingerprint(model)
    flip_lowest_bit(model[2].weight)
    assert weights_fingerprint(parameters, model) == before[0]
    assert state_fingerprint(model) != before[1]


def test_fingerprint_sees_a_new_shape_of_the_same_bytes() -> None:
    model = nn.Linear(6, 1, bias=False)
    parameters = chosen("all", model, Inputs((torch.ones(1, 6),), {}))
    before = weights_fingerprint(parameters, model)
    model.weight = nn.Parameter(model.weight.detach().reshape(2, 3))
    assert weights_fingerprint(parameters, model) != before


@pytest.mark.parametrize("persistent", [True, False])
def test_state_fingerprint_sees_every_buffer(persistent: bool) -> None:
    model = mlp(2)
    model.register_buffer("offset", torch.zeros(3), persistent=persistent)
    before = state_fingerprint(model)
    model.offset[0] = 1.0
    assert state_fingerprint(model) != before


def test_state_fingerprint_takes_a_model_with_extra_state() -> None:
    class Versioned(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

    model = Versioned(2, 2)
    before = state_fingerprint(model)
    flip_lowest_bit(model.weight)
    assert state_fingerprint(model) != before


# --- Errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"exactly one of fraction and count.*LastLayers\(fraction=0\.15\)"),
        ({"fraction": 0.5, "count": 2}, r"exactly one.*count=2.*LastLayers\(count=2\)"),
        ({"fraction": 0.0}, r"0 < fraction <= 1, got 0\.0.*LastLayers\(count=2\)"),
        ({"fraction": 2}, r"0 < fraction <= 1, got 2.*LastLayers\(count=2\)"),
        ({"fraction": float("nan")}, r"0 < fraction <= 1, got nan"),
        ({"count": 0}, r"count >= 1, got 0"),
    ],
)
def test_last_layers_refuse_options_out_of_range(options: dict, says: str) -> None:
    with pytest.raises(ParameterSelectionError, match=says):
        LastLayers(**options)


def never(name: str, parameter: nn.Parameter) -> bool:
    return False


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        ("0.weight", r"got '0\.weight'; for one name type \['0\.weight'\]"),
        (3, r"expected 'all', LastLayers.*got 3"),
        (["0.weight", "fc.*"], r"'fc\.\*' matches none of 0\.weight, 0\.bias, 2\.weight"),
        ([], r"\[\] chooses none; type parameters='all'.*named_parameters"),
        (never, r"chooses none; type parameters='all'.*named_parameters"),
    ],
)
def test_choices_of_nothing_are_refused(selection: Selection, says: str) -> None:
    with pytest.raises(ParameterSelectionError, match=says):
        chosen(selection, mlp(2))


def test_a_long_list_of_names_is_cut_in_the_message() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(15)])
    with pytest.raises(ParameterSelectionError, match=r"(?m)11\.weight and 3 more$"):
        chosen(["fc"], model, PLANE)


@pytest.mark.parametrize("selection", ["all", LastLayers(count=1)])
def test_a_model_without_parameters_is_refused(selection: Selection) -> None:
    with pytest.raises(ParameterSelectionError, match="chooses none"):
        chosen(selection, nn.Tanh())


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_parameters_that_are_not_real_are_refused(dtype: torch.dtype) -> None:
    model = mlp(2)
    odd = torch.zeros(2, dtype=dtype)
    model.odd = nn.Parameter(odd, requires_grad=False)
    with pytest.raises(ParameterSelectionError, match=r"'odd' is torch\..*is_floating_point"):
        chosen(["odd"], model)
    expected: Sequence[str] = ("0.weight", "0.bias", "2.weight", "2.bias")
    assert chosen(lambda name, p: p.is_floating_point(), model).names == expected
