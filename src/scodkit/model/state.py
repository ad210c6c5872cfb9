"""Whether a model is as it was at the fit: a look at counters, digests where one moved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn

from scodkit.errors import StaleMonitorError
from scodkit.model.network import Network
from scodkit.model.parameters import ParameterSet, state_fingerprint

_version = attrgetter("_version")
_place = Tensor.data_ptr

# tensors and layers that a message names
_NAMED = 4

_EVERY_MODULE = frozenset(vars(nn.Module()))

# what an attribute may be to be built into a recording without a trace


@dataclass(frozen=True)
class Fingerprints:
    """Hashes that tie a fit to the weights it was made with.

    Args:
        parameters: Of the chosen weights.
        model: Of the model's whole state, buffers included.
        exempt: Buffers left out of it, as the model's own forward pass changes them.
    """

    parameters: str
    model: str
    exempt: tuple[str, ...] = ()

    @staticmethod
    def of(
        model: nn.Module, parameters: ParameterSet, exempt: Iterable[str] = ()
    ) -> Fingerprints:
        """Return the hashes of a model as it stands."""
        names = tuple(sorted(exempt))
        state = state_fingerprint(model, names)
        return Fingerprints(parameters.fingerprint(model), state, names)

    def document(self) -> dict[str, str]:
        """Return the hashes as plain data."""
        return {"parameters": self.parameters, "model": self.model}

    def difference(self, other: Fingerprints) -> str | None:
        """Return in words what differs, or None."""
        if self.parameters != other.parameters:
            return "the chosen weights differ"
        if self.model != other.model:
            return "the chosen weights agree, but other weights or buffers differ"
        return None

    def difference_to(self, model: nn.Module, parameters: ParameterSet) -> str | None:
        """Return in words how a model's contents differ, or None.

        Args:
            model: As it is now.
            parameters: The chosen weights of the fit.
        """
        gone = set(parameters.names) - dict(model.named_parameters()).keys()
        if gone:
            return f"of the chosen weights {min(gone)} is gone"
        return self.difference(Fingerprints.of(model, parameters, self.exempt))


class StateWatch:
    """Notices that a model has changed, in microseconds as long as it has not.

    Looked at are the identities of all modules, parameters and buffers, the version counters of
    all tensors, and where parameters lie in memory. What is written past the counters, through
    ``.data`` or a numpy view, is seen by a look at the contents alone.

    Args:
        network: The model, as it is meant to stay.
        renewal: What to type to fit again, for messages.
    """

    def __init__(
        self,
        network: Network,
        renewal: str = "monitor.renew(train_loader, heldout_loader)",
    ) -> None:
        self._network, self._renewal = network, renewal
        self._noted = _Noted.of(network)

    def unmoved(self) -> bool:
        """Return whether nothing has happened that may have changed the model."""
        noted = self._noted
        try:
            return (
                all(map(is_, map(getitem, noted.owners, noted.keys), noted.values))
                and list(map(len, noted.children)) == noted.sizes
                and list(map(_version, noted.counted)) == noted.versions
                and list(map(_place, noted.placed)) == noted.places
                and noted.exempt == self._network.volatile
            )
        except KeyError:  # something was taken out
            return False

    def settled(
        self, fingerprints: Fingerprints, parameters: ParameterSet, doing: str
    ) -> Fingerprints:
        """Look at the model's contents, and go by what it is now from here on.

        Args:
            fingerprints: Of the model that was noted.
            parameters: The chosen weights.
            doing: What is about to be done, for the message.

        Returns:
            The fingerprints, which leave out what the model was seen to change itself.

        Raises:
            StaleMonitorError: If the model is not the one of the fit any more.
        """
        model, exempt = self._network.model, self._network.volatile
        noted, now = self._noted, _Noted.of(self._network)
        moved = [name for name in noted.moved(now) if name not in exempt]
        known = exempt <= set(fingerprints.exempt)
        difference = noted.other_layers(now)
        # a buffer that nobody knew to change is in the fingerprints: then only counters tell
        if difference is None and (moved or known):
            difference = fingerprints.difference_to(model, parameters)
        if difference is not None:
            some = ", ".join(moved[:_NAMED]) + (" ..." if len(moved) > _NAMED else "")
            raise StaleMonitorError(
                f"expected the model of the fit for {doing}, but {difference}"
                + (f" (touched since: {some})" if moved else "")
                + f"; load the weights of that time, or fit again: {self._renewal}"
            )
        if not known:
            names = exempt.union(fingerprints.exempt)
            fingerprints = Fingerprints.of(model, parameters, names)
        self._noted = now
        return fingerprints


@dataclass(frozen=True)
class _Noted:
    """A model at a glance: where its tensors and layers are kept, and what is there.

    Args:
        names: Of what is kept, as in the model.
        owners: The dict that keeps each.
        keys: Under what.
        values: What is there.
        children: The dicts of layers, which may grow.
        sizes: How many layers there are in each.
        counted: Tensors with a counter.
        versions: What it is at.
        placed: Parameters that lie somewhere; they are moved without a new one being made.
        places: Where.
        exempt: Buffers that the model's own forward pass changes.
    """

    names: list[str]
    owners: list[dict[str, Any]]
    keys: list[str]
    values: list[Any]
    children: list[dict[str, Any]]
    sizes: list[int]
    counted: list[Tensor]
    versions: list[int]
    placed: list[Tensor]
    places: list[int]
    exempt: frozenset[str]

    @staticmethod
    def of(network: Network) -> _Noted:
        """Return a model as it stands."""
        exempt = network.volatile
        modules = dict(network.model.named_modules())
        kept = [
            (name, owner, key)
            for prefix, module in modules.items()
            for owner in (module._parameters, module._buffers, module._modules)
            for key in list(owner.keys())
            if (name := f"{prefix}.{key}".lstrip(".")) not in exempt
        ]
        owners: list[Any] = [owner for _, owner, _ in kept]
        values = [owner[key] for _, owner, key in kept]
        children = [module._modules for module in modules.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        counted = [tensor for tensor in tensors if not tensor.is_inference()]
        parameters = (tensor for tensor in tensors if isinstance(tensor, nn.Parameter))
        placed: list[Tensor] = [p for p in parameters if _lies_somewhere(p)]
        return _Noted(
            names=[name for name, *_ in kept],
            owners=owners,
            keys=[key for *_, key in kept],
            values=values,
            children=children,
            sizes=list(map(len, children)),
            counted=counted,
            versions=list(map(_version, counted)),
            placed=placed,
            places=list(map(_place, placed)),
            exempt=exempt,
        )

    def moved(self, now: _Noted) -> list[str]:
        """Return the names of tensors that may have changed since, or are new or gone."""
        before, after = self._marks(), now._marks()
        names = dict.fromkeys([*before, *after])
        return [name for name in names if before.get(name) != after.get(name)]

    def _marks(self) -> dict[str, tuple[int | None, ...]]:
        versions = dict(zip(map(id, self.counted), self.versions, strict=True))
        places = dict(zip(map(id, self.placed), self.places, strict=True))
        return {
            name: (id(value), versions.get(id(value)), places.get(id(value)))
            for name, value in zip(self.names, self.values, strict=True)
            if not isinstance(value, nn.Module)
        }

    def other_layers(self, now: _Noted) -> str | None:
        """Return in words which layer came or went, or took the place of one unlike it."""
        before, after = self._layers(), now._layers()
        for name in dict.fromkeys([*before, *after]):
            if name not in after:
                return f"the layer {name} is gone"
            if name not in before:
                return f"the layer {name} is new"
            old, new = before[name], after[name]
            if old is not new and not _alike(old, new):
                return f"the layer {name} was {old} and is {new}"
        return None

    def _layers(self) -> dict[str, nn.Module]:
        named = zip(self.names, self.values, strict=True)
        return {name: value for name, value in named if isinstance(value, nn.Module)}


def _lies_somewhere(tensor: Tensor) -> bool:
    """Return whether a tensor has a place in memory, as some kinds have not."""
    try:
        return _place(tensor) is not None
    except (RuntimeError, NotImplementedError, ValueError):
        return False


def _alike(old: nn.Module, new: nn.Module) -> bool:
    """Return whether a layer does what another did, but for its tensors and layers inside."""
    own, other = (
        {name: value for name, value in vars(module).items() if name not in _EVERY_MODULE}
        for module in (old, new)
    )
    return (
        type(old) is type(new)
        and own.keys() == other.keys()
        and all(_equal(own[name], other[name]) for name in own)
    )


def _equal(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # arrays and others that do not say yes or no
        return False
