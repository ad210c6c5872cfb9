"""The outlier convention of scikit-learn: larger scores are more normal, -1 is an outlier."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Self

from scodkit.adapters.shared import AnyDetector, checked
from scodkit.baselines import Baseline
from scodkit.calibration import Calibration, check_share
from scodkit.errors import CalibrationError, optional
from scodkit.fit.data import as_loader

_EXTRA = "scikit-learn"
_base = optional("sklearn.base", _EXTRA)
_utils = optional("sklearn.utils", _EXTRA)
_validation = optional("sklearn.utils.validation", _EXTRA)


class OutlierDetector(_base.OutlierMixin, _base.BaseEstimator):  # type: ignore[misc, name-defined] # untyped
    """A detector as an outlier detector of scikit-learn.

    ``fit`` divides its rows at random: the detector learns from one part, and the threshold is
    a score of the other part, which the detector has not seen. So ``predict`` flags at most
    ``false_alarm`` of new rows like those, on average over draws (split conformal). Two things
    break that promise, and cannot be noticed here: rows that the *network* was trained on, of
    which it is surer than of new ones, and rows that depend on one another, such as a time
    series. For both pass held-out rows as ``X_val``.

    Rows are tables ``(n, columns)`` or arrays ``(n, ...)`` of numbers. A NaN or an infinity is
    refused, as elsewhere in scikit-learn; the detector itself would score it infinite.

    Args:
        detector: A `Monitor`, a `Fused` or a baseline, made for a trained network. It is left
            as it is: ``fit`` fits a copy, with the same network. ``clone`` copies the network,
            too.
        false_alarm: Accepted share of known rows that are flagged. Not scikit-learn's
            ``contamination``, which is the share of outliers among the training rows: all of
            those count as known.
        validation_fraction: Share of the rows that is held out for the threshold.
        random_state: Of the division, as elsewhere in scikit-learn.

    Attributes:
        detector_: The fitted detector.
        offset_: Minus the threshold: `decision_function` is ``score_samples(X) - offset_``.
        n_features_in_: Columns of the rows.

    Examples:
        >>> from torch import nn
        >>> from scodkit import Gaussian, Monitor
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        >>> rows = np.random.default_rng(0).normal(size=(400, 2))
        >>> detector = OutlierDetector(Monitor(net, Gaussian(), rank=10), random_state=0)
        >>> detector.fit(rows).predict([[0.1, -0.2], [9.0, 9.0]])
        array([ 1, -1])
    """

    def __init__(
        self,
        detector: AnyDetector,
        *,
        false_alarm: float = 0.05,
        validation_fraction: float = 0.25,
        random_state: Any = None,
    ) -> None:
        self.detector = detector
        self.false_alarm = false_alarm
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: Any = None, *, X_val: ArrayLike | None = None) -> Self:  # noqa: N803
        """Fit a copy of the detector, and set the threshold on rows it has not seen.

        Args:
            X: Known rows ``(n, ...)``.
            y: Targets, for baselines that need them; others leave them unread.
            X_val: Held-out rows for the threshold; None for a share of ``X``.

        Returns:
            The estimator itself, fitted.

        Raises:
            CalibrationError: If there are too few rows for the false-alarm rate.
        """
        checked(self.detector, "OutlierDetector(Monitor(net, likelihood))")
        rows = _validation.validate_data(self, X, allow_nd=True)
        if X_val is not None:
            learnt = np.arange(len(rows))
            held_out = _validation.validate_data(self, X_val, reset=False, allow_nd=True)
        else:
            learnt, others = self._divided(len(rows))
            held_out = rows[others]
        detector = copy.copy(self.detector)
        reads = isinstance(detector, Baseline) and detector.takes_targets and y is not None
        labels = np.asarray(y)[learnt] if reads else None
        detector.fit(rows[learnt], labels, progress=False)
        if isinstance(detector, Baseline):
            calibration = Calibration(torch.from_numpy(_scores(detector, held_out)))
        else:
            detector.calibrate(held_out, progress=False)
            assert detector.calibration is not None
            calibration = detector.calibration
        self.offset_ = -calibration.threshold(self.false_alarm)
        self.detector_ = detector
        return self

    def score_samples(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Return minus the detector's scores, ``(n,)``: larger = more normal.

        Args:
            X: Rows as in the fit.
        """
        _validation.check_is_fitted(self)
        return -_scores(
            self.detector_, _validation.validate_data(self, X, reset=False, allow_nd=True)
        )

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Return ``score_samples(X) - offset_``, ``(n,)``: negative for outliers.

        Args:
            X: Rows as in the fit.
        """
        return self.score_samples(X) - self.offset_

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:  # noqa: N803
        """Return -1 for outliers and 1 for others, ``(n,)``.

        Args:
            X: Rows as in the fit.
        """
        return np.where(self.decision_function(X) < 0, -1, 1)

    def _divided(self, count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return which rows to learn from, and which to hold out.

        Raises:
            CalibrationError: If there are too few for both.
        """
        check_share("validation_fraction", self.validation_fraction, 0.25)
        held_out = math.ceil(self.validation_fraction * count)
        if held_out == count:
            raise CalibrationError(
                f"expected rows to learn from and rows to hold out, got n_samples={count}; "
                "pass about 1,000 rows, or held-out ones as X_val"
            )
        order = _utils.check_random_state(self.random_state).permutation(count)
        return np.sort(order[held_out:]), np.sort(order[:held_out])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def _scores(detector: AnyDetector, rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return scores ``(n,)``, larger = more atypical; rows are read in small batches."""
    return np.asarray(detector.score(as_loader(rows), progress=False), dtype=np.float64)
