"""The report: one page that shows a monitor at work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from scodkit.errors import OptionError, optional
from scodkit.monitor import Monitor
from scodkit.numerics.artifact import check_place
from scodkit.numerics.files import replacing
from scodkit.report.data import MethodLine, ScoredSet, WatchedStream


def check_installed() -> None:
    """Make sure a report can be drawn, before work is done for it."""
    for module in ("bokeh", "jinja2", "PIL"):
        optional(module, "report")


@dataclass(eq=False)
class Report:
    """One HTML page, whole in one file, that shows a monitor and what it says of inputs.

    Scores and histograms, ROC and precision-recall curves, methods, a stream with its alarm,
    the most and least atypical inputs, shares of layers, the fit and its configuration: each
    where there is something to show. Needs bokeh, jinja2 and pillow.

    Args:
        monitor: Fitted; calibrated, if there are to be alarms.
        sets: Scored inputs, known and unknown, with a name each.
        methods: Lines of a table of methods.
        stream: A stream with its alarm.
        title: Heading of the page.
        false_alarm: Accepted share of false alarms of the threshold that is shown.

    Raises:
        OptionError: If two sets have the same name.

    Examples:
        >>> import tempfile, torch
        >>> from torch import nn
        >>> from scodkit import Gaussian
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(200, 2)
        >>> monitor = Monitor(nn.Linear(2, 1), Gaussian(), 3).fit([x[:100]], progress=False)
        >>> _ = monitor.calibrate([x[100:]], progress=False)
        >>> sets = [ScoredSet.of(monitor, "far away", x + 5, known=False)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Report(monitor, sets).save(f"{folder}/report.html").stat().st_size < 5e6
        True
    """

    monitor: Monitor
    sets: Sequence[ScoredSet] = ()
    _: KW_ONLY
    methods: Sequence[MethodLine] = ()
    stream: WatchedStream | None = None
    title: str = "What the network knows"
    false_alarm: float = 0.05

    def __post_init__(self) -> None:
        self.sets, self.methods = tuple(self.sets), tuple(self.methods)
        names = [one.name for one in self.sets]
        for name in names:
            if names.count(name) > 1:
                raise OptionError(
                    f"expected sets with names of their own, got {name!r} twice; rename one"
                )

    def html(self) -> str:
        """Return the page."""
        check_installed()
        from scodkit.report.contents import page_of

        return page_of(self)

    def save(self, path: str | Path) -> Path:
        """Write the page so that at every moment the path holds the old one or the new one.

        Args:
            path: Where to; by custom it ends in ``.html``.

        Returns:
            The path.
        """
        path = Path(path)
        check_place(path)
        text = self.html()
        with replacing(path) as temporary:
            # newlines as they are: the page's policy holds the hashes of its scripts; a file's
            # name may hold bytes that are no characters
            temporary.write_text(text, "utf-8", "backslashreplace", newline="\n")
        return path
