"""Scores computed in bfloat16."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from scodkit import Categorical, LastLayers, Monitor
from scodkit.errors import CaptureWarning, NotFittedError, OptionError, UncertifiedError
from scodkit.scoring.score import SelfTest

HALF = torch.bfloat16
COMPILER = "ignore:.*torch.jit.*"


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network trained on the digits 0 to 4, those digits, and the others."""
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    images = images.float() / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 5))
    known = labels < 5
    x, y = images[known], labels[known]
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[:500]), y[:500]).backward()
        optimiser.step()
    return model.eval(), x, images[~known]


def fitted(model: nn.Module, x: Tensor, precision: torch.dtype | None) -> Monitor:
    monitor = Monitor(model, Categorical(), rank=30).fit([x[:500]], progress=False)
    monitor.precision = precision
    return monitor.calibrate([x[500:700]], progress=False)


def test_decisions_are_those_of_single_precision(
    digits: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, known, unknown = digits
    new, full, half = known[700:], *(fitted(model, known, p) for p in (None, HALF))
    both = torch.cat([new, unknown])
    assert half.precision is HALF
    assert half.score(both).dtype == half(both).output.dtype == torch.float32
    same = half.flag(both) == full.flag(both)
    assert float(same.double().mean()) >= 0.995
    truth = torch.arange(len(both)) >= len(new)
    rocs = [roc_auc_score(truth, monitor.score(both)) for monitor in (full, half)]
    assert abs(rocs[0] - rocs[1]) <= 0.002
    assert not torch.equal(full.score(both), half.score(both))


def test_there_are_no_certificates_and_no_old_thresholds(
    digits: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, x, _ = digits
    monitor = fitted(model, x, HALF)
    with pytest.raises(UncertifiedError, match=r"type monitor\.precision = None"):
        monitor.certify(x[:4])
    expected = fitted(model, x, None).certify(x[:4])
    monitor.precision = None
    assert monitor.calibration is None
    assert torch.equal(monitor.certify(x[:4]).upper, expected.upper)


def test_files_new_fits_and_merges_keep_it(
    digits: tuple[nn.Module, Tensor, Tensor], tmp_path: Path
) -> None:
    model, x, _ = digits
    monitor = fitted(model, x, HALF)
    scored = monitor(x[:9])
    monitor.save(tmp_path / "half.scod")
    loaded = Monitor.load(tmp_path / "half.scod", model)
    assert loaded.precision is HALF
    assert torch.equal(loaded(x[:9]).score, scored.score)
    assert torch.equal(loaded(x[:9]).p_value, scored.p_value)
    assert loaded.update([x[700:800]], progress=False).precision is HALF
    assert monitor.renew([x[:500]], [x[500:700]], progress=False).precision is HALF


@pytest.mark.slow  # compiles
@pytest.mark.filterwarnings(COMPILER)
def test_it_can_be_recorded(digits: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, _ = digits
    monitor = fitted(model, x, HALF)
    expected = monitor.score(x[:32])
    with contextlib.suppress(CaptureWarning):  # not faster here
        monitor.compile(x[:32])
    torch.testing.assert_close(monitor.score(x[:32]), expected, rtol=2e-2, atol=0)


def test_the_last_layer_takes_it_too(digits: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, _ = digits
    last = LastLayers(count=1)
    monitor = Monitor(model, Categorical(), parameters=last).fit([x[:500]], progress=False)
    full = monitor.score(x[:50])
    monitor.precision = HALF
    torch.testing.assert_close(monitor.score(x[:50]), full, rtol=0.3, atol=1e-3)
    assert not torch.equal(monitor.score(x[:50]), full)


def test_other_precisions_and_unfitted_monitors_are_refused(
    digits: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, x, _ = digits
    with pytest.raises(NotFittedError):
        Monitor(model, Categorical()).precision = HALF
    monitor = fitted(model, x, None)
    with pytest.raises(OptionError, match=r"torch\.bfloat16 or None, got torch\.float16"):
        monitor.precision = torch.float16
    assert monitor.calibration is not None


def test_a_self_test_allows_for_the_rounding_of_its_precision() -> None:
    one = torch.tensor([1.0])
    assert not SelfTest("HookEngine", 1.02 * one, one).ok
    assert SelfTest("HookEngine", 1.02 * one, one, HALF).ok
    assert not SelfTest("HookEngine", 1.5 * one, one, HALF).ok
