"""Monitors of an earlier version still load, and give the scores they gave."""

from __future__ import annotations

import pytest
import torch

from saved_monitors import CASES, FOLDER, Saved
from scodkit import predicted_class
from scodkit.errors import CalibrationWarning

# these files are older than probe inputs
pytestmark = [
    pytest.mark.filterwarnings("ignore::scodkit.errors.NoProbesWarning"),
    pytest.mark.filterwarnings("ignore::scodkit.errors.RepeatedDataWarning"),  # no digests
]

# rounding differs between processors; float32 sums over the weights of small networks
TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-4}


def check(saved: Saved, view: str) -> None:
    found = saved.view(view).score(saved.values["query"])
    wanted = saved.values[f"scores.{view}"]
    tolerance = TOLERANCE[saved.case.dtype]
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance * float(wanted.max())
    )


def test_every_file_has_a_case() -> None:
    assert {path.name.split(".")[0] for path in FOLDER.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("view", ["fitted", "loaded", "merged", "updated"])
def test_scores_are_those_on_file(name: str, view: str) -> None:
    check(Saved(name), view)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "compiled" in case.views])
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself; ours may be slower
def test_compiled_scores_are_those_on_file(name: str) -> None:
    check(Saved(name), "compiled")


@pytest.mark.parametrize("name", CASES)
def test_outputs_p_values_and_bounds_are_those_on_file(name: str) -> None:
    saved = Saved(name)
    monitor, query = saved.loaded(), saved.values["query"]
    known = torch.ones(len(query), dtype=torch.bool)
    if monitor.calibration.groups is not None:
        # a class never held out had a p-value of 1 in the version that wrote the file
        known = torch.isin(predicted_class(saved.values["output"]), monitor.calibration.groups)
        with pytest.warns(CalibrationWarning, match="0 of group 2"):
            monitor(query)
    scored = monitor(query)
    tolerance = TOLERANCE[saved.case.dtype]
    torch.testing.assert_close(scored.output, saved.values["output"], rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(scored.p_value[known], saved.values["p_value"][known])
    assert monitor.notes == {"made": "for tests"}
    assert monitor.basis.certified == ("lower" in saved.values)
    if monitor.basis.certified:
        bounds = monitor.certify(query)
        for side in ("lower", "upper"):
            wanted = saved.values[side]
            slack = tolerance * float(wanted.max())
            torch.testing.assert_close(
                getattr(bounds, side), wanted, rtol=tolerance, atol=slack
            )
