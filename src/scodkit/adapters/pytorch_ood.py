"""A detector of pytorch-ood: larger scores are more likely to be out of distribution."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from scodkit.adapters.shared import AnyDetector, Batches, checked, fit
from scodkit.errors import MissingPeerError, NotFittedError, OptionError
from scodkit.fused import Fused

try:
    from pytorch_ood import api
except (ImportError, RuntimeError) as error:  # the latter from a torchvision of another torch
    raise MissingPeerError(
        f"expected pytorch-ood, found none that can be imported ({error}); type two lines: "
        'pip install "scipy>=1.12" pillow requests; then: '
        "pip install --no-deps pytorch-ood==0.4.0 torchvision==0.16.2 (leave out torchvision "
        "if you have one that imports; pip install pytorch-ood alone may replace torch)"
    ) from error


class PytorchOODDetector(api.Detector):  # type: ignore[misc] # untyped
    """A `Monitor`, a `Fused` or a baseline for the benchmarks and metrics of pytorch-ood.

    Scores are those of the detector: larger = more likely to be out of distribution. Labels
    below 0, which stand for unknown samples there, are left out of a fit.

    Args:
        detector: Made for a trained network, fitted or not.
        held_out: Known batches ``(x, y)`` that a `Fused` is calibrated on after each fit, and
            a `Monitor` where they are given; labels below 0 are left out.

    Examples:
        >>> from scodkit import Categorical, Fused
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Linear(16, 3))
        >>> loader = [(torch.randn(64, 2), torch.zeros(64))]
        >>> held_out = [(torch.randn(64, 2), torch.zeros(64))]
        >>> detector = PytorchOODDetector(Fused(net, Categorical()), held_out).fit(loader)
        >>> near, far = detector(torch.tensor([[0.1, -0.2], [9.0, -9.0]]))
        >>> bool(near < far)
        True
    """

    requires_fit = True

    def __init__(self, detector: AnyDetector, held_out: Iterable[Any] | None = None) -> None:
        self.detector = checked(detector, "PytorchOODDetector(Monitor(net, likelihood))")
        self.held_out = held_out

    def fit(self, data_loader: Iterable[Any]) -> Self:
        """Fit the detector to the known samples of a loader.

        Args:
            data_loader: Batches ``(x, y)``.

        Returns:
            The detector itself.

        Raises:
            OptionError: If a `Fused` has no held-out batches to be calibrated on.
        """
        if isinstance(self.detector, Fused) and self.held_out is None:
            raise OptionError(
                "expected held-out batches, on which a Fused is calibrated, got none; type "
                "PytorchOODDetector(fused, held_out=loader)"
            )
        held_out = None if self.held_out is None else Batches(self.held_out, _known)
        fit(self.detector, Batches(data_loader, _known), held_out)
        return self

    def predict(self, x: Tensor) -> Tensor:
        """Return the scores ``(B,)``: larger = more likely to be out of distribution.

        Args:
            x: Inputs ``(B, ...)``.

        Raises:
            RequiresFittingException: If the detector is not fitted.
        """
        try:
            return self.detector.score(x)
        except NotFittedError as error:
            raise api.RequiresFittingException(str(error)) from error

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.detector.model.parameters()).device

    def to(self, device: str | torch.device) -> Self:
        """Move the network to a device, which the detector follows.

        Args:
            device: The target.

        Returns:
            The detector itself.
        """
        self.detector.to(device)
        return self


def _known(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return a batch without the samples whose label is below 0; None if none is left."""
    x, y = batch
    known = y >= 0
    return (x[known], y[known]) if known.any() else None
