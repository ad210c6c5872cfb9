"""Run the tutorials cell by cell and write their pages with outputs: ``make tutorials``.

A tutorial is a script in percent format, which editors open as a notebook. Its docstring is the
title; cells that begin with ``# %% [markdown]`` are text, others code. As in a notebook, what a
cell prints and the figures it draws follow it; a comment ``# Figure:`` describes each of them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

from scodkit.explain.plots import png_metadata

FOLDER = Path(__file__).parent / "tutorials"
PAGES = Path(__file__).parents[1] / "docs" / "tutorials"
DPI = 160


@dataclass
class Cell:
    """A cell of a script, and once it has run, what it printed and drew."""

    source: str
    is_text: bool
    line: int
    printed: str = ""
    figures: list[Figure] = field(default_factory=list)


def cells_of(script: Path) -> tuple[str, list[Cell]]:
    """Return the title of a script and its cells."""
    head, *parts = re.split(r"^# %%", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    line, cells = head.count("\n") + 1, []
    for part in parts:
        kind, _, source = part.partition("\n")
        is_text = kind.strip() == "[markdown]"
        if is_text:
            source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        cells.append(Cell(source.strip("\n"), is_text, line))
        line += part.count("\n")
    return ast.literal_eval(head.strip()).rstrip("."), cells


def run(script: Path) -> tuple[dict[str, Any], list[Cell]]:
    """Run a script and return its names and cells."""
    mpl.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    cells = cells_of(script)[1]
    for cell in cells:
        if cell.is_text:
            continue
        tree = ast.parse("\n" * cell.line + cell.source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, str(script), "exec"), names)
            shown = last and eval(
                compile(ast.Expression(last.value), str(script), "eval"), names
            )
        cell.printed = printed.getvalue()
        cell.figures = [plt.figure(number) for number in plt.get_fignums()]
        cell.figures += [shown] if isinstance(shown, Figure) else []
        plt.close("all")
    return names, cells


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG of 128 colours, a third of the size of one of all colours."""
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Letters", str(png_metadata(figure, DPI)["Letters"]))
    figure.savefig(buffer := io.BytesIO(), dpi=DPI, bbox_inches="tight", facecolor="white")
    colours = Image.open(buffer).convert("RGB").quantize(128, dither=0)
    colours.save(path, optimize=True, pnginfo=notes)


def write(script: Path) -> None:
    """Run a script and write its page, ``docs/tutorials/NAME.md``, with figures beside it."""
    parts = [
        f"# {cells_of(script)[0]}",
        f"*The script [`examples/tutorials/{script.name}`]"
        f"(../../examples/tutorials/{script.name}) with its output. Open it as a notebook, or "
        "run it with Python, which shows the figures if you add `plt.show()` at its end.*",
    ]
    for cell in run(script)[1]:
        parts.append(cell.source if cell.is_text else f"```python\n{cell.source}\n```")
        if cell.printed:
            parts.append(f"```text\n{cell.printed.rstrip()}\n```")
        words = re.findall(r"^# Figure: (.*(?:\n# .*)*)", cell.source, re.MULTILINE)
        for text, figure in zip(words, cell.figures, strict=True):
            number = sum(part.startswith("![") for part in parts) + 1
            save(figure, PAGES / "images" / f"{script.stem}_{number}.png")
            alt = text.replace("\n# ", " ")
            parts.append(f"![{alt}](images/{script.stem}_{number}.png)")
    (PAGES / f"{script.stem}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)  # so that numbers do not depend on how many cores there are
    for chosen in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.py")):
        write(FOLDER / f"{chosen}.py")
