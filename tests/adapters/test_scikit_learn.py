"""The outlier detector passes scikit-learn's own checks, and flags as the one inside it."""

from __future__ import annotations

import io
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor, nn

from scodkit import Categorical, Fused, Gaussian, Monitor
from scodkit.adapters import OutlierDetector
from scodkit.baselines import KNN, Mahalanobis
from scodkit.errors import BatchError, CalibrationError, OptionError

# checks that cannot apply, and why
CANNOT = {
    "check_estimators_overwrite_params": "it compares joblib's hashes of a parameter and of "
    "its deep copy, which differ for every nn.Module; see test_the_detector_is_left_as_it_is",
    "check_estimators_dtypes": "integers are refused where a network takes floating point: "
    "they may be bytes of images that somebody forgot to scale",
    "check_classifier_data_not_an_array": "its rows are integers; see above",
}


class AnyWidth(nn.Module):
    """Takes tables of any number of columns, as the checks pass tables of several."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unsqueeze(-1)).mean(1)


def checked() -> OutlierDetector:
    """Return one whose rate is met with a single held-out row, as checks pass few of them."""
    monitor = Monitor(AnyWidth(), Gaussian(), rank=3)
    return OutlierDetector(monitor, false_alarm=0.5, validation_fraction=0.5, random_state=0)


@pytest.mark.filterwarnings("ignore:.*held-out samples were fitted")  # rows that come twice
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([checked()], expected_failed_checks=lambda _: CANNOT)
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def network(classes: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, classes))


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 4))


DETECTORS = [
    Monitor(network(), Categorical(), rank=5),
    Fused(network(), Categorical()),
    KNN(network(), Categorical(), k=3),
]


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda d: type(d).__name__)
def test_scores_and_flags_are_those_of_the_detector(detector: Any) -> None:
    known, held_out, new = rows(200), rows(80, seed=1), 3 * rows(60, seed=2)
    found = OutlierDetector(detector, false_alarm=0.1).fit(known, X_val=held_out)
    inner = found.detector_
    np.testing.assert_array_equal(found.score_samples(new), -inner.score(new).astype(float))
    flags = found.predict(new) == -1
    if isinstance(inner, KNN):  # which has no flags of its own
        above = np.sort(inner.score(held_out))[-1 - 7]  # 7 of 80 above: 8/81 <= 0.1
        np.testing.assert_array_equal(flags, inner.score(new) > above)
    else:
        np.testing.assert_array_equal(flags, inner.flag(new, 0.1))
    assert 0 < flags.sum() < 60
    margin = found.decision_function(new)
    np.testing.assert_array_equal(margin, found.score_samples(new) - found.offset_)


def test_the_threshold_is_of_rows_that_were_not_fitted() -> None:
    found = OutlierDetector(Monitor(network(), Categorical(), rank=5), random_state=3)
    found.fit(rows(400))
    assert found.detector_.basis.num_data == 300
    assert found.detector_.calibration.num_data == 100
    # a row on both sides would be noticed by its digest, with a warning, which is an error here
    again = OutlierDetector(Monitor(network(), Categorical(), rank=5), random_state=3)
    assert again.fit(rows(400)).offset_ == found.offset_


def test_the_rate_holds_on_average() -> None:
    new, rate, draws = rows(2000, seed=999), 0.1, 40
    monitor = Monitor(network(), Categorical(), rank=5)
    alarms = [
        np.mean(
            OutlierDetector(monitor, false_alarm=rate).fit(rows(160, seed)).predict(new) < 0
        )
        for seed in range(draws)
    ]
    # each rate is Beta(4, 37) distributed, as 3 of 40 held-out scores are above the threshold
    spread = np.sqrt(4 * 37 / (41**2 * 42) / draws)
    assert abs(np.mean(alarms) - 4 / 41) < 4 * spread


def test_the_detector_is_left_as_it_is() -> None:
    detector = Monitor(network(), Categorical(), rank=5)
    before = joblib.hash(detector)
    found = OutlierDetector(detector).fit(rows(100))
    assert joblib.hash(detector) == before
    assert found.detector_.model is detector.model


def test_a_clone_has_a_network_of_its_own_and_fits_alike() -> None:
    found = OutlierDetector(Monitor(network(), Categorical(), rank=5), random_state=0)
    found.fit(rows(100))
    other = clone(found)
    assert other.detector.model is not found.detector.model
    with pytest.raises(NotFittedError):
        other.predict(rows(3))
    np.testing.assert_array_equal(
        other.fit(rows(100)).predict(rows(50)), found.predict(rows(50))
    )


def test_a_pipeline_is_fitted_searched_and_stored() -> None:
    scale = np.array([1.0, 10.0, 100.0, 1000.0])
    detector = OutlierDetector(Monitor(network(), Categorical(), rank=5), random_state=0)
    pipeline = make_pipeline(StandardScaler(), detector)
    labels = np.arange(200) % 2  # which outlier detectors leave unread
    pipeline.fit(rows(200) * scale, labels)
    new = rows(120, seed=5) * scale
    assert (pipeline.predict(new * 5) == -1).mean() > 0.5
    file = io.BytesIO()
    joblib.dump(pipeline, file)
    np.testing.assert_array_equal(
        joblib.load(file).score_samples(new), pipeline.score_samples(new)
    )
    known_and_not = np.concatenate([new, new * 5])
    truth = np.repeat([1, -1], 120)
    search = GridSearchCV(
        pipeline,
        {"outlierdetector__validation_fraction": [0.2, 0.5]},
        scoring=lambda fitted, X, y: roc_auc_score(y, fitted.decision_function(X)),
        cv=[(np.arange(120), np.arange(240))],
        error_score="raise",
    )
    assert search.fit(known_and_not, truth).best_score_ > 0.8


def test_baselines_get_their_targets() -> None:
    labels = np.arange(200) % 3
    found = OutlierDetector(Mahalanobis(network(), Categorical()), random_state=0)
    found.fit(rows(200), labels)
    assert (found.predict(20 * rows(50, seed=1)) == -1).mean() > 0.5
    with pytest.raises(BatchError, match="with 64 targets beside its inputs, got none"):
        found.fit(rows(200))


def test_images_are_rows_too() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    images = np.random.default_rng(0).normal(size=(120, 1, 6, 6))
    found = OutlierDetector(Monitor(net, Categorical(), rank=5)).fit(images)
    assert found.predict(images[:7]).shape == (7,)


def test_a_nan_is_refused_as_elsewhere_in_scikit_learn() -> None:
    found = OutlierDetector(Monitor(network(), Categorical(), rank=5)).fit(rows(100))
    with pytest.raises(ValueError, match="NaN"):
        found.predict(np.full((1, 4), np.nan))


@pytest.mark.parametrize(
    ("options", "count", "error", "said"),
    [
        ({}, 1, CalibrationError, "got n_samples=1; pass about 1,000 rows"),
        ({}, 40, CalibrationError, "for n = 10 held-out samples, got 0.05; calibrate with at"),
        ({"false_alarm": 1.5}, 100, OptionError, "0 < false_alarm < 1, got 1.5"),
        ({"validation_fraction": 0}, 100, OptionError, "0 < validation_fraction < 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], count: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        OutlierDetector(Monitor(network(), Categorical(), rank=5), **options).fit(rows(count))


def test_a_network_is_no_detector() -> None:
    with pytest.raises(OptionError, match="expected a Monitor, a Fused or a baseline, got"):
        OutlierDetector(network()).fit(rows(100))  # type: ignore[arg-type]
