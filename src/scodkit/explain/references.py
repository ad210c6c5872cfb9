"""Which known samples an input resembles, in what the network makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scodkit.errors import BatchError, OptionError
from scodkit.explain import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# asked samples and references whose distances are held at a time: a few tens of MB
_ASKED, _KNOWN = 256, 4096


@dataclass(frozen=True)
class Nearest:
    """The references nearest to each sample of a batch, the nearest first.

    Args:
        index: ``(B, count)`` int64, places among the references; -1 for samples with a NaN or
            an infinity.
        distance: ``(B, count)``, >= 0, ascending, larger = less alike; units of
            sqrt(nats) / eps. Infinite where the index is -1.

    Examples:
        >>> nearest = Nearest(torch.tensor([[7, 2]]), torch.tensor([[0.1, 0.4]]))
        >>> nearest.index[0, 0].item()
        7
    """

    index: Tensor
    distance: Tensor

    def plot(self, inputs: Tensor, references: Tensor, sample: int = 0) -> Figure:
        """Return an image beside the images of its nearest references.

        Args:
            inputs: The images asked about, ``(B, C, H, W)`` or ``(B, H, W)``.
            references: Those of the references, ``(n, C, H, W)`` or ``(n, H, W)``.
            sample: Which sample of the batch.
        """
        index, distance = plots.row(self.index, sample), plots.row(self.distance, sample)
        plots.check_finite(distance, sample)
        panels = [plots.image(plots.row(inputs, sample), "asked")]
        for i, far in zip(index.tolist(), distance.tolist(), strict=True):
            panels.append(plots.image(plots.row(references, i), f"reference {i}, at {far:.3g}"))
        figure = plots.new_figure(1.6 * len(panels), 1.9)
        plots.draw_beside(figure, panels)
        return figure


class References:
    """Known samples, by the part of their curvature that the basis sees.

    The distance between two samples is the Euclidean one of their ``U^T L``. No direction is
    weighed more than another: the leading ones, along which the training data varies most,
    count for most because ``L`` is largest there.

    Args:
        features: ``U^T L`` of the references, ``(n, p, k)``, as `Monitor.features` gives it:
            finite, in units of sqrt(nats) / eps. Of training or calibration data.

    Examples:
        >>> references = References(torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]]))
        >>> nearest = references.nearest(torch.tensor([[[3.0, 3.0]]]), count=2)
        >>> nearest.index
        tensor([[1, 0]])
        >>> nearest.distance
        tensor([[1.0000, 4.2426]])
    """

    def __init__(self, features: Tensor) -> None:
        if features.ndim != 3 or not features.is_floating_point() or len(features) == 0:
            raise OptionError(
                "expected features (n, p, k) of at least one sample, got a tensor of shape "
                f"{tuple(features.shape)} and {features.dtype}; type References("
                "torch.cat([monitor.features(batch) for batch in loader]))"
            )
        bad = (~features.isfinite().flatten(1).all(1)).sum().item()
        if bad:
            raise OptionError(
                f"expected finite features, got a NaN or an infinity in {bad} of "
                f"{len(features)} samples; leave them out: "
                "features[features.isfinite().flatten(1).all(1)]"
            )
        self.features = features.detach()

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        n, p, k = self.features.shape
        return f"References({n} samples, {p} directions, rank {k})"

    def nearest(self, features: Tensor, count: int = 3) -> Nearest:
        """Return the nearest references of each sample; of equally near ones the first.

        Args:
            features: ``U^T L`` of the samples, ``(B, p, k)``, from the same monitor.
            count: How many to return, at most as many as there are.

        Raises:
            OptionError: If there are fewer references than that.
            BatchError: If the features are not of the same monitor.
        """
        if not 1 <= count <= len(self):
            raise OptionError(
                f"expected 1 <= count <= {len(self)}, the number of references, got {count}"
            )
        if features.ndim != 3 or features.shape[1:] != self.features.shape[1:]:
            raise BatchError(
                f"expected features of shape (B, {self.features.shape[1]}, "
                f"{self.features.shape[2]}), as the references have, got "
                f"{tuple(features.shape)}; type references.nearest(monitor.features(batch)), "
                "with the monitor that gave the references theirs"
            )
        known = self.features.flatten(1)
        asked = features.detach().flatten(1).to(known)
        found = [
            _nearest(asked[start : start + _ASKED], known, count)
            for start in range(0, max(1, len(asked)), _ASKED)
        ]
        distance, index = (torch.cat(parts) for parts in zip(*found, strict=True))
        bad = ~asked.isfinite().all(1, keepdim=True)
        return Nearest(index.masked_fill(bad, -1), distance.masked_fill(bad, torch.inf))


def _nearest(asked: Tensor, known: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return distances and places ``(b, count)`` of the nearest of ``known (n, f)``."""
    best = asked.new_empty(len(asked), 0)
    places = torch.empty(len(asked), 0, dtype=torch.int64, device=asked.device)
    for start in range(0, len(known), _KNOWN):
        some = known[start : start + _KNOWN]
        # by differences: with products, near samples would be lost in the rounding of far ones
        mode = "donot_use_mm_for_euclid_dist"
        distance = torch.cdist(asked, some, compute_mode=mode)
        own = torch.arange(start, start + len(some), device=asked.device)
        best = torch.cat([best, distance], dim=1)
        places = torch.cat([places, own.expand(len(asked), -1)], dim=1)
        # stable: earlier places stay before later ones that are as near
        best, order = best.sort(dim=1, stable=True)
        best, places = best[:, :count], places.gather(1, order[:, :count])
    return best, places
