"""Monitors of Hugging Face models: a callback of their Trainer, folders of model and monitor.

Nothing is downloaded: folders are local ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scodkit.adapters.training import Trained
from scodkit.errors import MissingFileError, OptionError, optional
from scodkit.fused import Fused
from scodkit.monitor import Monitor
from scodkit.numerics import artifact

_transformers = optional("transformers", "hugging-face")
_Callback: Any = _transformers.TrainerCallback

_FILE = "monitor.scod"


class HuggingFaceCallback(_Callback):  # type: ignore[misc]
    """Fits and calibrates a monitor when a Hugging Face ``Trainer`` has trained a model.

    The monitor is of the weights at the end of ``trainer.train()``, of the best checkpoint
    with ``load_best_model_at_end``. Model and monitor are saved together in the folder
    ``monitored`` of the output directory: see `from_pretrained`. From then on
    ``trainer.evaluate`` and ``trainer.predict`` score their data in a pass of their own, and
    have the mean score and the share of flagged samples among their metrics, as
    ``eval_scod_score`` and ``eval_scod_flagged`` (``test_...`` of ``predict``).

    Data by which the best checkpoint or early stopping was chosen is not fresh: without
    ``heldout`` a `CalibrationWarning` says so in that case.

    Args:
        make: Returns an unfitted `Monitor` or `Fused` of the model it is given.
        heldout: Batches that training has not seen, to calibrate with; None for the evaluation
            data of the last evaluation.
        false_alarm: Accepted share of alarms on data like the held-out data.

    Attributes:
        monitor: Fitted and calibrated; None until training has ended.

    Examples:
        >>> from scodkit import Categorical, LastLayers
        >>> callback = HuggingFaceCallback(
        ...     lambda model: Monitor(model, Categorical(), parameters=LastLayers(count=1))
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
    ) -> None:
        self._trained = Trained(make, heldout, false_alarm)

    @property
    def monitor(self) -> Monitor | Fused | None:
        """The monitor; None until training has ended."""
        return self._trained.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse before training what could only fail after it.

        Args:
            args: The trainer's ``TrainingArguments``.
            state: Not used.
            control: Not used.
            **kwargs: Model and loaders.
        """
        validated = getattr(args.eval_strategy, "value", args.eval_strategy) != "no"
        with _own_forward(kwargs["model"]) as model:
            self._trained.begin(model, processes=args.world_size, validated=validated)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fit, calibrate and save the monitor with its model.

        Args:
            args: The trainer's ``TrainingArguments``.
            state: Not used.
            control: Not used.
            **kwargs: Model and loaders.
        """
        chosen_by = ["load_best_model_at_end"] if args.load_best_model_at_end else []
        train, validation = kwargs["train_dataloader"], kwargs["eval_dataloader"]
        with _own_forward(kwargs["model"]) as model:
            monitor = self._trained.end(model, train, validation, chosen_by)
            save_pretrained(monitor, Path(args.output_dir) / "monitored")

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        """Add what the scores are to the metrics, once there is a monitor.

        Args:
            args: Not used.
            state: Not used.
            control: Not used.
            metrics: Of the evaluation.
            **kwargs: Model and loaders.
        """
        self._add(metrics, "eval", kwargs)

    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        """See `on_evaluate`; for the data of a prediction.

        Args:
            args: Not used.
            state: Not used.
            control: Not used.
            metrics: Of the prediction.
            **kwargs: Model and loaders.
        """
        self._add(metrics, "test", kwargs)

    def _add(self, metrics: dict[str, float], prefix: str, given: dict[str, Any]) -> None:
        if self.monitor is None:
            return
        with _own_forward(given["model"]):
            looked = [self._trained.look(batch) for batch in given["eval_dataloader"]]
        for name, each in zip(("score", "flagged"), zip(*looked, strict=True), strict=True):
            metrics[f"{prefix}_scod_{name}"] = float(torch.cat(each).double().mean())


@contextmanager
def _own_forward(model: nn.Module) -> Iterator[nn.Module]:
    """Give a model its own forward pass, without that of mixed precision around it.

    A monitor is of the model as it is loaded from its files.

    Args:
        model: As accelerate has prepared it.

    Yields:
        The model.
    """
    around = vars(model).pop("forward", None)
    try:
        yield model
    finally:
        if around is not None:
            model.forward = around


def save_pretrained(monitor: Monitor | Fused, folder: str | Path) -> None:
    """Save a monitor in a folder, with its model.

    The folder has what the model's own ``save_pretrained`` writes (weights as safetensors, a
    ``config.json``), and ``monitor.scod``.

    Args:
        monitor: A fitted `Monitor` or `Fused` of a ``PreTrainedModel``.
        folder: Where to; made if it is not there.

    Raises:
        OptionError: If the model is none of ``transformers``.
    """
    model = monitor.model
    if not isinstance(model, _transformers.PreTrainedModel):
        raise OptionError(
            f"expected a monitor of a PreTrainedModel, got one of a {type(model).__name__}; "
            "save its weights yourself, and type monitor.save(path)"
        )
    model.save_pretrained(folder)
    monitor.save(Path(folder) / _FILE)


def from_pretrained(
    folder: str | Path, model: nn.Module | None = None, **functions: Any
) -> Monitor | Fused:
    """Load a monitor from a folder, with its model.

    Args:
        folder: A local one, as `save_pretrained` writes it. Nothing is downloaded, and weights
            are read from safetensors only.
        model: The model, if it is loaded already or its class is not of ``transformers``.
        **functions: Of the user's own, as `Monitor.load` takes them.

    Returns:
        The monitor, on the model's device; ``monitor.model`` is the model in eval mode.

    Raises:
        MissingFileError: If there is no monitor in the folder.
        OptionError: If the class of the model is not known.
    """
    path = Path(folder) / _FILE
    if not path.is_file():
        raise MissingFileError(
            f"expected a folder with a model and {_FILE}, found none in {folder}; type "
            "save_pretrained(monitor, folder) first"
        )
    if model is None:
        model = _model_of(folder)
    kind = Fused if artifact.header_of(path).get("kind") == "fused" else Monitor
    return kind.load(path, model, **functions)


def _model_of(folder: str | Path) -> nn.Module:
    """Return the model in a folder.

    Raises:
        OptionError: If its class is not of ``transformers``.
    """
    config = _transformers.PretrainedConfig.get_config_dict(folder, local_files_only=True)[0]
    names = config.get("architectures") or ["none"]
    found = getattr(_transformers, names[0], None)
    if not isinstance(found, type) or not issubclass(found, _transformers.PreTrainedModel):
        raise OptionError(
            f"expected a model of a class of transformers, got {names[0]}; load it yourself, "
            "and type from_pretrained(folder, model)"
        )
    load: Any = found.from_pretrained  # type: ignore[attr-defined]
    model: nn.Module = load(folder, local_files_only=True, use_safetensors=True)
    return model
