"""What callbacks of training libraries share: a monitor of the network that was trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from scodkit.calibration import check_share
from scodkit.errors import CalibrationWarning, OptionError
from scodkit.fused import Fused
from scodkit.monitor import Monitor


class Trained:
    """Makes, fits and calibrates a monitor when training has ended.

    Args:
        make: Returns an unfitted `Monitor` or `Fused` of the network it is given.
        heldout: Batches that training has not seen; None for the validation data.
        false_alarm: Accepted share of alarms on data like the held-out data.

    Attributes:
        monitor: Fitted and calibrated; None until training has ended.
    """

    def __init__(
        self,
        make: Callable[[Any], Monitor | Fused],
        heldout: Iterable[Any] | None,
        false_alarm: float,
    ) -> None:
        check_share("false_alarm", false_alarm, 0.05)
        self.make, self.heldout, self.false_alarm = make, heldout, false_alarm
        self.monitor: Monitor | Fused | None = None

    def begin(self, model: nn.Module, *, processes: int, validated: bool) -> None:
        """Refuse before training what could only fail after it.

        Args:
            model: The network to be trained.
            processes: That train it together.
            validated: Whether there is validation data.

        Raises:
            OptionError: If no monitor could be fitted or calibrated at the end.
        """
        self.monitor = None
        if processes > 1:
            raise OptionError(
                f"expected one process, got {processes}, of which each would fit a part that "
                "the library has padded; train without this callback, and fit a monitor on all "
                "of the data afterwards: Monitor(model, likelihood).fit(train_loader)"
            )
        if self.heldout is None and not validated:
            raise OptionError(
                "expected held-out data to calibrate with, got none and no validation data; "
                "type heldout=loader"
            )
        made = self.make(model)
        if not isinstance(made, (Monitor, Fused)):
            raise OptionError(
                "expected a function that returns a Monitor or a Fused, got one that returns a "
                f"{type(made).__name__}; type lambda model: Monitor(model, Categorical())"
            )

    def end(
        self,
        model: nn.Module,
        train: Iterable[Any],
        validation: Iterable[Any] | None,
        chosen_by: Iterable[str],
    ) -> Monitor | Fused:
        """Fit and calibrate a monitor.

        Args:
            model: The trained network.
            train: Batches of training data.
            validation: Batches of validation data.
            chosen_by: What has chosen the weights by looking at the validation data.

        Returns:
            The monitor.

        Raises:
            OptionError: If there is no data to calibrate with.
        """
        heldout, choices = self.heldout, ", ".join(chosen_by)
        if heldout is None:
            heldout = validation
            if choices:
                warnings.warn(
                    "expected held-out data that had no part in training, got the validation "
                    f"data, by which {choices} chose the weights: they do better on it than on "
                    "new data, so that false alarms may be more than stated; type "
                    "heldout=loader with data that training has not seen",
                    CalibrationWarning,
                    stacklevel=3,
                )
        if heldout is None:
            raise OptionError(
                "expected validation data to calibrate with, got none in this run; type "
                "heldout=loader"
            )
        monitor = self.make(model).fit(train, progress=False)
        self.monitor = monitor.calibrate(heldout, progress=False)
        return self.monitor

    def look(self, batch: object) -> tuple[Tensor, Tensor]:
        """Return scores and flags of a batch, each ``(B,)``.

        Args:
            batch: As the loader yields it.
        """
        assert self.monitor is not None
        scored = self.monitor(batch)
        assert scored.p_value is not None
        return scored.score, scored.p_value <= self.false_alarm
