"""The table of the speed benchmark: rows in, Markdown and a verdict on each target out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scodbench.figures.costs import draw_costs

Key = tuple[str, str, int, str]  # net, task, batch, method

CONVOLUTIONAL = ("rotated mnist", "binary mnist", "mnist 0-4")


@dataclass(frozen=True)
class Target:
    """A ratio or a time that must not be exceeded."""

    what: str
    value: Callable[[dict[Key, float]], float]
    limit: float


def ratio(net: str, batch: int, over: str, under: str, task: str = "score") -> Callable:
    """Return the ratio of two methods' times on a net."""
    return lambda times: times[net, task, batch, over] / times[net, task, batch, under]


def fastest(net: str, batch: int, than: str = "floor") -> Callable[[dict[Key, float]], float]:
    """Return the ratio of our faster way, eager or compiled, to another method."""
    ours = ("scodkit", "scodkit, compiled")
    return lambda t: min(t[net, "score", batch, m] for m in ours) / t[net, "score", batch, than]


def forwards(net: str) -> Callable[[dict[Key, float]], float]:
    """Return how many forward passes a scored prediction costs at batch 1."""
    ours = ("scodkit", "scodkit, compiled")
    return lambda t: min(t[net, "score", 1, m] for m in ours) / t[net, "score", 1, "forward"]


def least(net: str, task: str, batch: int, *methods: str) -> Callable:
    """Return what was found, the least of several methods."""
    return lambda times: min(times[net, task, batch, method] for method in methods)


def _targets() -> list[Target]:
    found = []
    for batch in (64, 1):
        for net in (*CONVOLUTIONAL, "wine"):
            limit = 1.5 if net == "wine" else 1.2
            found.append(Target(f"{net}, batch {batch}: x floor", fastest(net, batch), limit))
    for net in CONVOLUTIONAL:
        most = 7.0 if net == "mnist 0-4" else 4.0
        found.append(Target(f"{net}, batch 1: forward passes", forwards(net), most))
        for loop in ("loop", "loop in the batch"):
            found.append(Target(f"{net}, batch 64: / {loop}", fastest(net, 64, loop), 1 / 20))
        found.append(
            Target(f"{net}: fit / loop", ratio(net, 256, "scodkit", "loop", "fit"), 1 / 10)
        )
    for net in (*CONVOLUTIONAL, "wine"):
        for batch in (1, 64):
            for way in ("", ", compiled"):
                pair = (f"scodkit, last layer{way}", "laplace-torch KFAC, last layer")
                name = f"{net}, batch {batch}: last layer{way} / peer"
                found.append(Target(name, ratio(net, batch, *pair), 1))
    for way in ("", ", compiled"):
        one = ratio("mnist 0-4", 64, f"scodkit, directions=1{way}", f"scodkit{way}")
        found.append(Target(f"mnist 0-4, batch 64: directions=1 / exact{way}", one, 1 / 2.5))
    resnet, dense = "taxinet resnet-18", "cifar densenet-121"
    both = ("scodkit", "scodkit, bfloat16")
    ways = {"captured": "scodkit, captured", "fused": "scodkit, fused and captured"}
    extra = (resnet, "extra memory", 1, "scodkit")
    found += [
        Target("30,000 frames, ms", least(resnet, "fit of 30000", 256, *both), 15e3),
        Target("5,000 images, ms", least(dense, "fit of 5000", 500, *both), 5e3),
        *(
            Target(
                f"{resnet}, batch 1: {way} / captured forward",
                ratio(resnet, 1, f"{method}, replay alone", "forward, captured"),
                3.5,
            )
            for way, method in ways.items()
        ),
        Target(f"{resnet}, batch 1: extra memory / block", least(*extra), 2),
        Target(
            "mnist, captured, ms",
            least("mnist 0-4", "score", 1, "scodkit, fused and captured, replay alone"),
            0.12,
        ),
        Target(
            "mnist at 1024, ms",
            least("mnist 0-4", "score", 1024, "scodkit, captured"),
            8,
        ),
        Target(
            "mnist at 1024, directions=1, ms",
            least("mnist 0-4", "score", 1024, "scodkit, directions=1, captured"),
            3,
        ),
    ]
    return found


def cost_table(folder: Path) -> str:
    """Return the table of what a scored prediction costs on one CPU core."""
    lines = (folder / "speed_cpu.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["task"] == "score"]
    times = {(row["net"], row["batch"], row["method"]): row["ms"] for row in rows}
    # as people read them; ours in bold
    methods = {
        "forward": "forward",
        "floor": "floor",
        "scodkit, compiled": "**compiled**",
        "scodkit": "eager",
        "scodkit, last layer, compiled": "last layer, compiled",
        "laplace-torch KFAC, last layer": "laplace-torch, last layer",
        "loop in the batch": "loop in the batch",
    }
    found = [
        "| one CPU core, ms per batch | batch | " + " | ".join(methods.values()) + " |",
        "| --- | --: |" + " --: |" * len(methods),
    ]
    for net, batch in dict.fromkeys((row["net"], row["batch"]) for row in rows):
        cells = [times.get((net, batch, method)) for method in methods]
        shown = ["" if ms is None else f"{float(f'{ms:.3g}'):g}" for ms in cells]
        shown[2] = f"**{shown[2]}**"
        found.append(f"| {net} | {batch} | " + " | ".join(shown) + " |")
    return "\n".join(found) + "\n"


def print_table(folder: Path) -> None:
    """Print all rows and all targets; write them, tables of some and a chart to files."""
    lines: list[str] = []
    times: dict[str, dict[Key, float]] = {}
    for device in ("cpu", "cuda"):
        path = folder / f"speed_{device}.jsonl"
        if not path.exists():
            continue
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        about = rows[0]
        lines += [
            f"{about['machine']}, {about['threads']} thread(s), {about['cores']} core(s), "
            f"torch {about['torch']}, Python {about['python']}",
            "",
            "| net | task | batch | method | ms | x forward |",
            "| --- | --- | --: | --- | --: | --: |",
        ]
        table = {
            (r["net"], r["task"], r["batch"], r["method"]): r["ms"] for r in rows if "ms" in r
        }
        blocks = {
            (r["net"], r["task"], r["batch"], r["method"]): r["bytes"] / r["block"]
            for r in rows
            if "bytes" in r
        }
        times |= {device: table | blocks}
        for (net, task, batch, method), ms in table.items():
            forward = table.get((net, "score", batch, "forward"))
            times_forward = f"{ms / forward:.2f}" if forward and task == "score" else ""
            lines.append(
                f"| {net} | {task} | {batch} | {method} | {ms:.3g} | {times_forward} |"
            )
        for (net, task, batch, method), share in blocks.items():
            lines.append(
                f"| {net} | {task} | {batch} | {method} | {share:.2f} x largest layer block | |"
            )
        lines.append("")
    merged = {key: ms for table in times.values() for key, ms in table.items()}
    cpu_only = times.get("cpu", {})
    verdicts = []
    for target in _targets():
        for table in (cpu_only, times.get("cuda", {}), merged):
            try:
                value = target.value(table)
            except KeyError:
                continue
            verdict = "met" if value <= target.limit else "missed"
            verdicts.append(f"| {target.what} | {value:.3g} | {target.limit:.3g} | {verdict} |")
            break
    head = ["| target | found | at most | |", "| --- | --: | --: | --- |"]
    text = "\n".join([*lines, *head, *verdicts]) + "\n"
    missed = [line for line in verdicts if line.endswith("| missed |")]
    told = f"{len(missed)} of {len(verdicts)} targets were missed:\n"
    (folder / "speed.md").write_text(text, encoding="utf-8")
    (folder / "missed.md").write_text(
        "\n".join([told, *head, *missed]) + "\n", encoding="utf-8"
    )
    (folder / "cost.md").write_text(cost_table(folder), encoding="utf-8")
    draw_costs(folder)
    print(text)
