"""The postprocessor keeps to OpenOOD's interface, as its source shows it.

OpenOOD is not on the package index: `evaluated` calls a postprocessor as its evaluator does.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, Dataset

import scodkit.adapters.openood as adapter
from scodkit import Categorical, Fused, Monitor
from scodkit.adapters import OpenOODPostprocessor
from scodkit.baselines import Energy, Mahalanobis
from scodkit.errors import MismatchError, NondeterministicError, NotFittedError, OptionError


class Items(Dataset):
    """Items of the form OpenOOD's data sets have."""

    def __init__(self, count: int, seed: int, scale: float = 1.0, noise: float = 0.0) -> None:
        self.x = scale * torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        data = self.x[index] + self.noise * torch.rand(4)
        named = {"image_name": f"{index}.png", "label": index % 3}
        return {**named, "data": data, "data_aux": data, "soft_label": torch.zeros(3)}


class Untouchable:
    """Unknown data that nobody may look at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"looked at {name} of unknown data")

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(f"looked at {name} of unknown data")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("iterated over unknown data")


def loader(*args: Any, **options: Any) -> DataLoader:
    return DataLoader(Items(*args, **options), batch_size=50)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).eval()


def splits() -> dict[str, DataLoader]:
    return {"train": loader(300, 1), "val": loader(100, 2), "test": loader(200, 3)}


def evaluated(net: nn.Module, postprocessor: Any, known: dict[str, Any], novel: Any) -> float:
    """Return the AUROC, the unknown samples being the positives, in the evaluator's steps."""
    postprocessor.setup(net, known, Untouchable())
    assert postprocessor.hyperparam_search_done
    assert not postprocessor.APS_mode
    net.eval()
    pred, conf, label = postprocessor.inference(net, known["test"], False)
    novel_pred, novel_conf, novel_label = postprocessor.inference(net, novel, progress=False)
    assert all(type(part) is np.ndarray for part in (pred, conf, label, novel_pred))
    assert pred.dtype.kind == label.dtype.kind == "i"
    truth = np.concatenate([np.zeros_like(label), -1 * np.ones_like(novel_label)])
    return float(roc_auc_score(truth == -1, -np.concatenate([conf, novel_conf])))


MAKE = {
    "fused": None,
    "monitor": lambda net: Monitor(net, Categorical(), rank=5),
    "mahalanobis": lambda net: Mahalanobis(net, Categorical()),
}


@pytest.mark.parametrize("name", MAKE)
def test_an_evaluation_gives_the_scores_of_the_detector(name: str) -> None:
    net, known, novel = network(), splits(), loader(150, 4, scale=3.0)
    postprocessor = OpenOODPostprocessor(make=MAKE[name])
    auroc = evaluated(net, postprocessor, known, novel)
    inner = postprocessor.detector
    x = [Items(200, 3).x, Items(150, 4, scale=3.0).x]
    scores = torch.cat([inner.score(each) for each in x])
    truth = np.repeat([False, True], [200, 150])
    assert auroc == pytest.approx(roc_auc_score(truth, scores), abs=1e-4)
    assert auroc > 0.6
    pred, conf = postprocessor.postprocess(net, x[0])
    assert torch.equal(pred, net(x[0]).argmax(1))
    assert torch.equal(conf, -inner.score(x[0]))


def test_known_splits_are_what_is_learnt_and_calibrated_on() -> None:
    postprocessor = OpenOODPostprocessor(make=MAKE["monitor"])
    postprocessor.setup(network(), splits(), Untouchable())
    assert postprocessor.detector.basis.num_data == 300
    assert postprocessor.detector.calibration.num_data == 100


def test_the_signatures_are_those_of_the_interface() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(OpenOODPostprocessor)[0] == "config"
    found = OpenOODPostprocessor("whatever OpenOOD passes")
    assert found.config == "whatever OpenOOD passes"
    assert names(found.setup) == ["net", "id_loader_dict", "ood_loader_dict"]
    assert names(found.postprocess) == ["net", "data"]
    assert names(found.inference) == ["net", "data_loader", "progress"]


def test_it_is_one_of_openood_where_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class BasePostprocessor:
        pass

    package, module = ModuleType("openood"), ModuleType("openood.postprocessors")
    module.BasePostprocessor = BasePostprocessor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openood", package)
    monkeypatch.setitem(sys.modules, "openood.postprocessors", module)
    try:
        assert issubclass(importlib.reload(adapter).OpenOODPostprocessor, BasePostprocessor)
    finally:
        monkeypatch.undo()
        importlib.reload(adapter)


def test_random_augmentation_is_refused() -> None:
    known = {**splits(), "train": loader(300, 1, noise=0.1)}
    with pytest.raises(NondeterministicError, match="switch random augmentation off"):
        OpenOODPostprocessor().setup(network(), known, None)


def test_what_cannot_be_is_refused() -> None:
    net, x = network(), torch.zeros(1, 4)
    postprocessor = OpenOODPostprocessor(make=lambda net: Energy(net, Categorical()))
    with pytest.raises(NotFittedError, match=r"type postprocessor\.setup\(net, id_loader_dict"):
        postprocessor.postprocess(net, x)
    postprocessor.setup(net, {"train": []}, None)
    with pytest.raises(MismatchError, match="the network of setup, got another Sequential"):
        postprocessor.postprocess(network(), x)
    with pytest.raises(OptionError, match="expected a Monitor, a Fused or a baseline, got"):
        OpenOODPostprocessor(make=lambda net: net).setup(net, splits(), None)


def test_fused_is_the_default() -> None:
    postprocessor = OpenOODPostprocessor()
    postprocessor.setup(network(), splits(), Untouchable())
    assert isinstance(postprocessor.detector, Fused)
