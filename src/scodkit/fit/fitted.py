"""What a fit leaves behind, tied to the weights it was made with."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from scodkit.errors import MergeError, MismatchError, RepeatedDataWarning
from scodkit.fit.probes import Probes
from scodkit.fit.seen import joined, seen_again
from scodkit.likelihoods import Likelihood
from scodkit.model import ranges
from scodkit.model.network import Form
from scodkit.model.parameters import ParameterSet
from scodkit.model.ranges import Ranges
from scodkit.model.state import Fingerprints, StateWatch
from scodkit.parts import Part, in_both
from scodkit.sketch import SketchState
from scodkit.sketch.eigenbasis import Eigenbasis

UNFITTED = "expected a fitted monitor; type monitor.fit(train_loader) first"


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

    def settled(self, watch: StateWatch, doing: str) -> Fitted:
        """Return the fit of a model that was touched, after a look at its contents.

        Args:
            watch: Over the model.
            doing: What is about to be done, for the message if it is another model now.
        """
        fingerprints = watch.settled(self.fingerprints, self.parameters, doing)
        return replace(self, fingerprints=fingerprints)

    def check_weights(self, model: nn.Module) -> None:
        """Make sure a model has the weights of a fit that is loaded.

        Args:
            model: The model.

        Raises:
            MismatchError: If it has not.
        """
        difference = self.fingerprints.difference_to(model, self.parameters)
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
        input_range = ranges.joined(self.input_range, other.input_range)
        probes = self.probes or other.probes
        return replace(seen, basis=basis, state=state, input_range=input_range, probes=probes)
