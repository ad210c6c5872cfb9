"""Scores of odd models are those of the formula, or there are none.

``python tests/factors/test_dense_reference.py`` prints what became of each, and how many by
engine.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":  # pytest finds helpers by itself
    sys.path.append(str(Path(__file__).parents[1] / "support"))

from dense_reference import OddModel, Reference, Verdict, difference, engine_of, judged
from odd_models import LOOPED, ODD_MODELS, SLOWER
from scodkit import Monitor
from scodkit.sketch import Exact

RANK, BATCHES, SIZE = 6, 3, 4


def verdict(odd: OddModel) -> Verdict:
    def work() -> tuple[str, str]:
        model = odd.model()
        fitted = [odd.inputs(SIZE, seed) for seed in range(BATCHES)]
        monitor = Monitor(
            model,
            odd.likelihood,
            RANK,
            sketch=Exact(),
            inputs=lambda batch: batch,
            outputs=odd.outputs,
        ).fit(fitted, progress=False)
        reference = Reference(odd, [odd.inputs(SIZE, seed) for seed in range(BATCHES)], RANK)
        wrong = ""
        for size in (SIZE + 1, 1):
            found = monitor(odd.inputs(size, 10 + size))
            asked = odd.inputs(size, 10 + size)
            wrong = wrong or difference(found.score, found.output, asked, reference)
        return engine_of(monitor), wrong

    return judged(work)


@pytest.mark.parametrize("odd", ODD_MODELS.values(), ids=str)
def test_scores_are_those_of_the_formula(odd: OddModel) -> None:
    found = verdict(odd)
    allowed = ("right", "refused") if odd.refusal else ("right",)
    assert found.kind in allowed, f"{found.kind} by {found.engine}: {found.detail}"
    if not odd.refusal:
        assert found.engine in {
            "HookEngine",
            *(["FunctionalEngine"] if odd.name in SLOWER else []),
            *(["LoopEngine"] if odd.name in LOOPED else []),
        }, f"right, but by {found.engine}: slower than what odd_models.py says"


def main() -> None:
    torch.set_num_threads(1)
    found = {name: verdict(odd) for name, odd in ODD_MODELS.items()}
    for name, one in found.items():
        sys.stdout.write(f"{one.column:17} {name:42} {one.detail[:120]}\n")
    counts = Counter(one.column for one in found.values())
    sys.stdout.write(f"{len(found)} models: {dict(counts.most_common())}\n")
    sys.exit(any(one.kind in ("wrong", "crashed") for one in found.values()))


if __name__ == "__main__":
    main()
