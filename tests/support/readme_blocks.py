"""Python blocks of pages, run as they are printed, with a network and data of a user.

``python readme_blocks.py README.md docs/guides/overview.md`` does so without pytest, in an
environment that has nothing but scodkit and its extra ``plots``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blocks(text: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def given() -> dict[str, Any]:
    """Return what the blocks take for granted: a trained ``model``, loaders, inputs to score.

    Three clusters in four dimensions; ``x`` has the middles of two, and a point far from all,
    ``test_x`` is new data of the clusters, ``other_x`` is around that point.
    """
    torch.manual_seed(0)
    centres = 3 * torch.eye(4)
    y = torch.randint(3, (700,))
    x = centres[y] + 0.5 * torch.randn(700, 4)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x[:400]), y[:400]))
        optimizer.step()
    train, heldout = (
        DataLoader(TensorDataset(x[part], y[part]), batch_size=50, shuffle=True)
        for part in (slice(400), slice(400, 600))
    )
    asked = torch.stack([centres[0], centres[1], -centres[3]])
    return {
        "model": model,
        "train_loader": train,
        "heldout_loader": heldout,
        "x": asked,
        "test_x": x[600:],
        "other_x": asked[2] + 0.5 * torch.randn(100, 4),
    }


def run(page: Path) -> dict[str, Any]:
    """Return the names after all blocks of a page have run, one after the other.

    Args:
        page: A Markdown file.
    """
    names = given()
    for block in blocks(page.read_text(encoding="utf-8")):
        exec(compile(block, str(page), "exec"), names)
    return names


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(Path(name))
