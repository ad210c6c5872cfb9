"""A postprocessor of OpenOOD: larger confidences are more likely to be in distribution.

Written to the interface of OpenOOD 1.5 as its source shows it, and tested against that
interface alone: OpenOOD is not on the package index, and no run of its evaluator stands behind
this. Where OpenOOD can be imported the class is one of its ``BasePostprocessor``, which its
``Evaluator`` asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scodkit.adapters.shared import AnyDetector, Batches, checked, fit
from scodkit.calibration import predicted_class
from scodkit.errors import MismatchError, NotFittedError
from scodkit.fit.data import batches_of
from scodkit.fused import Fused
from scodkit.likelihoods import Categorical

try:
    from openood.postprocessors import BasePostprocessor as _Base
except ImportError:
    _Base = object


class OpenOODPostprocessor(_Base):  # type: ignore[misc] # may be missing
    """A `Fused`, a `Monitor` or a baseline as a postprocessor of OpenOOD.

    ``setup`` fits it to the ``"train"`` split of the known data, and calibrates it on the
    ``"val"`` split. The unknown data that OpenOOD passes along is never looked at, and there
    are no hyperparameters to search with it. Batches are dicts with ``"data"`` and ``"label"``.

    Args:
        config: As OpenOOD passes it; not used.
        make: Makes the detector of a network; by default ``Fused(net, Categorical())``.

    Attributes:
        detector: What was made; None before ``setup``.
        APS_mode: False: there is no search for hyperparameters.
        hyperparam_search_done: True, for the same reason.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
        >>> def split():
        ...     return [{"data": torch.randn(100, 2), "label": torch.zeros(100).long()}]
        >>> postprocessor = OpenOODPostprocessor()
        >>> postprocessor.setup(net, {"train": split(), "val": split()}, None)
        >>> pred, conf = postprocessor.postprocess(net, torch.tensor([[0.1, 0.2], [9.0, 9.0]]))
        >>> bool(conf[0] > conf[1])
        True
    """

    APS_mode = False
    hyperparam_search_done = True

    def __init__(
        self, config: Any = None, *, make: Callable[[nn.Module], AnyDetector] | None = None
    ) -> None:
        self.config = config
        self.detector: AnyDetector | None = None
        self._make = make
        self._net: nn.Module | None = None

    def setup(
        self,
        net: nn.Module,
        id_loader_dict: Mapping[str, Iterable[Any]],
        ood_loader_dict: object,
    ) -> None:
        """Fit and calibrate the detector, on known data alone.

        Args:
            net: The classifier; left as it is.
            id_loader_dict: Loaders of known data: ``"train"``, and ``"val"`` for the
                calibration of a `Fused` or a `Monitor`.
            ood_loader_dict: Not looked at.
        """
        made = Fused(net, Categorical()) if self._make is None else self._make(net)
        detector = checked(made, "make=lambda net: Fused(net, Categorical())")
        val = Batches(id_loader_dict["val"], _pair) if "val" in id_loader_dict else None
        fit(detector, Batches(id_loader_dict["train"], _pair), val)
        self.detector, self._net = detector, net

    def postprocess(self, net: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
        """Return predicted classes and confidences, each ``(B,)``.

        Args:
            net: The network of ``setup``.
            data: A batch of inputs.

        Returns:
            Classes, and minus the scores: larger = more likely to be in distribution.

        Raises:
            NotFittedError: Before ``setup``.
            MismatchError: If it is another network.
        """
        if self.detector is None:
            raise NotFittedError(
                "expected a postprocessor that is set up, got one that is not; type "
                "postprocessor.setup(net, id_loader_dict, ood_loader_dict) first"
            )
        if net is not self._net:
            raise MismatchError(
                f"expected the network of setup, got another {type(net).__name__}; type "
                "postprocessor.setup(net, id_loader_dict, ood_loader_dict) for this one"
            )
        scored = self.detector(data)
        return predicted_class(scored.output), -scored.score

    def inference(
        self, net: nn.Module, data_loader: Iterable[Any], progress: bool = True
    ) -> tuple[NDArray[np.int64], NDArray[np.floating[Any]], NDArray[np.int64]]:
        """Return predicted classes, confidences and labels of a loader, each ``(n,)``.

        Args:
            net: The network of ``setup``; batches are taken to where it is.
            data_loader: Batches as dicts with ``"data"`` and ``"label"``.
            progress: Show a progress bar.
        """
        parts = []
        for batch in batches_of(data_loader, "scoring", progress):
            found = (*self.postprocess(net, batch["data"]), batch["label"])
            parts.append([part.cpu() for part in found])
        pred, conf, label = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
        return pred, conf, label


def _pair(batch: Mapping[str, Any]) -> tuple[Any, Any]:
    return batch["data"], batch["label"]
