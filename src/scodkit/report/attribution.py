"""Which layers the scores come from, set by set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scodkit.monitor import Monitor
from scodkit.report.charts.canvas import colours_of
from scodkit.report.scored_set import ScoredSet
from scodkit.report.table import Cell, Table, number

_MOST_SAMPLES = 60
_MOST_LAYERS = 20


def layer_table(monitor: Monitor, sets: Sequence[ScoredSet]) -> Table | None:
    """Return the shares of the layers in the scores of each set with inputs; None without any.

    Args:
        monitor: Fitted.
        sets: Scored inputs; of large ones, samples evenly by rank are looked at.
    """
    found: list[tuple[ScoredSet, str, Tensor]] = []
    names: tuple[str, ...] = ()
    for one, colour in zip(sets, colours_of(sets), strict=True):
        shares = None if one.inputs is None else _shares(monitor, one)
        if shares is not None:
            names, values = shares
            found.append((one, colour, values))
    if not found:
        return None
    order = torch.stack([values for *_, values in found]).abs().amax(0)
    ranked = order.argsort(descending=True, stable=True).tolist()
    shown = sorted(ranked[:_MOST_LAYERS])
    rows = [[Cell(names[i]), *(_share(v[i], c) for _, c, v in found)] for i in shown]
    rest = ranked[_MOST_LAYERS:]
    if rest:
        others = (_share(values[rest].sum(), colour) for _, colour, values in found)
        rows.append([Cell(f"others ({len(rest)})"), *others])
    titles = ("layer", *(one.name for one, *_ in found))
    counts = ", ".join(f"{min(len(one), _MOST_SAMPLES)} of {one.name}" for one, *_ in found)
    caption = f"Shares of the layers in the scores, in order of the model ({counts})"
    return Table(caption, titles, tuple(map(tuple, rows)))


def _shares(monitor: Monitor, one: ScoredSet) -> tuple[tuple[str, ...], Tensor] | None:
    """Return names of layers and their shares ``(layers,)``, which sum to 1, if known."""
    layers = monitor.explain(one.batch(one.spread(_MOST_SAMPLES))).layers
    finite = layers.values[layers.values.isfinite().all(1)].cpu()
    total = float(finite.sum())
    return (layers.names, finite.sum(0) / total) if total > 0 else None


def _share(value: Tensor, colour: str) -> Cell:
    own = float(value)
    return Cell(number(own, ".1%").text, own, max(-1.0, min(1.0, own)), colour)
