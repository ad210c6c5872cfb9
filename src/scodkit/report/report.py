"""The report of a monitor at work, and what it is made from: sets, a stream, methods."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scodkit.alarms.drift import DriftAlarm
from scodkit.errors import BatchError, OptionError, optional
from scodkit.likelihoods import Heads
from scodkit.monitor import Monitor
from scodkit.numerics.artifact import check_place
from scodkit.numerics.files import regular_file, replacing

KIND = "numbers of a scodkit report"


@dataclass(frozen=True)
class ScoredSet:
    """A named set of inputs with their scores.

    Args:
        name: As readers know it.
        scores: ``(n,)``, nats (squared units), larger = more atypical; infinite is fine.
        known: Whether the inputs are in-distribution: of the kind the network was trained on.
        inputs: As the model takes them: ``(n, *shape)``, or a sequence of ``n`` tensors, of
            which the report reads only the few it shows. Without them the report has no
            pictures and no shares of layers.
        outputs: ``(n, *shape)``, what the model returned.
        p_values: ``(n,)`` in (0, 1], smaller = more atypical. Needed only where the monitor
            is calibrated by group; otherwise they follow from the scores.
        labels: What each input is, in a few words: its class, its file. Labels that repeat
            make a table by class.
        targets: ``(n,)`` right classes, counted from 0, or ``(n, *shape)`` right outputs;
            with them the report has mistakes, and the error of what scores let pass.

    Raises:
        BatchError: If a score is not a number, or lengths differ.
        OptionError: If there is no name.

    Examples:
        >>> validation = ScoredSet("validation", torch.tensor([0.1, 0.3]), known=True)
        >>> len(validation)
        2
    """

    name: str
    scores: Tensor
    known: bool
    inputs: Tensor | Sequence[Tensor] | None = None
    outputs: Tensor | None = None
    p_values: Tensor | None = None
    labels: Sequence[str] | None = None
    targets: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise OptionError('expected a name of the set, got none; type name="validation"')
        scores = self.scores.detach().to("cpu", torch.float64)
        if scores.ndim != 1 or not len(scores) or bool(scores.isnan().any()):
            raise BatchError(
                f"expected one score or more in {self.name!r}, of shape (n,), none of them "
                f"NaN, got shape {tuple(scores.shape)} with {int(scores.isnan().sum())} NaN; "
                "type scores=monitor.score(inputs)"
            )
        object.__setattr__(self, "scores", scores)
        for name in ("inputs", "outputs", "p_values", "labels", "targets"):
            values = getattr(self, name)
            if values is not None and len(values) != len(scores):
                raise BatchError(
                    f"expected as many {name} as scores in {self.name!r}, {len(scores)}, got "
                    f"{len(values)}; pass those of the same inputs"
                )

    def __len__(self) -> int:
        return len(self.scores)

    @classmethod
    def of(
        cls,
        monitor: Monitor,
        name: str,
        inputs: Tensor,
        *,
        known: bool,
        labels: Sequence[str] | None = None,
        targets: Tensor | None = None,
        batch_size: int = 256,
    ) -> ScoredSet:
        """Score inputs with a monitor.

        Args:
            monitor: Fitted; p-values come with the scores if it is calibrated.
            name: As readers know the set.
            inputs: ``(n, *shape)``, as the model takes them.
            known: Whether they are in-distribution.
            labels: What each input is, in a few words.
            targets: Right classes or outputs.
            batch_size: Inputs scored at a time.

        Returns:
            The set, with predictions.

        Raises:
            BatchError: If there are no inputs.
            OptionError: If the monitor is of several heads.

        Examples:
            >>> from torch import nn
            >>> from scodkit import Gaussian
            >>> _ = torch.manual_seed(0)
            >>> x = torch.randn(50, 2)
            >>> monitor = Monitor(nn.Linear(2, 1), Gaussian(), 2).fit([x], progress=False)
            >>> ScoredSet.of(monitor, "the same", x, known=True).outputs.shape
            torch.Size([50, 1])
        """
        if not len(inputs):
            raise BatchError(f"expected inputs in {name!r}, got none; leave the set out")
        if isinstance(monitor.likelihood, Heads):
            raise OptionError(
                f"expected a monitor of one output for a report, got {monitor.likelihood}; "
                "type ScoredSet(name, monitor.score(inputs), known=True) for the scores alone"
            )
        batches = [monitor(batch) for batch in torch.split(inputs, batch_size)]
        p_values = [batch.p_value for batch in batches if batch.p_value is not None]
        return cls(
            name=name,
            scores=torch.cat([batch.score for batch in batches]),
            known=known,
            inputs=inputs.detach(),
            outputs=torch.cat([batch.output.detach() for batch in batches]).cpu(),
            p_values=torch.cat(p_values) if p_values else None,
            labels=labels,
            targets=targets,
        )

    def batch(self, indices: Sequence[int]) -> Tensor:
        """Return some of the inputs, ``(len(indices), *shape)``.

        Args:
            indices: Which ones.

        Raises:
            BatchError: If the set has no inputs.
        """
        if self.inputs is None:
            raise BatchError(f"expected inputs in {self.name!r}, got a set without them")
        return torch.stack([self.inputs[index] for index in indices])

    def spread(self, count: int) -> list[int]:
        """Return indices of samples from the least to the most atypical, evenly by rank.

        Args:
            count: At most so many; the least and the most atypical are among them.

        Examples:
            >>> ScoredSet("a", torch.tensor([5.0, 1.0, 3.0, 4.0]), known=True).spread(3)
            [1, 3, 0]
        """
        ranks = torch.linspace(0, len(self) - 1, min(count, len(self))).round().long()
        return [int(index) for index in self.scores.argsort(stable=True)[ranks]]


@dataclass(frozen=True)
class WatchedStream:
    """A stream of scores, and the record of a drift alarm that watched it.

    Args:
        scores: ``(T,)``, in the order of the stream; larger = more atypical.
        log_wealth: ``(T,)``, natural logarithm of the alarm's wealth after each score.
        false_alarm: The alarm's accepted probability of ever being wrong.
        alarmed_at: How many scores had come when the alarm rose; None if it did not.
        changed_at: How many scores had come when the stream changed, where that is known.

    Raises:
        BatchError: If there are no scores, or not as many values of the wealth.
    """

    scores: Tensor
    log_wealth: Tensor
    false_alarm: float
    alarmed_at: int | None = None
    changed_at: int | None = None

    def __post_init__(self) -> None:
        if not len(self.scores) or self.scores.shape != self.log_wealth.shape:
            raise BatchError(
                "expected scores (T,) and as many values of the wealth, got shapes "
                f"{tuple(self.scores.shape)} and {tuple(self.log_wealth.shape)}; type "
                "WatchedStream.of(alarm, scores)"
            )

    @classmethod
    def of(
        cls, alarm: DriftAlarm, scores: Tensor, *, changed_at: int | None = None
    ) -> WatchedStream:
        """Push a stream through a new alarm, and record its wealth.

        Args:
            alarm: Nothing has been pushed to it yet.
            scores: ``(T,)``, in the order of the stream.
            changed_at: How many scores come before the stream changes, where that is known.

        Returns:
            The stream, watched.

        Raises:
            BatchError: If scores have been pushed before.

        Examples:
            >>> from scodkit import Calibration
            >>> rng = torch.Generator().manual_seed(0)
            >>> alarm = DriftAlarm(Calibration(torch.rand(500, generator=rng)), seed=0)
            >>> scores = torch.rand(300, generator=rng) + (torch.arange(300) >= 200)
            >>> WatchedStream.of(alarm, scores, changed_at=200).alarmed_at
            205
        """
        if alarm.num_seen:
            raise BatchError(
                f"expected an alarm that has seen nothing, got one that has seen "
                f"{alarm.num_seen} scores; type DriftAlarm(monitor.calibration)"
            )
        log_wealth = []
        for score in scores.tolist():
            alarm.push(score)
            log_wealth.append(alarm.log_wealth)
        return cls(
            scores=scores.detach().to("cpu", torch.float64),
            log_wealth=torch.tensor(log_wealth, dtype=torch.float64),
            false_alarm=alarm.false_alarm,
            alarmed_at=alarm.alarmed_at,
            changed_at=changed_at,
        )

    @property
    def verdict(self) -> str:
        """When the stream changed and when the alarm rose, in words."""
        changed, alarmed = self.changed_at, self.alarmed_at
        rose = f"rose at sample {alarmed}" if alarmed is not None else "did not rise"
        if changed is None:
            return f"The alarm {rose}."
        if alarmed is None:
            return f"The stream changed after sample {changed}. The alarm {rose}."
        when = f"{alarmed - changed} samples later" if alarmed > changed else "before that"
        return f"The stream changed after sample {changed}; the alarm {rose}, {when}."


@dataclass(frozen=True)
class MethodLine:
    """How well a method tells unknown inputs from known ones, and what it costs.

    What is None is left blank; a column that is blank throughout is left out.

    Args:
        name: As readers know it.
        auroc: Probability that an unknown input scores higher than a known one, in [0, 1].
        auroc_ends: Ends of its interval of 95 %.
        aupr: Average precision of unknown inputs, in [0, 1].
        false_alarms: Share of known inputs above its threshold, in [0, 1].
        caught: Share of unknown inputs above its threshold, in [0, 1].
        forward_passes: Time of a scored prediction over that of a bare one, >= 0.
        fit_seconds: How long its fit took.
        inputs: How many known and how many unknown inputs the shares are of.
    """

    name: str
    auroc: float | None = None
    auroc_ends: tuple[float, float] | None = None
    aupr: float | None = None
    false_alarms: float | None = None
    caught: float | None = None
    forward_passes: float | None = None
    fit_seconds: float | None = None
    inputs: tuple[int, int] | None = None


def check_installed() -> None:
    """Make sure a report can be drawn, before work is done for it."""
    for module in ("bokeh", "jinja2", "PIL"):
        optional(module, "report")


@dataclass(eq=False)
class Report:
    """One HTML page, whole in one file, that shows a monitor and what it says of inputs.

    Checks with their verdicts, scores, the rate of false alarms that was asked for beside the
    one found, ROC and precision-recall curves, classes, mistakes, inputs to look at, methods, a
    stream with its alarm, layers, the fit and its configuration: each where there is something
    to show. Needs bokeh, jinja2 and pillow.

    Args:
        monitor: Fitted; calibrated, if there are to be alarms.
        sets: Scored inputs, known and unknown, with a name each.
        methods: Lines of a table of methods.
        stream: A stream with its alarm.
        title: Heading of the page.
        false_alarm: Accepted share of false alarms of the threshold that is shown.
        command: What was typed to make it, to be shown.
        data: Where data is from, by its name, to be shown.
        earlier: Numbers of another report, as `read_numbers` returns them, to compare with.

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
        ...     path = Report(monitor, sets).save(f"{folder}/report.html")
        ...     path.stat().st_size < 5e6, "sets" in read_numbers(f"{folder}/report.json")
        (True, True)
    """

    monitor: Monitor
    sets: Sequence[ScoredSet] = ()
    _: KW_ONLY
    methods: Sequence[MethodLine] = ()
    stream: WatchedStream | None = None
    title: str = "What the network knows"
    false_alarm: float = 0.05
    command: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    earlier: Mapping[str, Any] | None = None

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
        return self._made()[0]

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the page as plain data, see docs/guides/report.md."""
        return self._made()[1]

    def _made(self) -> tuple[str, dict[str, Any]]:
        check_installed()
        from scodkit.report.contents import made

        return made(self)

    def save(self, path: str | Path) -> Path:
        """Write the page, and its numbers beside it: ``report.html`` and ``report.json``.

        At every moment each path holds the old file or the new one.

        Args:
            path: Where to; by custom it ends in ``.html``.

        Returns:
            The path of the page.

        Raises:
            OptionError: If the file for the numbers is something else.
        """
        path = Path(path)
        beside = numbers_beside(path)
        for each in (path, beside):
            check_place(each)
        if beside.exists() and not is_numbers(beside):
            raise OptionError(
                f"expected {beside} to be free for the numbers of the page, got another file; "
                "type another name for the page"
            )
        text, document = self._made()
        with replacing(path) as temporary:
            # newlines as they are: the page's policy holds the hashes of its scripts; a file's
            # name may hold bytes that are no characters
            temporary.write_text(text, "utf-8", "backslashreplace", newline="\n")
        with replacing(beside) as temporary:
            temporary.write_text(
                json.dumps(document, indent=1, allow_nan=False) + "\n", "utf-8"
            )
        return path


def numbers_beside(path: Path) -> Path:
    """Return where the numbers of a page go.

    Args:
        path: Of the page.

    Raises:
        OptionError: If that is the page itself.
    """
    if path.suffix == ".json":
        raise OptionError(
            f"expected a name for a page, got {path}, where its numbers go; type "
            f"{path.with_suffix('.html')}"
        )
    return path.with_suffix(".json")


def is_numbers(path: Path) -> bool:
    """Return whether a file has the numbers of a report, which may be replaced."""
    with path.open("rb") as file:
        return f'"kind": "{KIND}"'.encode() in file.read(200)


def read_numbers(path: str | Path) -> dict[str, Any]:
    """Return the numbers that a report has left beside its page.

    Args:
        path: A file ``report.json``.

    Raises:
        OptionError: If it is something else.
    """
    path = regular_file(Path(path), "file of a report's numbers")
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise OptionError(
            f"expected the numbers of a report, a .json beside its page, in {path}, got "
            "something else; type the file that scod report has written"
        )
    return document
