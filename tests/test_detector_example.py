"""The detector of ``examples/detector.py``: unknown objects stand out, and alarms are few."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "detector.py"


@pytest.mark.slow  # trains a detector: a minute
def test_boxes_of_unknown_objects_stand_out() -> None:
    known, rows = runpy.run_path(str(SCRIPT))["main"]()
    flagged = (known.p_value <= 0.05).any(1).double().mean()
    # 300 scenes and 400 held-out ones: four standard errors of the difference
    assert flagged < 0.05 + 4 * (0.05 * 0.95 * (1 / 300 + 1 / 400)) ** 0.5
    assert known.matches.right.sum() > 0.9 * (known.scenes.kinds >= 0).sum()
    for kind, found in rows.items():
        assert found["objects with a box"] > 0.5, kind
        assert found["AUROC of boxes"] > 0.75, kind
        assert found["AUROC of images, worst box"] > 0.6, kind
        assert found["strange boxes flagged"] > found["other boxes beside them flagged"], kind
