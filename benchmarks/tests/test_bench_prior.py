"""The study of the prior: rows that add up, and the page that quotes them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from scodbench import prior
from scodkit import Gaussian, Monitor

ROOT = Path(__file__).parents[2]
ROWS = [
    json.loads(line) for line in (ROOT / prior.ROWS).read_text(encoding="utf-8").splitlines()
]


def test_the_table_is_that_of_the_rows_and_is_on_the_page() -> None:
    text = (ROOT / prior.RESULTS / "prior.md").read_text(encoding="utf-8")
    assert text == prior.table(ROWS)
    assert text in (ROOT / "docs/guides/layers_rank_prior.md").read_text(encoding="utf-8")


def test_rows_are_of_every_task_network_and_prior() -> None:
    found = {(row["task"], row["seed"], row["exponent"]) for row in ROWS}
    assert len(found) == len(ROWS)
    assert len(found) == len(prior.TASKS) * prior.SEEDS * len(prior.EXPONENTS)
    assert all(row["same"] == 1 for row in ROWS if row["exponent"] == 0)
    # 5 % are asked for; of a network with at least 200 held-out and 201 new inputs
    assert all(row["false_alarms"] < 0.15 for row in ROWS)


def test_the_score_depends_on_the_prior_over_the_noise_variance() -> None:
    torch.manual_seed(0)
    net, x = prior.control_net().double(), torch.randn(200, 6).double()
    plain = Monitor(net, Gaussian(), 20).fit(x, progress=False)
    noisy = Monitor(net, Gaussian(variance=100.0), 20, prior_scale=10.0)
    noisy.fit(x, progress=False)
    far = 3 * torch.randn(50, 6).double()
    torch.testing.assert_close(noisy.score(far), plain.score(far), rtol=1e-9, atol=0)
    noisy.prior_scale = 1.0  # and on it alone
    assert not torch.allclose(noisy.score(far), plain.score(far), rtol=1e-3)


@pytest.mark.parametrize("task", prior.TASKS)
def test_a_task_has_known_and_unknown_inputs(task: str) -> None:
    of, build, _ = prior.TASKS[task]
    data = of(0)
    known = torch.cat([data.learnt.inputs, data.held_out.inputs, data.test])
    assert len(known.unique(dim=0)) == len(known)
    assert build()(data.unknown[:2]).shape[0] == 2
    assert not torch.equal(of(1).test, data.test)


def means(key: str) -> dict[tuple[str, int], float]:
    return {
        (task, exponent): statistics.mean(
            row[key] for row in ROWS if (row["task"], row["exponent"]) == (task, exponent)
        )
        for task in prior.TASKS
        for exponent in prior.EXPONENTS
    }


def test_the_guides_have_the_numbers_of_the_rows() -> None:
    same, false_alarms = means("same"), means("false_alarms")
    assert min(same[task, e] for task, e in same if e >= -2) > 0.96
    low, high = min(false_alarms.values()), max(false_alarms.values())
    layers, likelihood = (
        " ".join((ROOT / "docs" / "guides" / f"{name}.md").read_text().split())
        for name in ("layers_rank_prior", "likelihood")
    )
    assert f"between {100 * low:.1f} and {100 * high:.1f} % raised" in layers
    regressors = [task for task in prior.TASKS if task != "digit as a class"]
    too_large = max(1 - same[task, -2] for task in regressors)
    assert f"{100 * too_large:.1f} % of the inputs at most" in likelihood
    assert max(1 - same[task, e] for task in regressors for e in (2, 8)) < 0.001
