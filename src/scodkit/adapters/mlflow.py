"""A monitor with its network as a model of MLflow: code and tensors, never a pickle.

MLflow pickles a ``python_model`` that is an object, and runs one that is a file (*models from
code*). This is for the latter: the file builds the network, and two safetensors files have its
weights and the fit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from safetensors.torch import load_model, save_model
from torch import nn

from scodkit.errors import OptionError, optional
from scodkit.fused import Fused
from scodkit.monitor import Monitor
from scodkit.numerics import artifact

_pyfunc = optional("mlflow.pyfunc", "mlflow")

_DETECTOR, _WEIGHTS = "detector", "weights"


def mlflow_artifacts(detector: Monitor | Fused, folder: str | Path) -> dict[str, str]:
    """Write a detector and the weights of its network, and return the files for MLflow.

    Args:
        detector: Fitted; calibrated for p-values. What `Monitor.update` needs is left out, and
            so are digests of the training data.
        folder: Where to; it is made if there is none.

    Returns:
        Paths by name: the ``artifacts`` of ``mlflow.pyfunc.save_model`` and ``log_model``.

    Raises:
        OptionError: If it is no `Monitor` and no `Fused`.
    """
    if not isinstance(detector, (Monitor, Fused)):
        raise OptionError(
            f"expected a Monitor or a Fused, got {detector!r}; type "
            "mlflow_artifacts(monitor, folder)"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {_DETECTOR: folder / "detector.scod", _WEIGHTS: folder / "weights.safetensors"}
    detector.save(paths[_DETECTOR], sketch=False)
    save_model(detector.model, str(paths[_WEIGHTS]))
    return {name: str(path) for name, path in paths.items()}


class MLflowModel(_pyfunc.PythonModel):  # type: ignore[misc, name-defined] # untyped
    """What the code file of an MLflow model sets as its model.

    A file, here ``served.py``, says how the network is built::

        import mlflow
        from net import Net
        from scodkit.adapters import MLflowModel

        mlflow.models.set_model(MLflowModel(Net))

    and the model is saved, and loaded in any process, by MLflow itself::

        artifacts = mlflow_artifacts(monitor, "files")
        mlflow.pyfunc.save_model(
            "model", python_model="served.py", artifacts=artifacts, code_paths=["net.py"]
        )
        mlflow.pyfunc.load_model("model").predict(x)["score"]

    Args:
        build: Returns the network; its weights are loaded.
        functions: Those the detector was made or calibrated with, as for `Monitor.load`:
            ``inputs``, ``outputs``, ``by``.

    Attributes:
        detector: The `Monitor` or `Fused`, once MLflow has loaded the model.
    """

    def __init__(self, build: Callable[[], nn.Module], **functions: Any) -> None:
        self.detector: Monitor | Fused | None = None
        self._build, self._functions = build, functions

    def load_context(self, context: Any) -> None:
        """Build the network, and load its weights and the detector.

        Args:
            context: From MLflow, with the paths of `mlflow_artifacts`.
        """
        network, path = self._build().eval(), Path(context.artifacts[_DETECTOR])
        load_model(network, context.artifacts[_WEIGHTS])
        kind = Fused if artifact.header_of(path).get("kind") == "fused" else Monitor
        self.detector = kind.load(path, network, **self._functions)

    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201 (MLflow would validate by types)
        """Return arrays by name: ``output`` ``(B, ...)``, ``score`` and ``p_value`` ``(B,)``.

        The input is a batch as for a call of the detector: an array, a table, a dict. Scores
        are larger for more atypical inputs. P-values are there if the detector is calibrated:
        those of at most 0.05 are alarms at a false-alarm rate of 5 %.
        """
        assert self.detector is not None
        scored = self.detector(model_input)
        return {name: value for name, value in vars(scored).items() if value is not None}

    def __getstate__(self) -> NoReturn:
        raise OptionError(
            "expected a model as code, got an object, which MLflow would pickle; write a file "
            "that calls mlflow.models.set_model(MLflowModel(build)), and type "
            'python_model="file.py"'
        )
