"""The most and the least atypical inputs, with what their scores respond to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from scodkit.errors import ScodError
from scodkit.monitor import Monitor
from scodkit.report import pictures
from scodkit.report.predictions import in_words
from scodkit.report.scored_set import ScoredSet
from scodkit.report.table import number

_PER_ROW = 6


@dataclass(frozen=True)
class Shown:
    """One input of a gallery.

    Args:
        name: Its set and place.
        says: Label, prediction and score.
        image: Data URI; None for a vector.
        slopes: Data URI of the map of slopes; None for a vector, or where there are none.
        bars: Heights of a vector's numbers in [-1, 1]; empty for an image.
        slope_bars: Likewise of its slopes.
    """

    name: str
    says: tuple[str, ...]
    image: str | None
    slopes: str | None
    bars: tuple[float, ...]
    slope_bars: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """Some inputs of one set.

    Args:
        title: Which ones.
        items: The inputs.
    """

    title: str
    items: tuple[Shown, ...]


@dataclass(frozen=True)
class Gallery:
    """The most and the least atypical inputs of all sets.

    Args:
        rows: Two for each set.
        note: Why there are no slopes; empty if there are.
    """

    rows: tuple[Row, ...]
    note: str


def gallery(monitor: Monitor, sets: Sequence[ScoredSet]) -> Gallery | None:
    """Return the gallery of the sets whose inputs can be shown; None if there are none.

    Args:
        monitor: Fitted.
        sets: Scored inputs.
    """
    rows, notes = [], []
    for one in sets:
        shape = one.shape
        if shape is None or not (pictures.is_image(shape) or pictures.is_vector(shape)):
            continue
        order = one.scores.argsort(stable=True).tolist()
        few = min(_PER_ROW, len(order) // 2 or 1)
        most, least = order[::-1][:few], order[:few]
        inputs = one.batch(most + least)
        gradient, note = _slopes(monitor, inputs)
        notes.append(note)
        items = tuple(
            _shown(monitor, one, place, sample, slope)
            for place, sample, slope in zip(most + least, inputs, gradient, strict=True)
        )
        rows.append(Row(f"{one.name}: most atypical", items[:few]))
        rows.append(Row(f"{one.name}: least atypical", items[few:]))
    return Gallery(tuple(rows), max(notes)) if rows else None


def _slopes(monitor: Monitor, inputs: Tensor) -> tuple[list[Tensor | None], str]:
    """Return the slopes of each input, None where there are none, and why not."""
    nothing: list[Tensor | None] = [None] * len(inputs)
    if not inputs.is_floating_point():
        return nothing, "No slopes: the inputs are not floating-point numbers."
    try:
        saliency = monitor.explain(inputs, saliency=True).saliency
    except ScodError as error:
        return nothing, f"No slopes: {error}."
    assert saliency is not None
    finite = saliency.gradient.flatten(1).isfinite().all(1).tolist()
    return [g if ok else None for g, ok in zip(saliency.gradient, finite, strict=True)], ""


def _shown(
    monitor: Monitor, one: ScoredSet, place: int, sample: Tensor, slope: Tensor | None
) -> Shown:
    says = [] if one.labels is None else [one.labels[place]]
    if one.outputs is not None:
        says.append("predicted " + in_words(monitor.likelihood, one.outputs[place]))
    says.append(f"score {number(float(one.scores[place])).text}")
    name = f"{one.name}, sample {place}"
    if pictures.is_vector(sample.shape):
        slopes = () if slope is None else tuple(pictures.bars(slope))
        return Shown(name, tuple(says), None, None, tuple(pictures.bars(sample)), slopes)
    drawn = None if slope is None else pictures.slope_map(slope)
    return Shown(name, tuple(says), pictures.image(sample), drawn, (), ())
