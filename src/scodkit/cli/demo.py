"""``scod demo``: from training to an alarm and a report, on digits that need no download."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option, echo

import scodkit
from scodkit.cli import options
from scodkit.cli import output as shown
from scodkit.errors import optional

if TYPE_CHECKING:
    from torch import Tensor, nn

    from scodkit.baselines import Detector
    from scodkit.report import MethodLine, WatchedStream

_FALSE_ALARM = 0.05
_TRAINED, _HELD_OUT = 500, 200  # of the 901 digits 0-4; the others are for the test
_BEFORE = 150  # digits 0-4 of the stream, then as many 5-9
_SCOD = "SCOD"  # the one that is shown in the report
_CLASSES = [f"digit {number}" for number in range(10)]
# columns of the table: fields of a `MethodLine` with their headings and formats
_COLUMNS = {
    "name": ("score", ""),
    "auroc": ("AUROC", ".3f"),
    "aupr": ("AUPR", ".3f"),
    "false_alarms": ("alarms 0-4", ".1%"),
    "caught": ("alarms 5-9", ".1%"),
    "forward_passes": ("cost", ".1f"),
    "fit_seconds": ("fit s", ".2f"),
}

_SAME = """\
monitor = Monitor(net, Categorical(), rank=50).fit(train_loader).calibrate(heldout_loader)
sets = [ScoredSet.of(monitor, "new inputs", x, known=False)]
Report(monitor, sets).save("report.html")"""


@dataclass(frozen=True)
class Digits:
    """Digits to train on, to calibrate with and to score.

    Args:
        train_x: Digits 0-4, images ``(n, 1, 8, 8)`` in [0, 1].
        train_y: Their labels, ``(n,)``.
        heldout_x: Other digits 0-4, for the calibration.
        test_x: Other digits 0-4, to score.
        test_y: Their labels.
        novel_x: Digits 5-9, to score.
        novel_y: Their labels.
    """

    train_x: Tensor
    train_y: Tensor
    heldout_x: Tensor
    test_x: Tensor
    test_y: Tensor
    novel_x: Tensor
    novel_y: Tensor


def demo(
    ctx: Context,
    output: Annotated[Path, Option("--output", "-o", help="File for the report.")] = Path(
        "scod_demo.html"
    ),
    force: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Train a small network on digits, and ask it about others.

    It learns 0 to 4, and is asked about 5 to 9: does it notice? No download: the digits come
    with scikit-learn. Takes less than a minute.

    Example: scod demo -o demo.html
    """
    import torch

    from scodkit.cli.report import check_page
    from scodkit.report import check_installed

    with shown.stoppable(f"{output} is as it was; type the same command again"):
        check_page(output, ctx.params)
        check_installed()
        torch.set_num_threads(1)  # faster for so small a network, and the same on all machines
        digits = load_digits()
        shown.note(f"training a small network on {len(digits.train_x)} digits 0-4")
        net = train(digits.train_x, digits.train_y)
        shown.note("fitting, calibrating and timing the methods")
        monitor, lines = compare(net, digits)
        stream = write_report(output, monitor, digits, lines)
    if as_json:
        alarm = {"alarmed_at": stream.alarmed_at, "changed_at": stream.changed_at}
        methods = [asdict(line) for line in lines]
        page = {"report": str(output), "numbers": str(output.with_suffix(".json"))}
        shown.show_json({**page, "methods": methods, "stream": alarm})
        return
    _show(output, digits, net, lines, stream)


def load_digits() -> Digits:
    """Return scikit-learn's digits, shuffled and divided."""
    import torch

    data = optional("sklearn.datasets", "demo").load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(data.target)[order]
    known = labels < 5
    sizes = [_TRAINED, _HELD_OUT, int(known.sum()) - _TRAINED - _HELD_OUT]
    train_x, heldout_x, test_x = torch.split(images[known], sizes)
    train_y, _, test_y = torch.split(labels[known], sizes)
    novel_x, novel_y = images[~known], labels[~known]
    return Digits(train_x, train_y, heldout_x, test_x, test_y, novel_x, novel_y)


def train(images: Tensor, labels: Tensor) -> nn.Module:
    """Return a small convolutional classifier of five classes.

    Args:
        images: ``(n, 1, 8, 8)``.
        labels: ``(n,)``, from 0 to 4.
    """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
    for _ in range(15):
        for x, y in loader:
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(net(x), y))
            optimizer.step()
    return net.eval()


def methods_for(net: nn.Module) -> Mapping[str, Detector]:
    """Return the methods that are compared, by name, not fitted yet."""
    from scodkit import baselines

    likelihood, last_two = scodkit.Categorical(), scodkit.LastLayers(count=2)
    return {
        "Fused": scodkit.Fused(net, likelihood),
        _SCOD: scodkit.Monitor(net, likelihood, 50),
        f"{_SCOD}, last two layers": scodkit.Monitor(net, likelihood, 50, parameters=last_two),
        "Entropy": baselines.Naive(net, likelihood),
        "Max softmax": baselines.MaxSoftmax(net, likelihood),
        "Energy": baselines.Energy(net, likelihood),
        "KNN": baselines.KNN(net, likelihood),
        "Mahalanobis": baselines.Mahalanobis(net, likelihood),
        "ViM": baselines.ViM(net, likelihood),
    }


def compare(net: nn.Module, digits: Digits) -> tuple[scodkit.Monitor, list[MethodLine]]:
    """Return the fitted and calibrated monitor, and the results and cost of each method.

    Args:
        net: Trained.
        digits: To fit on, to calibrate with and to score.
    """
    from torch.utils.data import DataLoader, TensorDataset

    from scodkit.report import MethodLine

    loader = DataLoader(TensorDataset(digits.train_x, digits.train_y), batch_size=100)
    methods, limits, fit_seconds = methods_for(net), {}, {}
    for name, method in methods.items():
        began = time.perf_counter()
        method.fit(loader, progress=False)
        fit_seconds[name] = time.perf_counter() - began
        if isinstance(method, scodkit.Fused):
            calibration = method.calibrate([digits.heldout_x], progress=False).calibration
        else:
            calibration = scodkit.Calibration(method.score(digits.heldout_x))
        assert calibration is not None
        limits[name] = calibration.threshold(_FALSE_ALARM)
    compared = scodkit.compare(
        methods, known=digits.test_x, unknown=digits.novel_x, resamples=300, progress=False
    )
    lines = [
        MethodLine(
            row["method"],
            auroc=row["auroc"],
            auroc_ends=(row["auroc_low"], row["auroc_high"]),
            aupr=row["aupr"],
            false_alarms=float((scores.known > limit).mean()),
            caught=float((scores.unknown["unknown"] > limit).mean()),
            forward_passes=row["forward_passes"],
            fit_seconds=seconds,
            inputs=(len(digits.test_x), len(digits.novel_x)),
        )
        for row, scores, limit, seconds in zip(
            compared.rows,
            compared.scores.values(),
            limits.values(),
            fit_seconds.values(),
            strict=True,
        )
    ]
    monitor = methods[_SCOD]
    assert isinstance(monitor, scodkit.Monitor)
    return monitor.calibrate([digits.heldout_x], progress=False), lines


def write_report(
    path: Path, monitor: scodkit.Monitor, digits: Digits, lines: Sequence[MethodLine]
) -> WatchedStream:
    """Write the page, with a stream that turns from the digits 0-4 to 5-9.

    Args:
        path: Where to.
        monitor: Calibrated.
        digits: Those to score.
        lines: Results of the methods.

    Returns:
        The stream, with its alarm.
    """
    import torch

    from scodkit.alarms.drift import DriftAlarm
    from scodkit.report import Report, ScoredSet, WatchedStream

    assert monitor.calibration is not None
    x = torch.cat([digits.test_x[:_BEFORE], digits.novel_x[:_BEFORE]])
    alarm = DriftAlarm(monitor.calibration, false_alarm=0.01, seed=0)
    stream = WatchedStream.of(alarm, monitor.score(x), changed_at=_BEFORE)
    monitor.notes["classes"] = _CLASSES[:5]
    sets = [
        ScoredSet.of(monitor, name, x, known=known, labels=[_CLASSES[i] for i in y], targets=y)
        for name, x, y, known in (
            ("digits 0-4", digits.test_x, digits.test_y, True),
            ("digits 5-9", digits.novel_x, digits.novel_y, False),
        )
    ]
    of = "scikit-learn's digits (8 x 8 pixels), shuffled"
    page = Report(
        monitor,
        sets,
        methods=lines,
        stream=stream,
        title="A network that knows the digits 0-4",
        false_alarm=_FALSE_ALARM,
        command=f"scod demo -o {shlex.quote(str(path))}",
        data={
            "training": f"{of}: {_TRAINED} of the digits 0-4",
            "held out": f"{_HELD_OUT} others of the digits 0-4",
            "digits 0-4": "the other digits 0-4",
            "digits 5-9": "all digits 5-9",
        },
    )
    page.save(path)
    return stream


def _show(
    path: Path,
    digits: Digits,
    net: nn.Module,
    lines: Sequence[MethodLine],
    stream: WatchedStream,
) -> None:
    right = (net(digits.test_x).argmax(1) == digits.test_y).double().mean()
    echo(
        f"{len(digits.test_x)} other digits 0-4, {float(right):.1%} of them read correctly, "
        f"and {len(digits.novel_x)} digits 5-9, never seen:\n"
    )
    rows = [
        [format(getattr(line, field), form) for field, (_, form) in _COLUMNS.items()]
        for line in lines
    ]
    shown.show_table([heading for heading, _ in _COLUMNS.values()], rows)
    echo(
        f"\nAlarms: at thresholds for {_FALSE_ALARM:.0%} false alarms, from {_HELD_OUT} "
        "held-out digits. Cost: in forward passes, measured at batch 64.\n"
        f"Stream: {stream.verdict}\n\nThe report: {shown.visible(str(path.resolve()))}\n\n"
        "The same in Python:\n"
    )
    echo("".join(f"    {line}\n" for line in _SAME.splitlines()), nl=False)
