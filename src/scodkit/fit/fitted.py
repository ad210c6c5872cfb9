"""What a fit leaves behind, tied to the weights it was made with."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from scodkit import suspicion
from scodkit.eigenbasis import Eigenbasis
from scodkit.errors import MergeError, MismatchError, RepeatedDataWarning
from scodkit.likelihoods import Likelihood
from scodkit.network import Form
from scodkit.parameters import ParameterSet, state_fingerprint
from scodkit.parts import Part, in_both
from scodkit.probes import Probes
from scodkit.seen import joined, seen_again
from scodkit.sketch import SketchState
from scodkit.suspicion import Ranges

UNFITTED = "expected a fitted monitor; type monitor.fit(train_loader) first"


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


@dataclass(frozen=True)
class Fitted:
    """The result of a fit.

    Args:
        likelihood: What distribution the output parametrises.
        parameters: The chosen weights.
        basis: The eigenbasis scores are computed with.
        state: The sketch behind it; None when it was not saved.
        fingerprints: Of the weights.
        shape: Of a typical sample's output.
        skipped: Samples left out because they were not finite.
        parts: Which data it has seen.
        engine: Who computed its gradients, by name; None where nobody noted it.
        input_range: Smallest and largest value of each floating input, by its place or keyword
            in the call; None in fits of versions that did not look.
        samples: Digests of the samples it has seen; None where they are not known.
        form: That the batches of the fit had; None where it is not known.
        probes: What the model answers to inputs that were made up; None where it cannot.
    """

    likelihood: Likelihood
    parameters: ParameterSet
    basis: Eigenbasis
    state: SketchState | None
    fingerprints: Fingerprints
    shape: tuple[int, ...]
    skipped: int = 0
    parts: tuple[Part, ...] = ()
    engine: str | None = None
    input_range: Ranges | None = None
    samples: Tensor | None = None
    form: Form | None = None
    probes: Probes | None = None

    def difference(self, model: nn.Module) -> str | None:
        """Return in words how a model's contents differ from those at the fit, or None."""
        gone = set(self.parameters.names) - dict(model.named_parameters()).keys()
        if gone:
            return f"of the chosen weights {min(gone)} is gone"
        exempt = self.fingerprints.exempt
        return self.fingerprints.difference(Fingerprints.of(model, self.parameters, exempt))

    def check_weights(self, model: nn.Module) -> None:
        """Make sure a model has the weights of a fit that is loaded.

        Args:
            model: The model.

        Raises:
            MismatchError: If it has not.
        """
        difference = self.difference(model)
        if difference:
            raise MismatchError(
                f"expected the weights of the fit for loading, but {difference}; "
                "load the weights of that time, or fit again"
            )

    def check_sketch(self) -> None:
        """Make sure the sketch is there, before data is read to be added to it.

        Raises:
            MergeError: If it is not.
        """
        if self.state is None:
            raise MergeError(
                "expected a monitor with its sketch, but this one was saved without; save it "
                "with monitor.save(path, sketch=True), or fit again"
            )

    def check_other_data(self, parts: tuple[Part, ...]) -> None:
        """Make sure no sample would count twice.

        Args:
            parts: Of the data to be added.

        Raises:
            MergeError: If this fit has seen some of it.
        """
        both = in_both(self.parts, parts)
        if both:
            raise MergeError(
                f"expected fits of different data, but both have seen {both[0]}"
                + (f" ({both[1]})" if both[0] != both[1] else "")
                + ": it would count twice; leave one of them out"
            )

    def check_other_samples(self, samples: Tensor | None) -> None:
        """Make sure no sample would count twice, in whatever batches and order it comes.

        Args:
            samples: Digests of those to be added; None where they are not known.

        Raises:
            MergeError: If this fit has seen more of them than chance explains.
        """
        again = seen_again(self.samples, samples)
        if again is None:
            return
        if again.certain:
            raise MergeError(
                f"expected fits of different data, but {again} samples to be added are in the "
                "fit already: they would count twice; leave them out"
            )
        warnings.warn(
            f"{again} samples to be added are like some in the fit already; if they are the "
            "same ones, they count twice: leave them out",
            RepeatedDataWarning,
            stacklevel=3,
        )

    def to(self, device: torch.device | str) -> Fitted:
        """Return the fit on another device; of an offloaded one only what is small moves."""
        state = self.state
        if state is not None and not self.basis.offloaded:
            state = state.to(device)
        return replace(self, basis=self.basis.to(device), state=state)

    def merged(self, other: Fitted, rank: int, consume: bool = False) -> Fitted:
        """Return the fit of both fits' data; this one is left alone.

        Args:
            other: A fit of the same model and parameters on other data.
            rank: ``k`` of the new basis.
            consume: Add into the memory of ``other``, which is then of no more use.

        Raises:
            MergeError: If they are fits of other models or parameters, or a sketch is missing.
        """
        difference = self.fingerprints.difference(other.fingerprints)
        if self.parameters != other.parameters:
            difference = "other parameters were chosen"
        if self.likelihood != other.likelihood:
            difference = f"the likelihoods are {self.likelihood} and {other.likelihood}"
        if difference:
            raise MergeError(
                f"expected two fits of the same model and options, but {difference}; fit "
                "every part with the same weights, likelihood and parameters=..."
            )
        self.check_sketch()
        other.check_sketch()
        assert self.state is not None
        assert other.state is not None
        sketch = self.state.sketch
        own = other.state if consume else other.state.copy()
        state = sketch.merge(own.to(self.state.squared_norm.device), self.state)
        skipped, parts = self.skipped + other.skipped, self.parts + other.parts
        samples = joined([self.samples, other.samples])
        basis = sketch.eigenbasis(state, rank)
        if not (self.basis.certified and other.basis.certified):
            basis = replace(basis, certified=False)
        basis = replace(basis, offloaded=self.basis.offloaded)  # as the state is
        seen = replace(self, skipped=skipped, parts=parts, samples=samples)
        ranges = suspicion.joined(self.input_range, other.input_range)
        probes = self.probes or other.probes
        return replace(seen, basis=basis, state=state, input_range=ranges, probes=probes)
