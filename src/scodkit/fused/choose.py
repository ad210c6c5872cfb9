"""Selects layers, rank and sketch of `Fused` on the first batch of a fit."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from scodkit.errors import OptionError
from scodkit.fused.features import (
    FeatureBank,
    ForwardPass,
    forward_pass,
    last_layer,
    most_samples,
)
from scodkit.fused.parts import Parts, num_classes
from scodkit.model.inputs import Inputs
from scodkit.model.parameters import LastLayers, Selection, select
from scodkit.monitor import Monitor
from scodkit.scoring.evidence import is_classifier
from scodkit.sketch import Nystrom

# size of the paper's sketch: _PER_RANK vectors for each one kept, plus _MORE
_PER_RANK, _MORE = 6, 4
_MOST_RANK, _LEAST_RANK = 100, 5

# scores that are timed if the budget limits the time
_TIMED = 5


@dataclass(frozen=True)
class Budget:
    """Memory and time for a score.

    Args:
        bytes: Memory for scoring: half for the basis; a quarter, and at most 64 MiB, for
            training features (of at least a thousand samples).
        milliseconds: Time of a scored batch of one sample, including the prediction; None for
            no limit. If the selected layers take longer on the first sample of the training
            data, only the last layer is used.
    """

    bytes: int = 2**28
    milliseconds: float | None = None

    def __post_init__(self) -> None:
        if type(self.bytes) is not int or self.bytes < 1:
            raise OptionError(f"expected bytes as a whole number, got {self.bytes!r}")
        if self.milliseconds is not None and not 0 < self.milliseconds < math.inf:
            raise OptionError(f"expected milliseconds > 0, got {self.milliseconds!r}")


def choose(
    monitor: Monitor,
    batch: object,
    *,
    parameters: Selection | None,
    rank: int | None,
    layer: str | None,
    budget: Budget,
    **options: Any,
) -> Parts:
    """Return the parts to fit, selected on the first batch of training data.

    Args:
        monitor: One of the same model and likelihood, with any weights.
        batch: The first batch.
        parameters: Which weights; None to select them.
        rank: Directions to keep; None for as many as the budget allows.
        layer: Name of the module whose inputs are the features; None to select it.
        budget: Memory and time for a score.
        options: Of the monitor to create.
    """
    network, likelihood = monitor._network, monitor.likelihood
    selection, why = parameters, "weights: as given"
    bank, closed = None, False
    with network.evaluating():
        call = network.inputs_of(batch)
        call.check_some()
        if is_classifier(likelihood):
            layer = layer or last_layer(network, call)
            passed = forward_pass(network, call, layer)
            most = most_samples(passed.features.shape[1], budget.bytes // 4)
            bank = FeatureBank(num_classes(likelihood, passed.output), most)
            names = _parameters_of(monitor, layer, passed)
            if selection is None and names and passed.ends_in_layer:
                selection, closed = names, True
                why = "weights: the last Linear layer, whose curvature has a closed form"
        if selection is None:
            selection, why = LastLayers(fraction=0.15), "weights: the last layers"
        chosen, size = _sized(monitor, selection, call, rank, budget, options)
    if budget.milliseconds is not None and parameters is None and not closed:
        taken = _milliseconds(chosen, call)
        why = f"{why}, {taken:.1f} ms a sample"
        if taken > budget.milliseconds:
            why = f"weights: the last layer, as the last layers took {taken:.1f} ms a sample"
            with network.evaluating():
                last = LastLayers(count=1)
                chosen, size = _sized(monitor, last, call, rank, budget, options)
    lines = [why, size]
    if bank is not None:
        lines.append(f"features: what goes into {layer!r}")
    return Parts(chosen, layer if bank else None, bank, closed, tuple(lines))


def _parameters_of(monitor: Monitor, layer: str, passed: ForwardPass) -> list[str]:
    """Return the names of a layer's parameters; none if the model has other names for them."""
    names = [f"{layer}.{name}" for name, _ in passed.layer.named_parameters()]
    return names if set(names) <= set(dict(monitor.model.named_parameters())) else []


def _sized(
    monitor: Monitor,
    selection: Selection,
    call: Inputs,
    rank: int | None,
    budget: Budget,
    options: dict[str, Any],
) -> tuple[Monitor, str]:
    """Return a monitor of a selection, with rank and sketch within the budget, and why."""
    chosen = select(selection, monitor._network, call)
    weights, allowed = chosen.num_parameters, budget.bytes // 4  # numbers in float32
    if rank is None:  # the basis in half of the memory
        rank = min(_MOST_RANK, max(_LEAST_RANK, allowed // (2 * weights)), weights)
    columns = min(_PER_RANK * rank + _MORE, max(2 * rank, 4 * allowed // weights))
    sized = Monitor(
        monitor.model,
        monitor.likelihood,
        rank,
        sketch=Nystrom(size=columns),
        parameters=chosen.names,
        **options,
    )
    listed = ", ".join(chosen.names[:4]) + (", ..." if len(chosen.names) > 4 else "")
    why = f"sketch of {listed}: {columns} vectors for a rank of {rank}, "
    return sized, why + f"as {budget.bytes / 2**20:.3g} MiB allow"


def _milliseconds(monitor: Monitor, call: Inputs) -> float:
    """Return the median time of a score of one sample, after a fit on the first batch."""
    monitor.fit([call], progress=False, check_deterministic=False, together=False)
    score = monitor.output_variance if is_classifier(monitor.likelihood) else monitor.score
    sample, times = call.samples(slice(0, 1)), []
    for _ in range(_TIMED + 1):
        start = perf_counter()
        score(sample).cpu()
        times.append(perf_counter() - start)
    return 1e3 * statistics.median(times[1:])
