"""Code blocks of the pages: found, run with a user's network and data, commands parsed.

What blocks take for granted is `given`, the same for all pages but for what `PAGES` adds. A
block that a test cannot run has a reason in a comment above it, which readers do not see::

    <!-- not run: needs a GPU -->

A ``text`` block right behind a Python block is what that block prints; ``...`` stands for
anything, and numbers may differ a little (`printed_pages.assert_alike`).
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import readme_blocks
from printed_pages import assert_alike
from scodkit import Categorical, Monitor

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
BLANK = re.compile(r"\s*")
REASON = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.DOTALL)
# of blocks that nobody types
SHOWN = {"text", "toml", "json", "bibtex"}

Names = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """A block of code.

    Args:
        language: Behind the fence.
        text: Without the fences.
        line: Of the fence, from 1.
        reason: Why it is not run, None if it is.
        printed: What it prints, if the page shows that in a block right behind it.
    """

    language: str
    text: str
    line: int
    reason: str | None
    printed: str | None = None


def blocks(page: str) -> Iterator[Block]:
    """Yield the code blocks of a page.

    Args:
        page: Text in Markdown.
    """
    for match in FENCE.finditer(page):
        before = page[: match.start()]
        reason = REASON.search(before)
        text = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        shown = FENCE.match(page, BLANK.match(page, match.end()).end())
        yield Block(
            match["language"],
            text,
            before.count("\n") + 1,
            reason[1] if reason else None,
            shown["text"] if shown and shown["language"] == "text" else None,
        )


def run(page: Path, names: Names) -> int:
    """Run the Python blocks of a page one after the other, and return how many were run.

    Blocks must print what the page shows. Tracebacks have the lines of the page.

    Args:
        page: A file in Markdown.
        names: What the blocks take for granted; they add their own.
    """
    count = 0
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language != "python" or block.reason:
            continue
        count += 1
        if not block.text.startswith(">>> "):
            code = "\n" * block.line + block.text
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, str(page), "exec"), names)
            if block.printed is not None:
                assert_alike(printed.getvalue(), block.printed)
            continue
        test = doctest.DocTestParser().get_doctest(
            block.text, names, page.name, str(page), block.line
        )
        said: list[str] = []
        test.globs = names  # and not a copy, so that later blocks have its names
        failed, _ = doctest.DocTestRunner().run(test, out=said.append, clear_globs=False)
        assert not failed, "".join(said)
    return count


def given(page: str) -> Names:
    """Return what the blocks of a page take for granted.

    Everywhere: a trained classifier ``model`` of four numbers in three classes, its
    ``train_loader`` and ``heldout_loader``; ``x``, two known inputs and one far away; new known
    inputs ``test_x`` and others ``other_x``; and, but in README, which makes its own, a
    ``monitor`` that is fitted and calibrated.

    Args:
        page: Its path below the repository.
    """
    names = readme_blocks.given()
    if page == "README.md":
        return names
    monitor = Monitor(names["model"], Categorical(), rank=20)
    monitor.fit(names["train_loader"], progress=False)
    names["monitor"] = monitor.calibrate(names["heldout_loader"], progress=False)
    return names | PAGES.get(page, lambda names: {})(names)


def _alarms(names: Names) -> Names:
    """Return a ``stream`` of single inputs that drifts, and scores of good ``rollouts``."""
    test_x = names["test_x"]
    return {
        "stream": [*test_x[:20].split(1), *names["other_x"][:50].split(1)],
        "rollouts": [names["monitor"].score(part) for part in test_x.split(5)],
    }


def _heads(names: Names) -> Names:
    """Return a ``model`` of two heads, and a ``detector`` of five boxes with a mask."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classes, self.angle = nn.Linear(4, 3), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"class": self.classes(x), "angle": self.angle(x)}

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classes, self.box = nn.Linear(4, 15), nn.Linear(4, 20)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            classes = self.classes(x).unflatten(1, (5, 3))
            box = self.box(x).unflatten(1, (5, 4))
            return {"class": classes, "box": box, "kept": classes[..., 0] < 1}

    torch.manual_seed(0)
    return {"model": TwoHeads(), "detector": Detector(), "images": names["x"]}


def _compare(names: Names) -> Names:
    """Return unknown sets ``letters_x`` and ``noise_x``, and scores of another method."""
    letters, noise = names["other_x"], torch.randn(80, 4)
    known, *unknown = (data.norm(dim=1) for data in (names["test_x"], letters, noise))
    scores = dict(zip(("letter_scores", "noise_scores"), unknown, strict=True))
    unknown_scores = torch.cat(unknown)
    sets = {"letters_x": letters, "noise_x": noise, "unknown_scores": unknown_scores}
    return {**sets, "known_scores": known, **scores}


def _large(_: Names) -> Names:
    """Return a seed: blocks of the page make all else."""
    torch.manual_seed(0)
    return {"torch": torch}


def _adapters(names: Names) -> Names:
    """Return arrays ``X``, ``X_new`` and a ``test_loader`` with labels below 0 for unknown."""
    known = torch.cat([x for x, _ in names["train_loader"]])
    x = torch.cat([names["test_x"], names["other_x"]])
    y = torch.cat([torch.zeros(len(names["test_x"])), -torch.ones(len(names["other_x"]))])
    loader = DataLoader(TensorDataset(x, y.long()), batch_size=50)
    return {"X": known.numpy(), "X_new": x.numpy(), "test_loader": loader}


def _scaling(names: Names) -> Names:
    """Return a ``dataset``."""
    return {"dataset": names["train_loader"].dataset, "Categorical": Categorical}


PAGES: dict[str, Callable[[Names], Names]] = {
    "docs/guides/adapters.md": _adapters,
    "docs/guides/alarms.md": _alarms,
    "docs/guides/compare.md": _compare,
    "docs/guides/heads.md": _heads,
    "docs/guides/large.md": _large,
    "docs/guides/projected.md": _large,
    "docs/guides/scaling.md": _scaling,
}


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block, what it pipes to included.

    Args:
        block: In ``sh``, or ``console`` with a ``$`` before what is typed.
    """
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        text = "\n".join(re.findall(r"^\$ (.*)$", text, re.MULTILINE))
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if set(word) <= set("&|;"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def parse(command: Any, words: list[str]) -> None:
    """Parse the words behind a program's name as typer does, without running anything.

    Args:
        command: What typer makes of the program.
        words: Verbs, arguments and options.

    Raises:
        ValueError: If there is no such verb, or an option or argument is wrong.
    """
    while hasattr(command, "get_command"):
        verb = command.get_command(None, words[0]) if words else None
        if verb is None:
            raise ValueError(f"expected a verb, got {' '.join(words[:1]) or 'none'}")
        command, words = verb, words[1:]
    try:
        command.make_context(command.name, list(words))
    except typer.Exit:
        return  # --help
    except Exception as error:
        raise ValueError(f"{' '.join(words)}: {error}") from error
