"""A monitor goes through a folder of MLflow and gives the same numbers; nothing is pickled."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scodkit import Categorical, Fused, Monitor
from scodkit.baselines import Energy
from scodkit.errors import MismatchError, OptionError

pytestmark = pytest.mark.hosts

mlflow = pytest.importorskip("mlflow.pyfunc", reason="needs MLflow: make test-hosts")

NETWORK = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
"""

SERVED = """
import mlflow
from {module} import build
from scodkit.adapters import MLflowModel

mlflow.models.set_model(MLflowModel(build))
"""

LOADED = """
import json, sys
import numpy as np
import mlflow.pyfunc

x = np.load(sys.argv[2])
found = mlflow.pyfunc.load_model(sys.argv[1]).predict(x)
print(json.dumps({name: value.tolist() for name, value in found.items()}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a network and a file for MLflow, whose folder can be imported from."""
    module = f"net_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(NETWORK)
    (tmp_path / "served.py").write_text(SERVED.format(module=module))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop(module, None)


def data(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def detector(folder: Path, kind: Any) -> Any:
    torch.manual_seed(0)
    network = __import__(f"net_{folder.name}").build()
    made = kind(network, Categorical(), rank=5).fit(data(200, 1), progress=False)
    return made.calibrate(data(100, 2), progress=False)


def saved(folder: Path, kind: Any) -> tuple[Any, Path]:
    from scodkit.adapters import mlflow_artifacts

    found = detector(folder, kind)
    mlflow.save_model(
        folder / "model",
        python_model=str(folder / "served.py"),
        artifacts=mlflow_artifacts(found, folder / "files"),
        code_paths=[str(folder / f"net_{folder.name}.py")],
        pip_requirements=["scodkit"],
    )
    return found, folder / "model"


@pytest.mark.parametrize("kind", [Monitor, Fused])
def test_another_process_gives_the_same_numbers(folder: Path, kind: Any) -> None:
    found, model = saved(folder, kind)
    x = data(7, 3).numpy()
    np.save(folder / "x.npy", x)
    elsewhere = folder / "elsewhere"  # where the network's file is not
    elsewhere.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", LOADED, str(model), str(folder / "x.npy")]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout.splitlines()[-1])
    scored = found(x)
    assert loaded.keys() == {"output", "score", "p_value"}
    for name, values in loaded.items():
        np.testing.assert_allclose(values, getattr(scored, name), rtol=1e-6)


def test_no_pickle_is_written_or_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was read")

    found, model = saved(folder, Monitor)
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    for module, names in {pickle: ("load", "loads", "Unpickler"), torch: ("load",)}.items():
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    loaded = mlflow.load_model(str(model))
    x = data(7, 3).numpy()
    np.testing.assert_array_equal(loaded.predict(x)["score"], found.score(x))
    files = {path.suffix for path in model.rglob("*") if path.is_file()}
    assert files <= {"", ".py", ".scod", ".safetensors", ".txt", ".yaml"}
    inner = loaded.unwrap_python_model().detector
    np.testing.assert_array_equal(inner.flag(x, 0.1), found.flag(x, 0.1))


def test_a_table_is_scored(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    found, model = saved(folder, Monitor)
    x = data(7, 3).numpy()
    table = pandas.DataFrame(x, columns=list("abcd"))
    scores = mlflow.load_model(str(model)).predict(table)["score"]
    np.testing.assert_allclose(scores, found.score(x), rtol=1e-6)


def test_a_server_can_write_the_answer_as_json(folder: Path) -> None:
    import io

    from mlflow.pyfunc.scoring_server import predictions_to_json

    found, model = saved(folder, Monitor)
    x, written = data(3, 3).numpy(), io.StringIO()
    predictions_to_json(mlflow.load_model(str(model)).predict(x), written)
    answer = json.loads(written.getvalue())["predictions"]
    np.testing.assert_allclose(answer["p_value"], found(x).p_value)


def test_other_weights_are_refused(folder: Path) -> None:
    _, model = saved(folder, Monitor)
    network = __import__(f"net_{folder.name}").build()
    from safetensors.torch import save_model

    save_model(network, str(next(model.rglob("weights.safetensors"))))
    with pytest.raises(MismatchError, match="weights"):
        mlflow.load_model(str(model))


def test_an_object_is_refused_as_it_would_be_pickled(folder: Path) -> None:
    from mlflow.exceptions import MlflowException

    from scodkit.adapters import MLflowModel, mlflow_artifacts

    module = __import__(f"net_{folder.name}")
    with pytest.raises(MlflowException) as raised:
        mlflow.save_model(
            folder / "model",
            python_model=MLflowModel(module.build),
            artifacts=mlflow_artifacts(detector(folder, Monitor), folder / "files"),
            pip_requirements=["scodkit"],
        )
    assert isinstance(raised.value.__cause__, OptionError)
    assert "MLflow would pickle; write a file" in str(raised.value.__cause__)
    energy = Energy(module.build(), Categorical())
    with pytest.raises(OptionError, match="expected a Monitor or a Fused, got Energy"):
        mlflow_artifacts(energy, folder)  # type: ignore[arg-type]
