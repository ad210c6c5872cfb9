"""A small monitor with everything a report can show, and a reader of its pages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from scodkit import Categorical, Monitor
from scodkit.alarms import DriftAlarm
from scodkit.errors import SuspiciousInputWarning
from scodkit.report import MethodLine, Report, ScoredSet, WatchedStream

_CHECKS = "checks"
NASTY = '</script><img src=x onerror="alert(1)">&amp; $$x$$'


@dataclass(frozen=True)
class Case:
    """A fitted, calibrated monitor, inputs of two kinds and a stream."""

    monitor: Monitor
    known: torch.Tensor
    unknown: torch.Tensor
    sets: tuple[ScoredSet, ...]
    stream: WatchedStream
    methods: tuple[MethodLine, ...]

    def report(self, **changes):
        options = {"methods": self.methods, "stream": self.stream, "title": f"T {NASTY}"}
        return Report(self.monitor, self.sets, **(options | changes))


def image_case():
    """Images of noise, brighter where they are unknown; overlapping scores."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )
    x = torch.rand(300, 1, 6, 6)
    monitor = Monitor(net, Categorical(), rank=12).fit([x[:100]], progress=False)
    monitor.calibrate([x[110:200]], progress=False)
    known, unknown = x[200:], 1.5 * torch.randn(60, 1, 6, 6)
    assert monitor.calibration is not None
    names = [f"{NASTY} {i}" for i in range(60)]
    classes = monitor(x[200:]).output.argmax(1)
    classes[:7] += 1  # mistakes, some of them of a class that there is not
    with pytest.warns(SuspiciousInputWarning):  # darker than black
        sets = (
            ScoredSet.of(
                monitor, "known ones", known, known=True, targets=classes, batch_size=7
            ),
            ScoredSet.of(monitor, f"others {NASTY}", unknown, known=False, labels=names),
        )
    scores = monitor.score(torch.cat([known, unknown]))
    stream = WatchedStream.of(DriftAlarm(monitor.calibration, seed=0), scores, changed_at=100)
    methods = (
        MethodLine("middle", auroc=0.8, auroc_ends=(0.7, 0.85), aupr=0.81, forward_passes=10.0),
        MethodLine("best", auroc=0.9, aupr=0.7, forward_passes=2.0),
        MethodLine(f"worst {NASTY}", auroc=0.1, aupr=None, forward_passes=9.0),
    )
    return Case(monitor, known, unknown, sets, stream, methods)


@dataclass
class Element:
    """A start tag of a page."""

    tag: str
    attributes: dict[str, str]


@dataclass
class ReadPage(HTMLParser):
    """What a page says: its tags, the text of each element by id, its tables by caption."""

    text: str
    elements: list[Element] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    orders: dict[str, list[list[str | None]]] = field(default_factory=dict)
    words: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    scripts: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__(convert_charrefs=True)
        self._inside: list[str] = []
        self._label = self._caption = ""
        self.feed(self.text)

    @property
    def plots(self):
        """The charts' data, as the page's script reads it."""
        return json.loads(self.scripts[0])["plots"]

    def handle_starttag(self, tag, attrs):
        self.elements.append(Element(tag, dict(attrs)))
        if tag == "caption":
            self._caption = ""
        if tag == "table" and dict(attrs).get("class") == "checks":
            self._caption = _CHECKS
        if tag == "tr":
            self.tables.setdefault(self._caption, []).append([])
            self.orders.setdefault(self._caption, []).append([])
        if tag in ("td", "th"):
            self.tables[self._caption][-1].append("")
            self.orders[self._caption][-1].append(dict(attrs).get("data-order"))
        if tag == "dt":
            self._label = ""
        if tag == "script":
            self.scripts.append("")
        if tag not in ("meta", "img", "rect", "link", "br", "input"):
            self._inside.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._inside.pop() == tag, f"{tag} is closed, but was not opened last"

    def handle_data(self, data):
        inside = self._inside
        if "script" in inside:
            self.scripts[-1] += data
        elif "caption" in inside:
            self._caption += data
        elif "td" in inside or "th" in inside:
            self.tables[self._caption][-1][-1] += data
        elif "dt" in inside:
            self._label += data
        elif "dd" in inside:
            before = self.facts.get(self._label)
            self.facts[self._label] = data if before is None else f"{before}: {data}"
        elif "style" not in inside:
            self.words += data

    @property
    def checks(self):
        """Rows of the checks: verdict, name, finding, advice."""
        return self.tables[_CHECKS][1:]

    def headings(self):
        return [int(e.tag[1]) for e in self.elements if e.tag in ("h1", "h2", "h3", "h4")]

    def ids(self):
        return [e.attributes["id"] for e in self.elements if "id" in e.attributes]

    def table(self, beginning):
        (found,) = [rows for name, rows in self.tables.items() if name.startswith(beginning)]
        return found


def columns_of(plots, name):
    """Return the data of all glyphs of one chart, as lists by column."""
    (plot,) = [plot for plot in plots if plot["target_id"] == name]
    found = []

    def walk(part):
        if isinstance(part, dict):
            if part.get("name") == "ColumnDataSource":
                entries = part["attributes"]["data"]["entries"]
                found.append({key: values for key, values in entries})
            for inner in part.values():
                walk(inner)
        elif isinstance(part, list):
            for inner in part:
                walk(inner)

    walk(plot)
    return found
