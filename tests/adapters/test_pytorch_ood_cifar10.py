"""pytorch-ood's own metrics of CIFAR-10 against SVHN give the figures of our rows.

Takes some minutes on one core, and the data: set SCODKIT_DATA to the folder that has it.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from pytorch_ood_detectors import package
from scodkit import Fused
from scodkit.report.separation import separation

pytestmark = pytest.mark.hosts

ROWS = Path(__file__).parents[2] / "results" / "fused_methods.jsonl"


def row() -> dict[str, float]:
    wanted = ("cifar10_all", "fused", "svhn")
    rows = map(json.loads, ROWS.read_text().splitlines())
    return next(r for r in rows if (r["domain"], r["method"], r["ood"]) == wanted)


def data_set(samples: Any, *, unknown: bool = False) -> TensorDataset:
    x, y = samples.read()
    return TensorDataset(x, torch.full_like(y, -1) if unknown else y)


def test_a_pipeline_gives_the_auroc_of_our_row() -> None:
    host = package()
    pytest.importorskip("scodbench", reason="needs the experiments: pip install ./benchmarks")
    from scodbench.data.errors import MissingDataError
    from scodbench.domains.cifar10 import CIFAR10_ALL

    adapter = importlib.import_module("scodkit.adapters.pytorch_ood")
    try:
        splits, weights = CIFAR10_ALL.splits(), CIFAR10_ALL.weights()
    except MissingDataError as error:
        pytest.skip(str(error))
    network = CIFAR10_ALL.build().eval()
    network.load_state_dict(weights)
    train = splits.train.take(slice(0, CIFAR10_ALL.fit_on))
    loaders = [DataLoader(data_set(part), batch_size=128) for part in (train, splits.selection)]
    detector = adapter.PytorchOODDetector(Fused(network, CIFAR10_ALL.likelihood), loaders[1])
    detector.fit(loaders[0])

    metrics, scores, labels = host.metrics.OODMetrics(), [], []
    tested = [data_set(splits.test), data_set(splits.novel["svhn"], unknown=True)]
    for x, y in DataLoader(ConcatDataset(tested), batch_size=128):
        found = detector(x)
        metrics.update(found, y)
        scores.append(found)
        labels.append(y)
    figures = metrics.compute()

    known = torch.cat(labels) >= 0
    own = separation(torch.cat(scores)[known], torch.cat(scores)[~known], resamples=2)
    assert figures["AUROC"] == pytest.approx(own.auroc, abs=1e-12)
    assert figures["FPR95TPR"] == pytest.approx(own.fpr95, abs=1e-12)
    expected = row()
    assert expected["auroc_low"] < figures["AUROC"] < expected["auroc_high"]
    assert figures["AUROC"] == pytest.approx(expected["auroc"], abs=1e-5)
    assert figures["FPR95TPR"] == pytest.approx(expected["fpr95"], abs=1e-3)
