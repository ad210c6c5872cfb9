"""What a fit leaves behind, and how it is stored and checked when it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scodkit import artifact
from scodkit.eigenbasis import Eigenbasis
from scodkit.errors import MergeError, MismatchError
from scodkit.parameters import ParameterSet, select_names, state_fingerprint
from scodkit.sketch import SketchState

_STATE = "sketch."


@dataclass(frozen=True)
class Fingerprints:
    """Hashes that tie a fit to the weights it was made with.

    Args:
        parameters: Of the chosen weights.
        model: Of the model's whole state, buffers included.
    """

    parameters: str
    model: str

    @staticmethod
    def of(model: nn.Module, parameters: ParameterSet) -> Fingerprints:
        """Return the hashes of a model as it stands."""
        return Fingerprints(parameters.fingerprint(model), state_fingerprint(model))

    def difference(self, other: Fingerprints) -> str | None:
        """Return in words what differs, or None."""
        if self.parameters != other.parameters:
            return "the chosen weights differ"
        if self.model != other.model:
            return "the chosen weights agree, but other weights or buffers differ"
        return None


@dataclass(frozen=True)
class Fitted:
    """The result of a fit.

    Args:
        parameters: The chosen weights.
        basis: The eigenbasis scores are computed with.
        state: The sketch behind it; None when it was not saved.
        fingerprints: Of the weights.
        directions: ``p``, rows per sample.
        skipped: Samples left out because they were not finite.
    """

    parameters: ParameterSet
    basis: Eigenbasis
    state: SketchState | None
    fingerprints: Fingerprints
    directions: int
    skipped: int = 0

    def check_weights(self, model: nn.Module, doing: str) -> None:
        """Make sure a model still has the weights of the fit.

        Args:
            model: The model.
            doing: What was about to be done, for the message.

        Raises:
            MismatchError: If it has not.
        """
        difference = self.fingerprints.difference(Fingerprints.of(model, self.parameters))
        if difference:
            raise MismatchError(
                f"expected the weights of the fit for {doing}, but {difference}; "
                "fit again after changing the model"
            )

    def pack(self, with_sketch: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return header data and tensors, for `artifact.write`."""
        basis = self.basis
        header: dict[str, Any] = {
            "parameters": {b.name: list(b.shape) for b in self.parameters.blocks},
            "fingerprints": vars(self.fingerprints),
            "directions": self.directions,
            "skipped": self.skipped,
            "basis": {k: v for k, v in vars(basis).items() if not isinstance(v, Tensor)},
        }
        # JSON has no infinity
        if basis.residual_norm == float("inf"):
            header["basis"]["residual_norm"] = None
        tensors = {"values": basis.values, "vectors": basis.vectors}
        if with_sketch and self.state is not None:
            header["sketch_state"], state_tensors = artifact.pack_state(self.state, _STATE)
            tensors |= state_tensors
        return header, tensors

    @staticmethod
    def unpack(
        header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module
    ) -> Fitted:
        """Return what was packed, checked against a model and moved to its device.

        Raises:
            MismatchError: If the model is not the one of the fit.
        """
        fingerprints = Fingerprints(**header["fingerprints"])
        parameters = _parameters_in(model, header["parameters"])
        difference = fingerprints.difference(Fingerprints.of(model, parameters))
        if difference:
            raise MismatchError(
                f"expected the model this monitor was fitted on, but {difference}; load the "
                "weights of that time, or fit again"
            )
        numbers = dict(header["basis"])
        if numbers["residual_norm"] is None:
            numbers["residual_norm"] = float("inf")
        device = next(model.parameters(), torch.empty(0)).device
        state = None
        if "sketch_state" in header:
            state = artifact.unpack_state(header["sketch_state"], tensors, _STATE).to(device)
        basis = Eigenbasis(tensors["values"], tensors["vectors"], **numbers).to(device)
        directions, skipped = header["directions"], header["skipped"]
        return Fitted(parameters, basis, state, fingerprints, directions, skipped)

    def merged(self, other: Fitted, rank: int) -> Fitted:
        """Return the fit of both fits' data, in memory of its own.

        Args:
            other: A fit of the same model and parameters on other data.
            rank: ``k`` of the new basis.

        Raises:
            MergeError: If they are fits of other models or parameters, or a sketch is missing.
        """
        difference = self.fingerprints.difference(other.fingerprints)
        if self.parameters != other.parameters:
            difference = "other parameters were chosen"
        if difference:
            raise MergeError(
                f"expected two fits of the same model and parameters, but {difference}; fit "
                "every part with the same weights and parameters=..."
            )
        if self.state is None or other.state is None:
            raise MergeError(
                "expected both monitors to have their sketches, but one was saved without; "
                "save it with monitor.save(path, sketch=True)"
            )
        sketch = self.state.sketch
        state = sketch.merge(self.state.copy(), other.state)
        skipped = self.skipped + other.skipped
        return replace(self, basis=sketch.eigenbasis(state, rank), state=state, skipped=skipped)


def _parameters_in(model: nn.Module, shapes: Mapping[str, list[int]]) -> ParameterSet:
    named = dict(model.named_parameters())
    differing = [
        f"{name}: {tuple(shape)} in the file, "
        + (f"{tuple(named[name].shape)} in the model" if name in named else "not in the model")
        for name, shape in shapes.items()
        if name not in named or list(named[name].shape) != shape
    ]
    if differing:
        raise MismatchError(
            "expected the model this monitor was fitted on, but parameters differ ("
            + "; ".join(differing[:5])
            + "); build the model as it was then"
        )
    return select_names(model, list(shapes))
