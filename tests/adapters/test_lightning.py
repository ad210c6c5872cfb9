"""A real run of Lightning's Trainer with our callback."""

from __future__ import annotations

import doctest
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from draws import noise
from scodkit import Categorical, Fused, LastLayers, Monitor
from scodkit.errors import CalibrationWarning, OptionError, StaleMonitorError

pytestmark = [
    pytest.mark.hosts,
    # of Lightning itself, about workers, loggers and devices
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::scodkit.errors.CalibrationWarning"),
]
lightning = pytest.importorskip("lightning.pytorch", reason="of make test-hosts")

from scodkit.adapters import LightningCallback  # noqa: E402


class Steps:
    """What a module for three classes of points does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Blobs(Steps, lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A module of the package by its new name."""


def loader(count: int, seed: int, shift: float = 0.0, shuffle: bool = False) -> Any:
    y = torch.arange(count) % 3
    x = 4 * torch.eye(4)[y] + noise(count, 4, seed=seed, dtype=torch.float32) + shift
    return DataLoader(TensorDataset(x, y), 32, shuffle=shuffle)


def trainer(folder: Path, *callbacks: Any, package: Any = lightning) -> Any:
    return package.Trainer(
        max_epochs=2,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )


def last_layer(net: nn.Module) -> Monitor:
    return Monitor(net, Categorical(), parameters=LastLayers(count=1))


def fused(net: nn.Module) -> Fused:
    return Fused(net, Categorical())


def everything(net: nn.Module) -> Monitor:
    return Monitor(net, Categorical(), 10)


@pytest.mark.parametrize("make", [last_layer, everything, fused])
def test_a_run_leaves_a_monitor_beside_its_checkpoint(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(0)
    module, callback = Blobs(), LightningCallback(make)
    run, heldout = trainer(tmp_path, callback), loader(300, 2)
    run.fit(module, loader(600, 1, shuffle=True), heldout)
    checkpoints = Path(run.checkpoint_callback.dirpath)
    assert callback.path == checkpoints / "monitor.scod"
    assert callback.monitor is not None
    assert callback.monitor.calibration is not None
    assert callback.monitor.calibration.num_data == (225 if make is fused else 300)
    # the file is of the weights in the checkpoint beside it
    (checkpoint,) = checkpoints.glob("*.ckpt")
    again = Blobs.load_from_checkpoint(checkpoint)
    found = type(callback.monitor).load(callback.path, again)
    x = next(iter(loader(20, 5)))[0]
    torch.testing.assert_close(found.score(x), callback.monitor.score(x))
    # the same data that calibrated it: its own rate
    same = run.validate(module, heldout, verbose=False)[0]
    flags = torch.cat([callback.monitor.flag(batch) for batch in heldout]).double()
    assert same["scod_flagged"] == pytest.approx(float(flags.mean()))
    scores = torch.cat([callback.monitor.score(batch) for batch in heldout]).double()
    assert same["scod_score"] == pytest.approx(float(scores.mean()))
    fresh = run.test(module, loader(600, 3), verbose=False)[0]
    far = run.test(module, loader(600, 3, shift=4.0), verbose=False)[0]
    assert fresh["scod_flagged"] < 0.12 < far["scod_flagged"]


def test_validation_data_that_chose_the_weights_is_named(tmp_path: Path) -> None:
    stopping = lightning.callbacks.EarlyStopping("val_loss")
    callback = LightningCallback(last_layer)
    with pytest.raises(CalibrationWarning, match=r"EarlyStopping.*heldout=loader"):
        trainer(tmp_path, stopping, callback).fit(Blobs(), loader(300, 1), loader(90, 2))
    fresh = LightningCallback(last_layer, heldout=loader(120, 4), path=tmp_path / "own.scod")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        trainer(tmp_path, stopping, fresh).fit(Blobs(), loader(300, 1), loader(90, 2))
    assert fresh.monitor is not None
    assert fresh.monitor.calibration is not None
    assert fresh.monitor.calibration.num_data == 120
    assert (tmp_path / "own.scod").is_file()


def test_other_weights_are_not_answered_for(tmp_path: Path) -> None:
    callback, module = LightningCallback(last_layer), Blobs()
    run = trainer(tmp_path, callback)
    run.fit(module, loader(300, 1), loader(90, 2))
    with torch.no_grad():
        module.net[0].weight.mul_(2)
    with pytest.raises(StaleMonitorError):
        run.test(module, loader(90, 3), verbose=False)


def test_what_would_fail_at_the_end_fails_at_the_start(tmp_path: Path) -> None:
    run = trainer(tmp_path, LightningCallback(last_layer))
    with pytest.raises(OptionError, match="heldout=loader"):
        run.fit(Blobs(), loader(300, 1))
    run = trainer(tmp_path, LightningCallback(lambda net: net))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="returns a Blobs"):
        run.fit(Blobs(), loader(300, 1), loader(90, 2))
    several = {"a": loader(300, 1), "b": loader(300, 5)}
    run = trainer(tmp_path, LightningCallback(last_layer))
    with pytest.raises(OptionError, match="one training loader"):
        run.fit(Blobs(), several, loader(90, 2))


def test_the_package_by_its_old_name(tmp_path: Path) -> None:
    old = pytest.importorskip("pytorch_lightning", reason="of make test-hosts")

    class Old(Steps, old.LightningModule):  # type: ignore[misc, name-defined]
        pass

    module, callback = Old(), LightningCallback(last_layer)
    run = trainer(tmp_path, callback, package=old)
    run.fit(module, loader(300, 1), loader(90, 2))
    assert (tmp_path / "checkpoints" / "monitor.scod").is_file()
    assert 0 <= run.test(module, loader(90, 3), verbose=False)[0]["scod_flagged"] < 0.2


def test_the_example_in_the_docstring_runs() -> None:
    module = importlib.import_module("scodkit.adapters.lightning")
    assert doctest.testmod(module) == doctest.TestResults(failed=0, attempted=3)
