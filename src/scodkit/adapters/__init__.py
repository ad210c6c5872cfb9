"""Detectors in the conventions of other libraries; each module needs its host, and no other."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scodkit.adapters.hugging_face import HuggingFaceCallback as HuggingFaceCallback
    from scodkit.adapters.hugging_face import from_pretrained as from_pretrained
    from scodkit.adapters.hugging_face import save_pretrained as save_pretrained
    from scodkit.adapters.lightning import LightningCallback as LightningCallback
    from scodkit.adapters.mlflow import MLflowModel as MLflowModel
    from scodkit.adapters.mlflow import mlflow_artifacts as mlflow_artifacts
    from scodkit.adapters.monitored_model import ClosedForm as ClosedForm
    from scodkit.adapters.monitored_model import Monitored as Monitored
    from scodkit.adapters.monitored_model import MonitoredModel as MonitoredModel
    from scodkit.adapters.openood import OpenOODPostprocessor as OpenOODPostprocessor
    from scodkit.adapters.pytorch_ood import PytorchOODDetector as PytorchOODDetector
    from scodkit.adapters.scikit_learn import OutlierDetector as OutlierDetector

# where each public name is: imported when it is first asked for, as its host may be missing
_MODULES = {
    "ClosedForm": "monitored_model",
    "HuggingFaceCallback": "hugging_face",
    "LightningCallback": "lightning",
    "MLflowModel": "mlflow",
    "Monitored": "monitored_model",
    "MonitoredModel": "monitored_model",
    "OpenOODPostprocessor": "openood",
    "OutlierDetector": "scikit_learn",
    "PytorchOODDetector": "pytorch_ood",
    "from_pretrained": "hugging_face",
    "mlflow_artifacts": "mlflow",
    "save_pretrained": "hugging_face",
}

__all__ = list(_MODULES)


if not TYPE_CHECKING:  # which would take every name for one of ours

    def __getattr__(name: str) -> Any:
        """Import an adapter when it is first asked for.

        Args:
            name: Of the attribute.

        Returns:
            The class or function of that name.

        Raises:
            AttributeError: If there is no such thing.
            MissingPeerError: If the library it is for is not installed.
        """
        if name not in _MODULES:
            raise AttributeError(f"module 'scodkit.adapters' has no attribute {name!r}")
        return getattr(import_module(f"scodkit.adapters.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, imported or not, beside what is there."""
    return sorted({*globals(), *__all__})
