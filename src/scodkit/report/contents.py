"""What a report says: its sections, each of them left out where there is nothing to say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit import __version__
from scodkit.monitor import Monitor
from scodkit.report.charts.canvas import colours_of
from scodkit.report.charts.histogram import histogram
from scodkit.report.charts.separation import precision_recall_chart, roc_chart
from scodkit.report.charts.spectrum import captured, spectrum
from scodkit.report.charts.stream import stream_scores, stream_wealth, verdict
from scodkit.report.curves import Curves, curves
from scodkit.report.gallery import gallery
from scodkit.report.method_line import MethodLine
from scodkit.report.predictions import in_words
from scodkit.report.scored_set import ScoredSet
from scodkit.report.section import Fact, Page, Section
from scodkit.report.table import Cell, Table, number, percent, plain
from scodkit.report.watched_stream import WatchedStream
from scodkit.summary import Summary

_SAMPLES = 12  # of each set, in the table of samples


@dataclass(frozen=True)
class Contents:
    """What a report is made from.

    Args:
        monitor: Fitted.
        sets: Scored inputs.
        methods: Lines of the table of methods.
        stream: A stream with its alarm.
        title: Heading of the page.
        false_alarm: Rate of the threshold.
    """

    monitor: Monitor
    sets: tuple[ScoredSet, ...]
    methods: tuple[MethodLine, ...]
    stream: WatchedStream | None
    title: str
    false_alarm: float

    def page(self) -> Page:
        """Return all that is on the page."""
        summary, found = self.monitor.summary(), self._curves()
        sections = (
            self._scores(),
            self._separation(found),
            self._methods(),
            self._stream(),
            self._gallery(),
            self._samples(),
            self._layers(),
            self._fit(summary),
            self._settings(),
        )
        facts = tuple(self._facts(summary, found))
        kept = tuple(section for section in sections if section is not None)
        return Page(self.title, self._lead(summary), facts, summary.notes, kept)

    def threshold(self) -> float | None:
        """Return the one score of the alarm; None if there is none, or one for each group."""
        calibration = self.monitor.calibration
        if calibration is None or calibration.groups is not None:
            return None
        return calibration.threshold(self.false_alarm)

    def p_values(self, one: ScoredSet) -> Tensor | None:
        """Return the p-values ``(n,)`` of a set; None where they are not known."""
        if one.p_values is not None:
            return one.p_values
        calibration = self.monitor.calibration
        if calibration is None or calibration.groups is not None:
            return None
        return calibration.p_value(one.scores)

    def alarms(self, one: ScoredSet) -> float | None:
        """Return the share of a set that raises an alarm, in [0, 1]; None if not known."""
        p_values = self.p_values(one)
        return (
            None if p_values is None else float((p_values <= self.false_alarm).double().mean())
        )

    def _curves(self) -> dict[str, Curves]:
        known = [one.scores for one in self.sets if one.known]
        if not known:
            return {}
        return {
            one.name: curves(torch.cat(known), one.scores) for one in self.sets if not one.known
        }

    def _lead(self, summary: Summary) -> str:
        name = type(self.monitor.model).__name__
        said = (
            f"{name} with {summary.num_parameters} weights looked at, fitted on "
            f"{summary.num_data} samples."
        )
        rates = [(one.name, self.alarms(one)) for one in self.sets]
        shares = [f"{percent(rate)} of {name}" for name, rate in rates if rate is not None]
        if shares:
            asked = number(100 * self.false_alarm).text
            said += f" Where {asked} % false alarms are accepted, {_and(shares)} raise one."
        return said

    def _facts(self, summary: Summary, found: dict[str, Curves]) -> list[Fact]:
        facts = []
        for name, own in found.items():
            facts.append(Fact(f"AUROC, {name}", f"{own.roc.area:.3f}"))
        for one in self.sets:
            rate = self.alarms(one)
            if rate is not None:
                facts.append(Fact(f"alarms, {one.name}", percent(rate)))
        threshold = self.threshold()
        if threshold is not None:
            facts.append(Fact("alarm above", f"{threshold:.3g} nats"))
        facts.append(Fact("captured curvature", percent(summary.captured)))
        if self.stream is not None and self.stream.alarmed_at is not None:
            facts.append(Fact("stream alarm at sample", str(self.stream.alarmed_at)))
        return facts

    def _scores(self) -> Section | None:
        if not self.sets:
            return None
        chart = histogram(self.sets, self.threshold(), self.false_alarm)
        levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
        rows = []
        for one in self.sets:
            low, middle, high = torch.quantile(one.scores, levels, interpolation="lower")
            cells = [number(float(value)) for value in (low, middle, high)]
            kind = Cell("known" if one.known else "unknown")
            alarms = number(self.alarms(one), ".1%")
            rows.append((Cell(one.name), kind, number(len(one), "d"), *cells, alarms))
        titles = ("set", "kind", "inputs", "5 % below", "median", "95 % below", "alarms")
        table = Table("Scores of the sets, in nats", titles, tuple(rows))
        says = (
            "The score is how far the prediction could still move under weights that the "
            "training data does not tell apart: larger means more atypical."
        )
        charts = () if chart is None else (chart,)
        return Section("scores", "Scores", says, charts, (table.without_blank_columns(),))

    def _separation(self, found: dict[str, Curves]) -> Section | None:
        if not found:
            return None
        says = (
            "How well the score tells each unknown set from all known inputs. Bands hold 95 % "
            "of curves over inputs drawn anew; they say nothing of other trained networks."
        )
        charts = (roc_chart(found), precision_recall_chart(found))
        return Section("separation", "Telling known from unknown", says, charts)

    def _methods(self) -> Section | None:
        if not self.methods:
            return None
        rows = tuple(
            (
                Cell(line.name),
                number(line.auroc, ".3f"),
                number(line.aupr, ".3f"),
                number(line.false_alarms, ".1%"),
                number(line.caught, ".1%"),
                number(line.forward_passes, ".1f"),
                number(line.fit_seconds, ".2f"),
            )
            for line in self.methods
        )
        titles = ("method", "AUROC", "AUPR", "false alarms", "caught", "cost", "fit, s")
        caption = "Methods; cost is the time of a scored prediction over that of a bare one"
        table = Table(caption, titles, rows).without_blank_columns()
        says = "Press a column's title to sort by it."
        return Section("methods", "Methods compared", says, tables=(table,))

    def _stream(self) -> Section | None:
        if self.stream is None:
            return None
        scores, wealth = stream_scores(self.stream), stream_wealth(self.stream)
        charts = (wealth,) if scores is None else (scores, wealth)
        return Section("stream-of-samples", "Stream", verdict(self.stream), charts)

    def _gallery(self) -> Section | None:
        found = gallery(self.monitor, self.sets)
        if found is None:
            return None
        says = (
            "Each input with the slopes of its score: orange where a larger number would raise "
            "the score, blue where it would lower it."
        )
        title = "Most and least atypical inputs"
        return Section("gallery", title, says, gallery=found)

    def _samples(self) -> Section | None:
        if not self.sets:
            return None
        rows = []
        for one in self.sets:
            p_values = self.p_values(one)
            for place in one.spread(_SAMPLES):
                p_value = None if p_values is None else float(p_values[place])
                row = (*self._sample(one, place), *self._alarm(p_value), number(place, "d"))
                rows.append(row)
        titles = ("set", "is", "prediction", "score", "p-value", "alarm", "sample")
        caption = "Samples of each set, from the least to the most atypical, evenly by rank"
        table = Table(caption, titles, tuple(rows)).without_blank_columns()
        says = "What the network says of an input, and how far to trust it."
        return Section("samples", "Predictions and scores", says, tables=(table,))

    def _sample(self, one: ScoredSet, place: int) -> tuple[Cell, ...]:
        label = "" if one.labels is None else one.labels[place]
        output = None if one.outputs is None else one.outputs[place]
        words = "" if output is None else in_words(self.monitor.likelihood, output)
        score = number(float(one.scores[place]))
        return (Cell(one.name), Cell(label), Cell(words), score)

    def _alarm(self, p_value: float | None) -> tuple[Cell, Cell]:
        if p_value is None:
            return Cell(""), Cell("")
        return number(p_value), Cell("alarm" if p_value <= self.false_alarm else "no")

    def _layers(self) -> Section | None:
        table = layer_table(self.monitor, self.sets)
        if table is None:
            return None
        says = (
            "Where the scores of a set come from. Shares sum to 100 %; one below zero belongs "
            "to a layer whose changes others make up for."
        )
        return Section("layers", "Layers", says, tables=(table,))

    def _fit(self, summary: Summary) -> Section | None:
        charts = tuple(c for c in (spectrum(summary), captured(summary)) if c is not None)
        if not charts:
            return None
        says = "Directions in the space of weights that the training data would notice."
        return Section("fit", "What the fit has kept", says, charts)

    def _settings(self) -> Section:
        says = "What to give to make this again; the fingerprints tie it to the weights."
        return Section(
            "configuration",
            "Configuration",
            says,
            tables=(settings_table(self.monitor),),
            folded=(parameter_table(self.monitor),),
        )


def _and(parts: Sequence[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


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


def settings_table(monitor: Monitor) -> Table:
    """Return the configuration of a fitted monitor, with the fingerprints of its weights.

    Args:
        monitor: Fitted.
    """
    fitted, basis, calibration = monitor.fitted, monitor.basis, monitor.calibration
    held_out = "none"
    if calibration is not None:
        held_out = f"{calibration.num_data} held-out samples"
        if calibration.groups is not None:
            held_out += f" in {len(set(calibration.groups.tolist()))} groups"
    rows = {
        "model": type(monitor.model).__name__,
        "likelihood": repr(monitor.likelihood),
        "sketch": repr(monitor.sketch),
        "rank": f"{monitor.rank} asked for, {basis.rank} kept",
        "prior scale": f"{monitor.prior_scale:g}",
        "task": "all of the prediction" if monitor.task is None else "a function",
        "output of a sample": str(tuple(fitted.shape)),
        "samples fitted": f"{basis.num_data}, {monitor.skipped} skipped",
        "captured curvature": f"{basis.captured:.4f} of {basis.trace:.4g}",
        "scores are upper bounds of exact ones": "yes" if basis.certified else "not known",
        "calibration": held_out,
        "fingerprint of the chosen weights": fitted.fingerprints.parameters,
        "fingerprint of the model": fitted.fingerprints.model,
        "scodkit": __version__,
        "torch": torch.__version__,
    }
    rows |= {f"note: {name}": json.dumps(value) for name, value in monitor.notes.items()}
    cells = tuple((Cell(name), Cell(value)) for name, value in rows.items())
    return Table("Configuration and fingerprints", ("what", "value"), cells, sortable=False)


def parameter_table(monitor: Monitor) -> Table:
    """Return the chosen weights by name.

    Args:
        monitor: Fitted.
    """
    blocks = monitor.fitted.parameters.blocks
    rows: list[list[str | float]] = []
    for block in blocks:
        shape = " x ".join(map(str, block.shape)) or "1"
        rows.append([block.name, shape, float(block.columns.stop - block.columns.start)])
    return plain("Weights the scores are about", ("parameter", "shape", "numbers"), rows)
