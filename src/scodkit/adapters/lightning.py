"""A callback of Lightning's Trainer: a monitor of the network it has trained."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from scodkit.adapters.training import Trained
from scodkit.errors import OptionError, optional
from scodkit.fused import Fused
from scodkit.monitor import Monitor

# the package has two names; a Trainer of either takes a callback of either
_OLD_NAME = "pytorch_lightning"
_old = _OLD_NAME in sys.modules or importlib.util.find_spec("lightning") is None
_Callback: Any = optional(_OLD_NAME if _old else "lightning.pytorch", "lightning").Callback


class LightningCallback(_Callback):  # type: ignore[misc]
    """Fits and calibrates a monitor when a Lightning ``Trainer`` has trained a module.

    The monitor is fitted on the trainer's training data, of the weights at the end of
    ``trainer.fit``, and saved as ``monitor.scod`` in the folder of the checkpoints. From then
    on ``trainer.validate`` and ``trainer.test`` log the mean score and the share of flagged
    samples as ``scod_score`` and ``scod_flagged``. Test the module, ``trainer.test(module)``:
    with the weights of a better checkpoint the monitor raises a `StaleMonitorError`.

    Data by which early stopping or a checkpoint chose the weights is not fresh: without
    ``heldout`` a `CalibrationWarning` says so where a callback of the trainer has chosen.

    Args:
        make: Returns an unfitted `Monitor` or `Fused` of the module it is given.
        heldout: Batches that training has not seen, to calibrate with; None for the trainer's
            validation data.
        false_alarm: Accepted share of alarms on data like the held-out data.
        path: Where to save the monitor; None for beside the checkpoints.

    Attributes:
        monitor: Fitted and calibrated; None until training has ended.
        path: Where it was saved; None until then.

    Examples:
        >>> from scodkit import Categorical, LastLayers
        >>> callback = LightningCallback(
        ...     lambda net: Monitor(net, Categorical(), parameters=LastLayers(count=1))
        ... )
        >>> callback.monitor is None
        True
    """

    def __init__(
        self,
        make: Callable[[Any], Monitor | Fused],
        heldout: Iterable[Any] | None = None,
        *,
        false_alarm: float = 0.05,
        path: str | Path | None = None,
    ) -> None:
        self.path: Path | None = None
        self._given = path
        self._trained = Trained(make, heldout, false_alarm)

    @property
    def monitor(self) -> Monitor | Fused | None:
        """The monitor; None until training has ended."""
        return self._trained.monitor

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse before training what could only fail after it.

        Args:
            trainer: Lightning's.
            pl_module: The module to be trained.
        """
        _one_loader(trainer.train_dataloader)
        validated = bool(trainer.val_dataloaders)
        self._trained.begin(pl_module, processes=trainer.world_size, validated=validated)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit, calibrate and save the monitor.

        Args:
            trainer: Lightning's.
            pl_module: The trained module.
        """
        chosen_by = [
            type(callback).__name__
            for callback in trainer.callbacks
            if getattr(callback, "monitor", None) is not None and callback is not self
        ]
        validation = trainer.val_dataloaders
        if isinstance(validation, (list, tuple)):
            validation = chain(*validation)
        train = _one_loader(trainer.train_dataloader)
        monitor = self._trained.end(pl_module, train, validation, chosen_by)
        checkpoint = trainer.checkpoint_callback
        folder = Path(getattr(checkpoint, "dirpath", None) or trainer.default_root_dir)
        if self._given is None:
            folder.mkdir(parents=True, exist_ok=True)
        self.path = Path(self._given or folder / "monitor.scod")
        monitor.save(self.path)

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log the scores of a batch, once there is a monitor.

        Args:
            trainer: Lightning's.
            pl_module: The module.
            outputs: Not used.
            batch: As the loader yields it.
            batch_idx: Not used.
            dataloader_idx: Not used; Lightning tells loaders apart.
        """
        if self.monitor is None or trainer.state.fn == "fit":
            return
        score, flagged = self._trained.look(batch)
        found = {"scod_score": score.double().mean(), "scod_flagged": flagged.double().mean()}
        pl_module.log_dict(found, on_step=False, on_epoch=True, batch_size=len(score))

    on_test_batch_end = on_validation_batch_end


def _one_loader(loaders: Any) -> Any:
    """Return the training loader.

    Raises:
        OptionError: If there are several.
    """
    if isinstance(loaders, (list, tuple, dict)):
        raise OptionError(
            f"expected one training loader, got a {type(loaders).__name__} of them; train "
            "without this callback, and fit a monitor afterwards: "
            "Monitor(model, likelihood).fit(loader)"
        )
    return loaders
