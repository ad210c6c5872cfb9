"""Selection of the weights to monitor, their layout in a flat vector, and fingerprints.

A selection (``"all"``, `LastLayers`, names and globs, a callable) is resolved once, against a
model and, for `LastLayers`, one forward pass; the result is a `ParameterSet`, in which each
weight has an index in the flat vector.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import parametrize

from scodkit.errors import ParameterSelectionError
from scodkit.model.inputs import Inputs, ordinary
from scodkit.numerics.hashing import digest_of
from scodkit.numerics.torch_private import Convolution

if TYPE_CHECKING:
    from scodkit.model.network import Network

# largest number of layers after a network's last convolution, norms included, that still
# count as its head
_LONGEST_HEAD = 8

_LISTED = 12  # names of parameters in an error


@dataclass(frozen=True)
class LastLayers:
    """The last layers of the network, in the order the forward pass first calls them.

    A layer is a module with parameters of its own. With ``fraction`` the choice follows the
    SCOD paper: at least two layers, and back to the last convolution if there is one close to
    the end. (The only one of a vision transformer is at its start.)

    Args:
        fraction: Share of the layers to keep, in (0, 1].
        count: Number of layers to keep, exactly.

    Examples:
        >>> LastLayers(count=2)
        LastLayers(fraction=None, count=2)
    """

    fraction: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.count is None):
            raise ParameterSelectionError(
                f"expected exactly one of fraction and count, got fraction={self.fraction}, "
                f"count={self.count}; type LastLayers(fraction=0.15) or LastLayers(count=2)"
            )
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ParameterSelectionError(
                f"expected 0 < fraction <= 1, got {self.fraction}; "
                "for a number of layers type LastLayers(count=2)"
            )
        if self.count is not None and self.count < 1:
            raise ParameterSelectionError(f"expected count >= 1, got {self.count}")


@dataclass(frozen=True)
class Block:
    """One parameter and its range in the flat vector of all chosen ones.

    Args:
        name: Qualified name, as in ``model.named_parameters()``.
        shape: Shape of the parameter.
        columns: Its range among the ``N`` chosen weights.
    """

    name: str
    shape: tuple[int, ...]
    columns: slice


@dataclass(frozen=True)
class ParameterSet:
    """The chosen parameters, each once, in a fixed order.

    Args:
        blocks: One per parameter, in the model's own order; they tile ``range(N)``.
    """

    blocks: tuple[Block, ...]

    @cached_property
    def num_parameters(self) -> int:
        """``N``, the number of weights."""
        return int(self.blocks[-1].columns.stop)

    @cached_property
    def widest(self) -> int:
        """The number of weights in the largest parameter."""
        return max(int(block.columns.stop - block.columns.start) for block in self.blocks)

    @cached_property
    def by_start(self) -> dict[int, slice]:
        """The columns of each parameter by its first column, in order."""
        return {block.columns.start: block.columns for block in self.blocks}

    @property
    def names(self) -> tuple[str, ...]:
        """Qualified names, in order."""
        return tuple(block.name for block in self.blocks)

    @property
    def sizes(self) -> dict[str, int]:
        """How many of the ``N`` columns each parameter has, by its name."""
        return {b.name: int(b.columns.stop - b.columns.start) for b in self.blocks}

    @property
    def selection(self) -> Selection:
        """What to type to choose them again."""
        return self.names

    def in_full(self) -> ParameterSet:
        """Return the weights themselves, with the columns of the flat vector of all."""
        return self

    def spread(self, directions: Tensor) -> Tensor:
        """Return directions ``(t, N)`` as directions in the flat vector of all weights."""
        return directions

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the chosen weights by name, detached, sharing memory with the model."""
        named = dict(model.named_parameters())
        return {name: ordinary(named[name].detach()) for name in self.names}

    def itemsize(self, model: nn.Module) -> int:
        """Return the item size of the chosen weights in bytes, the largest if they differ."""
        return max(int(weight.itemsize) for weight in self.weights(model).values())

    def divided(self, index: int, count: int) -> tuple[tuple[str, ...], range]:
        """Return one of several parts of whole parameters, with about equally many weights.

        Args:
            index: Index of the part, from 0.
            count: Number of parts.

        Returns:
            Names of its parameters, and their range among the ``N`` weights.

        Raises:
            ParameterSelectionError: If there are too few parameters for so many parts.
        """
        # a parameter belongs to the part that contains its middle
        middles = [(b.columns.start + b.columns.stop - 1) // 2 for b in self.blocks]
        owners = [middle * count // self.num_parameters for middle in middles]
        part = [b for b, owner in zip(self.blocks, owners, strict=True) if owner == index]
        if not part or len(set(owners)) < count:
            raise ParameterSelectionError(
                f"expected parameters for each of {count} processes, but the largest of the "
                f"{len(self.blocks)} has {self.widest} of {self.num_parameters} weights; "
                "start fewer processes, or choose more parameters"
            )
        first, last = part[0].columns, part[-1].columns
        return tuple(b.name for b in part), range(first.start, last.stop)


Selection = (
    Literal["all"]
    | LastLayers
    | Sequence[str]
    | Callable[[str, nn.Parameter], bool]
    | ParameterSet
)


def select(selection: Selection, network: Network, example: Inputs) -> ParameterSet:
    """Resolve a selection of parameters.

    Args:
        selection: ``"all"``, `LastLayers`, names or glob patterns, or a callable on
            ``(name, parameter)``; or a set that is already resolved. Frozen parameters count;
            tied ones count once.
        network: The model.
        example: A batch the model can be called with (`LastLayers` needs the call order).

    Returns:
        The chosen parameters, in the model's order.

    Raises:
        ParameterSelectionError: If nothing is chosen, a name matches nothing, or a chosen
            parameter is not a floating-point tensor.
    """
    if isinstance(selection, ParameterSet):
        return selection
    # named_parameters lists a tied parameter once, under its first name
    named = dict(network.model.named_parameters())
    chosen: Iterable[nn.Parameter]
    if isinstance(selection, str) and selection == "all":
        chosen = named.values()
    elif isinstance(selection, LastLayers):
        chosen = _last_layers(selection, network, example)
    elif callable(selection):
        chosen = [parameter for name, parameter in named.items() if selection(name, parameter)]
    elif isinstance(selection, Sequence) and not isinstance(selection, str):
        chosen = _matching(selection, network.model)
    else:
        raise ParameterSelectionError(
            f"expected 'all', LastLayers(...), a list of names or patterns, or a callable, "
            f"got {selection!r}; for one name type [{selection!r}]"
        )
    ids = set(map(id, chosen))
    return _tile({name: p for name, p in named.items() if id(p) in ids}, selection)


def endings(network: Network, example: Inputs) -> Iterator[ParameterSet]:
    """Yield the parameters of the last module that has some, of the last two, and so on.

    Args:
        network: The model.
        example: A batch the model can be called with; modules are in the order of the calls.
    """
    layers = _layers_in_call_order(network, example)
    for first in reversed(range(len(layers))):
        ids = {id(p) for layer in layers[first:] for p in _own_parameters(layer)}
        chosen = {n: p for n, p in network.model.named_parameters() if id(p) in ids}
        yield _tile(chosen, "all")


def select_names(model: nn.Module, names: Sequence[str]) -> ParameterSet:
    """Return the parameters with exactly these names, in this order."""
    named = dict(model.named_parameters())
    return _tile({name: named[name] for name in names}, names)


def _tile(chosen: Mapping[str, Tensor], selection: Selection) -> ParameterSet:
    if not chosen:
        raise ParameterSelectionError(
            f"expected at least one parameter, but {selection!r} chooses none; "
            "type parameters='all', or names from model.named_parameters()"
        )
    blocks: list[Block] = []
    start = 0
    for name, parameter in chosen.items():
        if not parameter.is_floating_point():
            raise ParameterSelectionError(
                f"expected real floating-point parameters, but {name!r} is "
                f"{parameter.dtype}; leave it out, for example with "
                "parameters=lambda name, p: p.is_floating_point()"
            )
        stop = start + parameter.numel()
        blocks.append(Block(name, tuple(parameter.shape), slice(start, stop)))
        start = stop
    return ParameterSet(tuple(blocks))


def _matching(patterns: Sequence[str], model: nn.Module) -> list[nn.Parameter]:
    # a tied parameter may be selected by any of its names
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen: list[nn.Parameter] = []
    for pattern in patterns:
        # a name with brackets is a pattern as well, and not of itself
        names = [pattern] if pattern in named else fnmatch.filter(named, pattern)
        if not names:
            more = f" and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
            raise ParameterSelectionError(
                f"expected names or patterns of parameters, but {pattern!r} matches none of "
                f"{', '.join(list(named)[:_LISTED])}{more}"
            )
        chosen += [named[name] for name in names]
    return chosen


def _last_layers(
    selection: LastLayers, network: Network, example: Inputs
) -> list[nn.Parameter]:
    layers = _layers_in_call_order(network, example)
    if selection.count is not None:
        first = max(0, len(layers) - selection.count)
    else:
        assert selection.fraction is not None
        # rounded first: 0.28 * 25 is a little over 7 in binary
        share = math.ceil(round(selection.fraction * len(layers), 9))
        first = len(layers) - max(2, share)
        # a convolution with many layers after it is not near the end: it embeds patches
        end = range(max(0, len(layers) - _LONGEST_HEAD - 1), len(layers))
        convolutions = [i for i in end if isinstance(layers[i], Convolution)]
        first = max(0, min([first, *convolutions[-1:]]))
    return [parameter for layer in layers[first:] for parameter in _own_parameters(layer)]


def _layers_in_call_order(network: Network, example: Inputs) -> list[nn.Module]:
    """Return the modules that own parameters, by first call.

    A module whose weights are used without calling it (the projection inside
    ``nn.MultiheadAttention``) comes right after the parent that uses them.
    """
    order: dict[nn.Module, int] = {}

    def note(module: nn.Module, _: object) -> None:
        order.setdefault(module, len(order))

    few = example.samples(slice(0, 2))
    model = network.running(few)
    with register_module_forward_pre_hook(note), torch.no_grad():
        network(few)
    ranks: dict[str, int] = {}
    layers: dict[nn.Module, int] = {}
    inside: set[nn.Module] = set()  # modules of parametrizations, which belong to their layer
    for name, module in model.named_modules():  # parents first; a shared module only once
        ranks[name] = order.get(module, ranks.get(name.rpartition(".")[0], -1))
        if parametrize.is_parametrized(module):
            inside.update(module.parametrizations.modules())
        if module not in inside and _own_parameters(module):
            layers[module] = ranks[name]
    return sorted(layers, key=layers.__getitem__)


def _own_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Return a layer's own parameters, including those of its parametrizations."""
    parameters = list(layer.parameters(recurse=False))
    if parametrize.is_parametrized(layer):
        parameters += list(layer.parametrizations.parameters())  # type: ignore[union-attr]
    return parameters


# --- Fingerprints ---


def state_fingerprint(model: nn.Module, but: Iterable[str] = ()) -> str:
    """Return a hash of the whole state of a model: every parameter and buffer.

    Args:
        model: The model.
        but: Names of buffers to leave out.
    """
    # not state_dict: it omits non-persistent buffers, and may contain other objects
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in but:
        buffers.pop(name, None)
    return digest_of(parameters | buffers)


@dataclass(frozen=True)
class Fingerprints:
    """Hashes that tie a fit to the weights of its model.

    Args:
        parameters: Hash of the chosen weights.
        model: Hash of the model's whole state, buffers included.
        exempt: Buffers left out of it, because the model's forward pass changes them.
    """

    parameters: str
    model: str
    exempt: tuple[str, ...] = ()

    @staticmethod
    def of(
        model: nn.Module, parameters: ParameterSet, exempt: Iterable[str] = ()
    ) -> Fingerprints:
        """Return the hashes of a model in its current state."""
        names = tuple(sorted(exempt))
        weights = digest_of(parameters.weights(model))
        return Fingerprints(weights, state_fingerprint(model, names), names)

    def document(self) -> dict[str, str]:
        """Return the hashes as plain data."""
        return {"parameters": self.parameters, "model": self.model}

    def difference(self, other: Fingerprints) -> str | None:
        """Return a description of what differs, or None."""
        if self.parameters != other.parameters:
            return "the chosen weights differ"
        if self.model != other.model:
            return "the chosen weights agree, but other weights or buffers differ"
        return None

    def difference_to(self, model: nn.Module, parameters: ParameterSet) -> str | None:
        """Return a description of how a model's contents differ, or None.

        Args:
            model: The model in its current state.
            parameters: The chosen weights of the fit.
        """
        missing = set(parameters.names) - dict(model.named_parameters()).keys()
        if missing:
            return f"of the chosen weights {min(missing)} is gone"
        return self.difference(Fingerprints.of(model, parameters, self.exempt))
