"""What to fit, and what a fit leaves behind, tied to the weights it was made with."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from scodkit.errors import (
    CalibrationWarning,
    MergeError,
    OptionError,
    RepeatedDataWarning,
    described,
)
from scodkit.factors.choose import CHECK_EVERY, choose_engine, named_engine
from scodkit.factors.hooks import HookEngine
from scodkit.factors.pieces import FactorSource
from scodkit.fit.data import Again, joined, seen_again
from scodkit.fit.probes import Probes
from scodkit.likelihoods import Heads, Likelihood
from scodkit.likelihoods.task import Task
from scodkit.model.frames import Columns, alike, in_words
from scodkit.model.input_range import InputRange
from scodkit.model.inputs import Form, Inputs, Ranges, joined_ranges
from scodkit.model.network import Network, StateWatch
from scodkit.model.parameters import Fingerprints, ParameterSet, Selection
from scodkit.model.projected import Projected, ProjectedSet, Projections
from scodkit.sketch import Sketch, SketchState
from scodkit.sketch.eigenbasis import Eigenbasis

UNFITTED = "expected a fitted monitor; type monitor.fit(train_loader) first"

OnBad = Literal["raise", "skip"]


def check_options(
    model: object,
    likelihood: object,
    rank: object,
    sketch: object,
    prior_scale: float,
    task: object = None,
) -> None:
    """Refuse what a monitor cannot be made of, at once rather than after a pass.

    Raises:
        OptionError: With what to type instead.
    """
    problem = None
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        problem = f"an nn.Module that is not scripted, got {type(model).__name__}"
    elif not isinstance(likelihood, Likelihood):
        problem = (
            f"a likelihood object, got {described(likelihood)}; type Categorical(), "
            "Gaussian(), Bernoulli() or another from scodkit, or {'class': Categorical(), ...} "
            "for heads"
        )
    elif not isinstance(rank, int) or rank < 1:
        problem = f"an integer rank >= 1, got {rank!r}"
    elif not isinstance(sketch, Sketch):
        problem = f"a sketch object, got {sketch!r}; type Nystrom() or another, with brackets"
    elif not 1e-100 < prior_scale < 1e100:  # whose squares are numbers
        problem = f"a positive, finite prior_scale, got {prior_scale!r}"
    elif task is not None and not isinstance(task, Task):
        problem = f"a task object, got {task!r}; type task=Task(lambda output: ...)"
    elif task is not None and isinstance(likelihood, Heads):
        problem = "no task for several heads, got one; name only the heads that matter"
    if problem:
        raise OptionError(f"expected {problem}")


@dataclass(frozen=True)
class Recipe:
    """What to fit.

    Args:
        likelihood: What distribution the output parametrises.
        rank: ``k``.
        sketch: How the curvature is summarised.
        selection: Which weights.
        budget: Bytes that rows in weight space may take at a time.
        check_every: One in so many batches is checked, 0 for none; see `HookEngine`.
    """

    likelihood: Likelihood
    rank: int
    sketch: Sketch
    selection: Selection | Projected
    budget: int
    check_every: int = CHECK_EVERY

    def source(
        self,
        network: Network,
        parameters: ParameterSet,
        call: Inputs,
        shape: tuple[int, ...],
        engine: str | None = None,
    ) -> FactorSource:
        """Return what turns batches into factors.

        Args:
            network: The model.
            parameters: The chosen weights.
            call: A batch to choose an engine with.
            shape: Of a typical sample's output.
            engine: Name of the engine of an earlier fit, which is taken again unless the model
                is on another kind of device.
        """
        chosen = None
        if engine is not None:
            chosen = named_engine(engine, network, parameters, self.check_every)
            if isinstance(chosen, HookEngine):  # or the first score would go another way
                chosen.learn(call)
        if chosen is None:
            chosen = choose_engine(network, parameters, call, self.check_every)
        return FactorSource(chosen, self.likelihood, shape, self.budget)


@dataclass(frozen=True)
class FitOptions:
    """How a pass over the data behaves.

    Args:
        progress: Show a progress bar.
        on_bad: What a sample with a NaN or an infinity does: raise, or be skipped and counted.
        check_deterministic: Compare two runs of the model on the first batch, and two reads of
            the first item of the data set.
        checkpoint: The file of an unfinished pass.
        every: Batches between two checkpoints.
        precision: Run the model, and form gradients, in this dtype; None for the model's own.
        together: Add up the fits of all processes of torch's process group, if there is one.
        products: Whether to sketch products with the curvature rather than rows; None for the
            cheaper way.
        sharded: Divide the weights, not the data, among those processes.
        columns: Names of columns in the order of an earlier fit; None for that of the first
            batch.
    """

    progress: bool = True
    on_bad: OnBad = "raise"
    check_deterministic: bool = True
    checkpoint: Path | None = None
    every: int = 100
    precision: torch.dtype | None = None
    together: bool = True
    products: bool | None = None
    sharded: bool = False
    columns: Columns | None = None

    def __post_init__(self) -> None:
        if self.on_bad not in ("raise", "skip"):
            raise OptionError(f"expected on_bad='raise' or 'skip', got {self.on_bad!r}")
        if not isinstance(self.every, int) or self.every < 1:
            raise OptionError(f"expected every >= 1 batches, got {self.every!r}")
        check_precision(self.precision)
        if self.products not in (None, True, False):
            raise OptionError(f"expected products=True, False or None, got {self.products!r}")


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
        engine: Name of the engine that computed its gradients; None in files of early versions.
        input_range: Smallest and largest value of each floating input, by its place or keyword
            in the call; None in fits of versions that did not look.
        columns: Ranges and spreads of the columns of tables, for explanations; of none in fits
            of versions that did not look.
        samples: Digests of the samples it has seen; None where they are not known.
        form: That the batches of the fit had; None where it is not known.
        probes: What the model answers to inputs that were made up; None where it cannot.
        precision: The dtype that scores are computed in; None for the model's own.
    """

    likelihood: Likelihood
    parameters: ParameterSet
    basis: Eigenbasis
    state: SketchState | None
    fingerprints: Fingerprints
    shape: tuple[int, ...]
    skipped: int = 0
    engine: str | None = None
    input_range: Ranges | None = None
    columns: InputRange = field(default_factory=InputRange)
    samples: Tensor | None = None
    form: Form | None = None
    probes: Probes | None = None
    precision: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_precision(self.precision)

    def settled(self, watch: StateWatch, doing: str) -> Fitted:
        """Return the fit of a model that was touched, after a look at its contents.

        Args:
            watch: Over the model.
            doing: What is about to be done, for the message if it is another model now.
        """
        fingerprints = watch.settled(self.fingerprints, self.parameters, doing)
        return replace(self, fingerprints=fingerprints)

    @property
    def column_names(self) -> Columns:
        """Names of the columns of data frames, in the order of the fit; empty if unknown."""
        return (self.form and self.form.columns) or {}

    @property
    def projections(self) -> Projections:
        """The projections of the weights.

        Raises:
            OptionError: If there are none.
        """
        if not isinstance(self.parameters, ProjectedSet):
            raise OptionError(
                "expected a monitor of projected weights, got one of whole ones; type "
                "Monitor(..., parameters=Projected(rank=16))"
            )
        return self.parameters.projections

    def needed_state(self) -> SketchState:
        """Return the sketch, which data can be added to.

        Raises:
            MergeError: If it was not saved.
        """
        if self.state is None:
            raise MergeError(
                "expected a monitor with its sketch, but this one was saved without; save it "
                "with monitor.save(path, sketch=True), or fit again"
            )
        return self.state

    def warn_of_held_out(self, samples: Tensor | None) -> Again | None:
        """Warn if held-out samples were fitted.

        Args:
            samples: Their digests; None where they are not known.

        Returns:
            How many were; None for none.
        """
        again = seen_again(self.samples, samples)
        if again is not None:
            warnings.warn(
                f"{again} held-out samples were fitted: a network knows those best, so that "
                "alarms on other data may be far too many; calibrate with data that was not "
                "used for training or fitting",
                CalibrationWarning,
                stacklevel=3,
            )
        return again

    def check_other_samples(self, samples: Tensor | None) -> None:
        """Make sure no sample would count twice, in whatever batches and order it comes.

        Args:
            samples: Digests of those to be added; None where they are not known.

        Raises:
            MergeError: If this fit has seen more of them than chance explains.
        """
        if self.samples is None or samples is None:
            warnings.warn(
                "nobody can tell whether samples to be added are in the fit already, as a file "
                "of an earlier version, or more than 50 million samples, have no digests: make "
                "sure that none is, or it counts twice",
                RepeatedDataWarning,
                stacklevel=3,
            )
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
            if isinstance(self.parameters, ProjectedSet) and isinstance(
                other.parameters, ProjectedSet
            ):
                difference = (
                    "other projections were learnt: fit every part but the first with "
                    "parameters=Projected(given=first.projections), on the command line with "
                    "--projections first.scod"
                )
        if self.likelihood != other.likelihood:
            difference = f"the likelihoods are {self.likelihood} and {other.likelihood}"
        columns, others = (form and form.columns for form in (self.form, other.form))
        if columns and others and not alike(columns, others):
            raise MergeError(
                "expected two fits of the same columns in the same order, got "
                f"{in_words(columns)} and {in_words(others)}; give the columns of every "
                "part in one order (on the command line by --columns)"
            )
        if difference:
            raise MergeError(
                f"expected two fits of the same model and options, but {difference}; fit "
                "every part with the same weights, likelihood and parameters=..."
            )
        mine, theirs = self.needed_state(), other.needed_state()
        if not consume:
            theirs = theirs.copy()
        state = mine.sketch.merge(theirs.to(mine.squared_norm.device), mine)
        basis = mine.sketch.eigenbasis(state, rank)
        certified = basis.certified and self.basis.certified and other.basis.certified
        return replace(
            self,
            basis=replace(basis, certified=certified, offloaded=self.basis.offloaded),
            state=state,
            skipped=self.skipped + other.skipped,
            samples=joined([self.samples, other.samples]),
            input_range=joined_ranges(self.input_range, other.input_range),
            columns=self.columns.in_both(other.columns),
            form=other.form if columns is None and others else self.form,
            probes=self.probes or other.probes,
        )


def check_precision(precision: object) -> None:
    """Check that models can be run in a precision: autocast to it.

    Raises:
        OptionError: If it is neither None nor bfloat16.
    """
    if precision not in (None, torch.bfloat16):  # float16 loses small gradients
        raise OptionError(f"expected precision=torch.bfloat16 or None, got {precision!r}")
