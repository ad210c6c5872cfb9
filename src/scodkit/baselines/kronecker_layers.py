"""Which layers of a network have Kronecker factors, and why others have none."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from scodkit.baselines.weight_sets import copies
from scodkit.errors import OptionError
from scodkit.network import Inputs, Network

# layers named in a message
_NAMED = 8


def supported_parameters(
    network: Network, names: Iterable[str], example: Inputs, *, skip: bool
) -> list[str]:
    """Return the parameters whose layers have Kronecker factors, in the model's order.

    Args:
        network: The model, held in eval mode.
        names: The parameters asked for, all of their layers.
        example: A batch; its first samples are tried.
        skip: Whether layers without factors are left out rather than refused.

    Raises:
        OptionError: If some of them have none and are not to be left out, or if all have none.
    """
    model = copy.deepcopy(network.model)
    layers = {name: model.get_submodule(name) for name in dict.fromkeys(map(_owner, names))}
    reasons = {name: why for name, layer in layers.items() if (why := _by_kind(layer))}
    reasons |= _shared(model, layers)
    own = copy.copy(network)
    own.model = model
    rest = {name: layer for name, layer in layers.items() if name not in reasons}
    if rest:
        reasons |= dict(_by_use(own, rest, copies(example.samples(slice(0, 2)))))
    kept = [name for name in names if _owner(name) not in reasons]
    if reasons and not (skip and kept):
        raise OptionError(_refusal(reasons, bool(kept)))
    return kept


def _refusal(reasons: Mapping[str, str], some_left: bool) -> str:
    told = [f"{name or 'the model'} ({reason})" for name, reason in reasons.items()]
    more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    advice = "compare with another baseline here"
    if some_left:
        advice = (
            "type skip_unsupported=True to keep the weights of these layers as they are, or "
            "last_layer=True"
        )
    return (
        "expected layers that laplace-torch has Kronecker factors for (nn.Linear, nn.Conv2d, "
        f"each called once, in float32 or float64), got {', '.join(told[:_NAMED])}{more}; "
        f"{advice}"
    )


def _by_kind(layer: nn.Module) -> str | None:
    """Return why layers of a kind have no factors, or None."""
    kind = type(layer).__name__
    if not isinstance(layer, (nn.Linear, nn.Conv2d)):
        return kind
    own = dict(layer.named_parameters())
    if list(own) not in (["weight"], ["weight", "bias"]):
        return f"{kind} with {', '.join(own)}"
    if layer.weight.dtype not in (torch.float32, torch.float64):
        return f"{kind} in {layer.weight.dtype}"
    if len(own) == 1 and layer.weight.numel() == 1:
        return f"{kind} with a single weight"
    if isinstance(layer, nn.Conv2d):
        if layer.groups > 1:
            return f"{kind} with groups={layer.groups}"
        if layer.padding_mode != "zeros":
            return f"{kind} with padding_mode={layer.padding_mode!r}"
        spans = zip(layer.kernel_size, layer.dilation, strict=True)
        if layer.padding == "same" and any((k - 1) * d % 2 for k, d in spans):
            return f"{kind} padded more on one side than on the other"
    return None


def _shared(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the layers that have a parameter in common with another place in the model."""
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {
        name: f"{type(layer).__name__} with weights in common with another"
        for name, layer in layers.items()
        if any(places[id(p)] > 1 for p in layer.parameters())
    }


def _by_use(
    network: Network, layers: Mapping[str, nn.Module], few: Inputs
) -> Iterator[tuple[str, str]]:
    """Yield layers that are used in a way that has no factors, with the reason.

    Args:
        network: A copy of the user's, which is changed.
        layers: By name; of a kind that has factors.
        few: Some samples.
    """
    calls: dict[nn.Module, list[tuple[object, ...]]] = {layer: [] for layer in layers.values()}
    network.model.requires_grad_(False)
    for layer in calls:
        layer.register_forward_pre_hook(lambda own, inputs: calls[own].append(inputs))
        layer.requires_grad_(True)
    output = network(few)
    weights = [layer.get_parameter("weight") for layer in layers.values()]
    gradients: tuple[Tensor | None, ...] = (None,) * len(weights)
    if output.requires_grad:
        gradients = torch.autograd.grad(output.sum(), weights, allow_unused=True)
    for (name, layer), gradient in zip(layers.items(), gradients, strict=True):
        kind, given = type(layer).__name__, calls[layer]
        if len(given) != 1:
            yield name, f"{kind} called {len(given)} times"
        elif len(given[0]) != 1 or not _has_samples(given[0][0], few.batch_size):
            yield name, f"{kind} called with something else than a tensor with a row a sample"
        elif gradient is None:
            yield name, f"{kind} without influence on the output"


def _has_samples(value: object, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1 and len(value) == count


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]
