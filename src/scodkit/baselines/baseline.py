"""What all baselines share: reading data, fitting, scoring, moving, saving, refusing."""

from __future__ import annotations

import contextlib
import inspect
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from scodkit import __version__, errors
from scodkit.errors import BatchError, MismatchError, OptionError
from scodkit.factors.pieces import finite_samples
from scodkit.fit.data import as_loader, batches_of, tell_of_labels
from scodkit.likelihoods import Bernoulli, Categorical, Heads, Likelihood
from scodkit.model.failures import check_runs
from scodkit.model.frames import columns_of, labels_of
from scodkit.model.inputs import FORM, Form, Inputs
from scodkit.model.kinds import LABEL_KEYS, as_tensors, first_part, over_batches
from scodkit.model.network import Network, state_to_copy
from scodkit.model.parameters import state_fingerprint
from scodkit.numerics import artifact
from scodkit.scoring.score import Scored
from scodkit.sketch import documents

_KIND = "baseline"
_HEADER = artifact.fields(
    {
        "method": artifact.TEXT,
        "likelihood": documents.DESCRIPTION,
        "options": artifact.OBJECT,
        "fingerprints": artifact.each(artifact.TEXT),
    },
    {"form": artifact.maybe(FORM)},
    others=True,
)

# of batches that no fit has shown: one tensor, with or without targets of another form
_ONE_INPUT, _ANYTHING = (Form(parts=1, axes=[], alike=alike) for alike in (1, None))

State = dict[str, Tensor]


class Picks(TypedDict, total=False):
    """Functions that pick inputs and targets from a batch, and outputs from a result.

    Attributes:
        inputs: As for `Monitor`.
        outputs: As for `Monitor`.
        targets: Picks the targets from a training batch; by default the second of a tuple, or
            what a dict has under ``label``, ``labels``, ``target`` or ``targets``.
    """

    inputs: Callable[[Any], Any] | None
    outputs: Callable[[Any], Tensor] | None
    targets: Callable[[Any], Any] | None


@dataclass(eq=False, repr=False)
class Baseline(ABC):
    """Base class of the methods that a `Monitor` is compared with; all are `Detector`s.

    Options of a method are further fields of its class, or arguments of its constructor that
    it keeps as attributes of the same names: saved files and ``repr`` have them.

    Args:
        model: The trained network; left unchanged, and without wrappers as an attribute.
        likelihood: What distribution its output parametrises.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Picks the targets from a training batch; see `Picks`.

    Attributes:
        handles: Likelihoods the method is defined for.
        because: Why other likelihoods are refused, for the error message.
        learns: Whether the method has to be fitted before it can score.
        learnt: Names of the tensors that a fit returns; None where they depend on the model.
    """

    handles: ClassVar[tuple[type[Likelihood], ...]] = (Likelihood,)
    because: ClassVar[str] = "it is no likelihood"
    learns: ClassVar[bool] = True
    learnt: ClassVar[tuple[str, ...] | None] = None

    model: nn.Module
    likelihood: Likelihood
    _: KW_ONLY
    inputs: Callable[[Any], Any] | None = None
    outputs: Callable[[Any], Tensor] | None = None
    targets: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        likelihood = self.likelihood
        if not isinstance(self.model, nn.Module):
            raise OptionError(f"expected an nn.Module, got {type(self.model).__name__}")
        if isinstance(likelihood, type) and issubclass(likelihood, Likelihood):
            raise OptionError(
                f"expected a likelihood object, got the class; type {likelihood.__name__}()"
            )
        if isinstance(likelihood, (Mapping, tuple, list, Heads)):
            raise OptionError(
                f"expected the likelihood of one output for {type(self).__name__}, got those "
                f"of several heads; type {type(self).__name__}(model, Categorical(), "
                "outputs=lambda out: out['class']) with the name and likelihood of one"
            )
        if not isinstance(likelihood, self.handles):
            known = " or ".join(f"{kind.__name__}()" for kind in self.handles)
            raise errors.UnsupportedLikelihoodError(
                f"expected {known} for {type(self).__name__}, got {likelihood!r}: "
                f"{self.because}; compare with another baseline here"
            )
        self._network = Network(self.model, self.inputs, self.outputs)
        self.model = self._network.model  # without wrappers
        self._state: State | None = None if self.learns else {}
        self._form: Form | None = None  # of the batches of the fit

    def __setattr__(self, name: str, value: object) -> None:
        # others would not be those that are run, or that the fit was for
        fixed = name in {"model", "inputs", "outputs", "parameters"}
        if fixed and "_state" in vars(self):
            raise AttributeError(f"expected a new {type(self).__name__} for another {name}")
        super().__setattr__(name, value)

    def fit(
        self, loader: Iterable[Any], labels: object = None, *, progress: bool = True
    ) -> Self:
        """Fit to training data; methods that learn nothing read a data frame's columns alone.

        Args:
            loader: Batches of training data; with targets for methods that say so. Or all
                samples as one tensor, numpy array, table or list of rows.
            labels: Targets of samples that are given so; methods that use none say so.
            progress: Show a progress bar.

        Returns:
            The method itself, fitted. A fit that raises leaves it as it was before.
        """
        if not self.takes_targets:
            what = "from inputs alone" if self.learns else "nothing"
            tell_of_labels(labels, f"{type(self).__name__} learns {what}")
            labels = None
        if not self.learns:
            first = first_part(loader)
            if labels_of(first) is not None and self._network.by_name:
                self._form = replace(_ANYTHING, columns=columns_of(first))
            return self
        description = f"fitting {type(self).__name__}" if progress else None
        samples = as_loader(loader, labels)
        data = TrainingData(self._network, samples, self.targets, description)
        with self._evaluating():
            try:
                state = self._learn(data)
            except Exception as error:
                data.explain(error)
                raise
        # contiguous, as a loaded file is: products of another layout may round differently
        self._state = {n: tensor.detach().contiguous() for n, tensor in state.items()}
        self._form = data.seen.form
        return self

    def __call__(self, batch: object, *, progress: bool = True) -> Scored:
        """Predict and score.

        Args:
            batch: As for a `Monitor`: a batch or a whole loader, of tensors or arrays.
            progress: Show a progress bar for a loader.

        Returns:
            Output and score; no p-value (see `scodkit.calibration.Calibration`).
        """
        whole = self._network.is_loader(batch)
        reading = partial(batches_of, description="scoring", progress=progress)
        # without a fit, what a loader yields is a batch; two tensors alike may be two of them
        form = self._form
        if not whole and (form is None or not self.learns):
            form = replace(_ONE_INPUT, columns=form.columns if form else None)
        scored = partial(self._scored, form=form)
        return over_batches(scored, batch, reading if whole else None)

    def _scored(self, batch: object, form: Form | None) -> Scored:
        state = self._ready()
        with self._evaluating():
            call = self._network.inputs_of(batch, form)
            try:
                if call.batch_size == 0:
                    output = self._network(call).detach()
                    return Scored(output, wide(output).new_empty(0), None)
                output, score = self._output_and_score(call, state)
            except Exception as error:
                check_runs(self._network, call, error, self._form)
                raise
            output = output.detach()
            score = score.detach().to(torch.promote_types(output.dtype, torch.float32))
            usable = finite_samples(call, output) & ~score.isnan()
        return Scored(output, score.masked_fill(~usable, torch.inf), None)

    def score(self, batch: object, *, progress: bool = True) -> Tensor:
        """Return the score ``(B,)``: larger = more atypical; infinite for NaN or infinity.

        Args:
            batch: As for a call.
            progress: Show a progress bar for a loader.
        """
        return self(batch, progress=progress).score

    def to(self, device: torch.device | str) -> Self:
        """Return the method itself, with model and state moved to a device.

        Args:
            device: Where to. The state follows a model that was moved by itself.
        """
        for model in self._models():
            model.to(device)
        if self._state is not None:
            self._ready()
        return self

    def memory(self) -> dict[str, int]:
        """Return the bytes of what is kept for scoring, besides the model, by name."""
        kept = {name: tensor.nbytes for name, tensor in self._ready().items()}
        for place, model in enumerate(self._models()[1:], 1):
            kept[f"network {place}"] = sum(t.nbytes for t in model.state_dict().values())
        return kept

    def save(self, path: str | Path) -> None:
        """Write the fitted state to one file, atomically; the model itself is not in it.

        Args:
            path: File to write.
        """
        state = self._ready()
        header = {
            "scodkit_version": __version__,
            "method": type(self).__name__,
            "likelihood": documents.describe(self.likelihood),
            "options": self._options(),
            "fingerprints": [state_fingerprint(model) for model in self._models()],
            "form": self._form and self._form.document(),
        }
        artifact.write(path, _KIND, header, state)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Any,
        *,
        likelihood: Likelihood | None = None,
        **picks: Unpack[Picks],
    ) -> Self:
        """Read what `save` wrote.

        Args:
            path: File to read.
            model: The first argument of the constructor, with the same weights.
            likelihood: Needed only for likelihoods that a file cannot describe.
            picks: The functions that were given to the constructor, if any.

        Returns:
            The method, on the model's device.

        Raises:
            MismatchError: If the file belongs to another method or to other weights.
            ArtifactError: A subclass of it, if the file is cut off or altered.
        """
        header, tensors = artifact.read(path, _KIND, _HEADER)
        if header["method"] != cls.__name__:
            raise MismatchError(
                f"expected a saved {cls.__name__} at {path}, got a {header['method']}; type "
                f"{header['method']}.load(...)"
            )
        learnt = (tensors if cls.learnt is None else cls.learnt) if cls.learns else ()
        artifact.fields(dict.fromkeys(learnt, artifact.NUMBERS))(str(path), tensors)
        likelihood = likelihood or documents.build(header["likelihood"], Likelihood)
        try:
            method = cls(model, likelihood, **header["options"], **picks)
        except TypeError as error:
            artifact.refuse(f"options of {cls.__name__} in {path}", f"others ({error})")
        fingerprints = [state_fingerprint(model) for model in method._models()]
        if fingerprints != header["fingerprints"]:
            raise MismatchError(
                f"expected the weights {path} was made with, but weights or buffers differ; "
                "load the weights of that time, or fit again"
            )
        form = header.get("form")
        method._state, method._form = tensors, form and Form(**form)
        return method

    def __getstate__(self) -> dict[str, Any]:
        return state_to_copy(self, self._network, self.likelihood)

    def __repr__(self) -> str:
        fitted = "" if self._state is not None else ", not fitted"
        options = "".join(f", {name}={value!r}" for name, value in self._options().items())
        what = f"{type(self.model).__name__}, {self.likelihood}{options}"
        return f"{type(self).__name__}({what}{fitted})"

    def _ready(self) -> State:
        """Return the fitted state, on the model's device.

        Raises:
            NotFittedError: If the method is not fitted.
        """
        if self._state is None:
            name = type(self).__name__
            raise errors.NotFittedError(
                f"expected a fitted {name}; type .fit(train_loader) first"
            )
        device = self._network.device
        self._state = {name: tensor.to(device) for name, tensor in self._state.items()}
        return self._state

    def _evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that holds the networks in eval mode, for this thread alone."""
        return self._network.evaluating()

    @property
    def takes_targets(self) -> bool:
        """Whether a fit reads the targets of the training data."""
        return False

    def _models(self) -> list[nn.Module]:
        """Return the networks the method runs."""
        return [self.model]

    def _options(self) -> Mapping[str, Any]:
        """Return the constructor's other arguments as plain data, for a file."""
        _, _, *others = inspect.signature(type(self)).parameters.values()
        names = [other.name for other in others if other.kind is not other.VAR_KEYWORD]
        return {n: getattr(self, n) for n in names if n not in Picks.__optional_keys__}

    def _learn(self, data: TrainingData) -> State:
        """Return the tensors that scoring needs, by name; the model is in eval mode."""
        raise NotImplementedError

    @abstractmethod
    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        """Return output ``(B, *shape)`` and scores ``(B,)`` of at least one sample."""


@dataclass
class _Seen:
    """What passes over training data have come by: the form of batches, the last inputs."""

    form: Form | None = None
    last: Inputs | None = None


@dataclass(frozen=True)
class TrainingData:
    """The batches of a fit; each iteration is one pass over them.

    Args:
        network: The model they are for.
        loader: Batches as the loader yields them.
        targets: Picks the targets from a batch; None for the default, see `Picks`.
        description: Text of the progress bar; None for no bar.
        seen: What all passes have come by.
    """

    network: Network
    loader: Iterable[Any]
    targets: Callable[[Any], Any] | None = None
    description: str | None = None
    seen: _Seen = field(default_factory=_Seen)

    def explain(self, error: Exception) -> None:
        """Raise in place of an error that the model has caused on the last batch.

        Args:
            error: What was raised in a pass.
        """
        if self.seen.last is not None:
            check_runs(self.network, self.seen.last, error, self.seen.form)

    def check_repeatable(self, method: str) -> None:
        """Raise if the batches can be read only once.

        Args:
            method: Name of the method that needs several passes.

        Raises:
            OptionError: If the loader is an iterator, which is exhausted after one pass.
        """
        if iter(self.loader) is self.loader:
            raise OptionError(
                f"expected a loader that can be read more than once, as {method} needs, got "
                f"{type(self.loader).__name__}; pass a DataLoader or a list of batches"
            )

    def first(self) -> Inputs:
        """Return the inputs of the first batch that is not empty."""
        return next(replace(self, description=None).calls())

    def calls(self) -> Iterator[Inputs]:
        """Yield the model's inputs in each batch, one pass; empty batches are left out.

        Raises:
            BatchError: If there is not a single sample.
        """
        for call, _ in self._pass():
            yield call

    def pairs(self) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield the inputs and the targets ``(B, ...)`` of each batch, one pass.

        Raises:
            BatchError: If there is not a single sample, or a batch has no targets.
        """
        for call, batch in self._pass():
            targets = _default_targets(batch) if self.targets is None else self.targets(batch)
            targets = as_tensors(targets, self.network.dtype)
            if not isinstance(targets, Tensor) or targets.shape[:1] != (call.batch_size,):
                got = "none" if targets is None else type(targets).__name__
                if isinstance(targets, Tensor):
                    got = f"{len(targets) if targets.ndim else 'a single'} of them"
                raise BatchError(
                    f"expected a batch with {call.batch_size} targets beside its inputs, got "
                    f"{got}; type fit(x, y), or let the loader yield (inputs, targets), or say "
                    "where they are: targets=lambda batch: ..."
                )
            yield call, targets.to(self.network.device)

    def _pass(self) -> Iterator[tuple[Inputs, Any]]:
        description, empty, seen = self.description, True, self.seen
        shown = description is not None
        order = self.network.ordering(seen.form.columns if seen.form else None)
        for batch in map(order, batches_of(self.loader, description or "", shown, leave=False)):
            call = seen.last = self.network.inputs_of(batch)
            if call.batch_size:
                seen.form = seen.form or Form.of(batch, call, self.network.by_name)
                empty = False
                yield call, batch
        if empty:
            raise BatchError("expected training data with samples, got none")


def _default_targets(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return next((batch[key] for key in LABEL_KEYS if key in batch), None)
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[1]
    return None


def check_finite(values: Tensor, what: str) -> Tensor:
    """Return values unchanged, after a check that all are finite.

    Args:
        values: ``(B, ...)``.
        what: Name of the values, for the message.

    Raises:
        NonFiniteError: If there is a NaN or an infinity among them.
    """
    finite = values.reshape(len(values), -1).isfinite().all(1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise errors.NonFiniteError(
            f"expected finite {what}, got a NaN or an infinity in row {row} of a batch; mend "
            "or remove that sample"
        )
    return values


def wide(output: Tensor) -> Tensor:
    """Return an output in float32 or wider: half precision would tie different scores."""
    return output.to(torch.promote_types(output.dtype, torch.float32))


def class_logits(likelihood: Likelihood, output: Tensor) -> Tensor:
    """Return the logits ``(B, C)`` of one variable; a single logit stands for two classes.

    Args:
        likelihood: A `Categorical` or a `Bernoulli`.
        output: Of the model.

    Raises:
        BatchError: If there are several variables (pixels, tokens, labels).
    """
    if isinstance(likelihood, Bernoulli) and output.shape[1:] == (1,):
        return wide(torch.cat([torch.zeros_like(output), output], dim=1))
    if isinstance(likelihood, Categorical) and output.ndim == 2:
        return wide(output)
    raise BatchError(
        f"expected one variable with logits (B, classes) for this baseline, got {likelihood!r} "
        f"and an output of shape {tuple(output.shape)}; compare with Naive here"
    )


def whole_number(name: str, value: object) -> int:
    """Return a counting option as a plain integer.

    Args:
        name: Of the option.
        value: Its value; numpy's integers are accepted.

    Raises:
        OptionError: If it is no integer, or less than 1.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise OptionError(f"expected an integer {name} >= 1, got {name}={value!r}")
    return int(value)


@runtime_checkable
class Detector(Protocol):
    """Tells known inputs from others, by a score: larger = more atypical.

    Examples:
        >>> from scodkit import Categorical, Monitor
        >>> from torch import nn
        >>> isinstance(Monitor(nn.Linear(2, 3), Categorical()), Detector)
        True
    """

    def fit(self, loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Learn from training data, and return the detector itself."""

    def score(self, batch: object) -> Tensor:
        """Return the scores ``(B,)`` of a batch."""

    def __call__(self, batch: object) -> Scored:
        """Return the prediction and the scores of a batch."""
