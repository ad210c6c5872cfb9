"""What `Fused` is made of: layers, rank and sketch, chosen on the first batch of a fit."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from scodkit.errors import OptionError
from scodkit.fit.first_batch import first_output
from scodkit.fused.features import (
    FeatureBank,
    ForwardPass,
    forward_pass,
    last_layer,
    most_samples,
)
from scodkit.fused.parts import Parts, num_classes
from scodkit.model.inputs import Inputs
from scodkit.model.parameters import (
    LastLayers,
    ParameterSet,
    Selection,
    endings,
    select,
)
from scodkit.model.projected import Projected
from scodkit.monitor import Monitor
from scodkit.scoring.evidence import is_classifier
from scodkit.sketch import Nystrom

# paper's size of a sketch: so many vectors for each one kept, and a few
_PER_RANK, _MORE = 6, 4
_MOST_RANK, _LEAST_RANK = 100, 5

# directions from which more layers serve better than more directions: `scodbench layers`
_ENOUGH = 20

# scores that are timed for a budget of time
_TIMED = 5


@dataclass(frozen=True)
class Budget:
    """The memory and time that a score may use.

    Args:
        bytes: Memory of what is kept for scoring: half for the basis; a quarter, and at most
            64 MiB, for training features (of a thousand samples at least).
        milliseconds: Time of a scored batch of one sample, with the prediction itself; None for
            as long as it takes. If the choice of layers takes longer on the first sample of
            the training data, the last layer alone is taken.
    """

    bytes: int = 2**28
    milliseconds: float | None = None

    def __post_init__(self) -> None:
        if type(self.bytes) is not int or not 0 < self.bytes < 2**63:
            raise OptionError(f"expected bytes as a whole number, got {self.bytes!r}")
        given = self.milliseconds
        if given is not None and not (isinstance(given, (int, float)) and 0 < given < math.inf):
            raise OptionError(f"expected milliseconds > 0, got {given!r}")


@dataclass(frozen=True)
class Choice:
    """What to fit: plain data, so that processes can agree on one.

    Args:
        names: Of the weights.
        rank: Directions to keep.
        columns: Of the sketch.
        layer: Name of the module whose input are the features; None if there are none.
        classes: A sample can be of.
        most: Features to keep.
        closed: Whether one Linear layer, whose weights these are, makes the outputs.
        why: In words.
        projected: How the weights are projected; None for whole ones.
    """

    names: tuple[str, ...]
    rank: int
    columns: int
    layer: str | None
    classes: int
    most: int
    closed: bool
    why: tuple[str, ...]
    projected: Projected | None = None

    def parts(self, monitor: Monitor, **options: Any) -> Parts:
        """Return the parts, to be fitted.

        Args:
            monitor: One of the same model and likelihood, with any weights.
            options: Of the monitor to be made.
        """
        chosen = Monitor(
            monitor.model,
            monitor.likelihood,
            self.rank,
            sketch=Nystrom(size=self.columns),
            parameters=self.projected or self.names,
            **options,
        )
        bank = None if self.layer is None else FeatureBank(self.classes, self.most)
        return Parts(chosen, self.layer, bank, self.closed, self.why)


def choose(
    monitor: Monitor,
    batch: object,
    *,
    parameters: Selection | Projected | None,
    rank: int | None,
    layer: str | None,
    budget: Budget,
    **options: Any,
) -> Choice:
    """Return what to fit, chosen on the first batch of training data.

    Args:
        monitor: One of the same model and likelihood, with any weights.
        batch: The first batch.
        parameters: Which weights; None to choose them.
        rank: Directions to keep; None for as many as the budget allows.
        layer: Name of the module whose input are the features; None to choose it.
        budget: Memory and time that a score may take.
        options: Of the monitor to be made.
    """
    network, likelihood = monitor._network, monitor.likelihood
    projected = parameters if isinstance(parameters, Projected) else None
    selection = parameters.layers if isinstance(parameters, Projected) else parameters
    why = "weights: as given"
    closed, classes, most = False, 1, 1
    with network.evaluating():
        call = network.inputs_of(batch)
        first_output(network, likelihood, batch, call)
        if is_classifier(likelihood):
            layer = last_layer(network, call) if layer is None else layer
            passed = forward_pass(network, call, layer)
            most = most_samples(passed.features.shape[1], budget.bytes // 4)
            classes = num_classes(likelihood, passed.output)
            names = _parameters_of(monitor, layer, passed)
            if selection is None and names and passed.ends_in_layer:
                selection, closed = names, True
                why = "weights: the last Linear layer, whose curvature has a closed form"
        else:
            layer = None
        if selection is None:
            selection, why = _last_layers(monitor, call, rank, budget)
        sized = _sized(monitor, selection, call, rank, budget, projected)
    seen = () if layer is None else (f"features: what goes into {layer!r}",)

    def choice() -> Choice:
        names, kept, columns, size = sized
        words = (why, size, *seen)
        view = None if projected is None else replace(projected, layers=names)
        return Choice(names, kept, columns, layer, classes, most, closed, words, view)

    if budget.milliseconds is not None and parameters is None and not closed:
        taken = _milliseconds(choice().parts(monitor, **options).monitor, call)
        why = f"{why}, {taken:.1f} ms a sample"
        if taken > budget.milliseconds:
            why = f"weights: the last layer, as the last layers took {taken:.1f} ms a sample"
            with network.evaluating():
                sized = _sized(monitor, LastLayers(count=1), call, rank, budget)
    return choice()


def _parameters_of(monitor: Monitor, layer: str, passed: ForwardPass) -> list[str]:
    """Return the names of a layer's parameters; none if the model has them elsewhere."""
    names = [f"{layer}.{name}" for name, _ in passed.layer.named_parameters()]
    return names if set(names) <= set(dict(monitor.model.named_parameters())) else []


def _last_layers(
    monitor: Monitor, call: Inputs, rank: int | None, budget: Budget
) -> tuple[ParameterSet, str]:
    """Return the last 15 % of layers, or the end of them with enough directions; and why."""
    network = monitor._network
    widest, words = select(LastLayers(fraction=0.15), network, call), "weights: the last layers"
    allowed = _directions(widest.num_parameters, budget)
    if rank is not None or allowed >= _ENOUGH:
        return widest, words
    fewer, *more = endings(network, call)
    for longer in more:
        if _directions(longer.num_parameters, budget) < _ENOUGH:
            break
        fewer = longer
    words = f"weights: the end of the last layers, as the budget has room for {allowed} "
    return fewer, words + f"directions in all of them, and fewer than {_ENOUGH} serve worse"


def _directions(weights: int, budget: Budget) -> int:
    """Return how many directions, in float32, half of the memory has room for."""
    return budget.bytes // 4 // (2 * weights)


def _sized(
    monitor: Monitor,
    selection: Selection,
    call: Inputs,
    rank: int | None,
    budget: Budget,
    projected: Projected | None = None,
) -> tuple[tuple[str, ...], int, int, str]:
    """Return names of weights, rank and columns of a sketch within the budget, and why."""
    chosen = select(selection, monitor._network, call)
    weights = chosen.num_parameters if projected is None else projected.most(chosen)
    allowed = budget.bytes // 4  # numbers in float32
    if rank is None:  # the basis in half of the memory
        rank = min(_MOST_RANK, max(_LEAST_RANK, _directions(weights, budget)), weights)
    columns = min(_PER_RANK * rank + _MORE, max(2 * rank, 4 * allowed // weights))
    listed = ", ".join(chosen.names[:4]) + (", ..." if len(chosen.names) > 4 else "")
    why = f"sketch of {listed}: {columns} vectors for a rank of {rank}, "
    return chosen.names, rank, columns, why + f"as {budget.bytes / 2**20:.3g} MiB allow"


def _milliseconds(monitor: Monitor, call: Inputs) -> float:
    """Return the median time of a score of one sample, after a fit on the first batch."""
    # a NaN takes as long as a number does
    clean = [
        t.nan_to_num(0.0, 0.0, 0.0) if t.is_floating_point() else t for t in call.tensors()
    ]
    call = call.with_tensors(clean)
    monitor.fit(
        [call], progress=False, on_bad="skip", check_deterministic=False, together=False
    )
    ask = monitor.output_variance if is_classifier(monitor.likelihood) else monitor.score
    one, times = call.samples(slice(0, 1)), []
    for _ in range(_TIMED + 1):
        began = perf_counter()
        ask(one).cpu()
        times.append(perf_counter() - began)
    return 1e3 * statistics.median(times[1:])
