"""The columns of a table by name, and how far each value is from the training data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scodkit.errors import OptionError
from scodkit.explain import plots
from scodkit.explain.words import Names
from scodkit.model.input_range import Bounds, InputRange
from scodkit.model.inputs import Inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# so many spreads outside the range of the training data are far
_FAR = 3

# columns named in a sentence each, and shown in a figure
_TOP = 3
_DRAWN = 8


@dataclass(frozen=True)
class Columns:
    """The columns of a table, beside those of the training data.

    A spread is the standard deviation of a column of the training data; of a column that never
    varied the size of its value.

    Args:
        names: Of the columns.
        values: ``(B, n)`` in float64, in the units of the columns.
        known: Range, mean and spread of each column of the training data, ``(n,)``; NaN where
            they are unknown, as in files of versions that did not keep them.

    Examples:
        >>> known = Bounds(*torch.tensor([[19.0], [79.0], [50.0], [12.0]]))
        >>> columns = Columns(("age",), torch.tensor([[56.0], [580.0]]), known)
        >>> columns.distance
        tensor([[ 0.5000],
                [44.1667]])
        >>> print(columns.sentences(1)[0])
        age = 580 is far outside the training data: 41.8 spreads above its largest value, 79
    """

    names: tuple[str, ...]
    values: Tensor
    known: Bounds

    @staticmethod
    def of(seen: InputRange, call: Inputs, names: Names) -> Columns | None:
        """Return the columns of a batch; None if there is no table of at most 64 columns.

        Args:
            seen: Of the training data.
            call: The batch. Of several tables the columns follow one another.
            names: Of the columns, as far as they are known.

        Raises:
            OptionError: If names are given, and there is no table.
        """
        tables = [(x.cpu(), known) for x, known in seen.tables(call)]
        if not tables:
            if names.columns is None:
                return None
            shapes = ", ".join(str(tuple(shape)) for shape, _ in call.shapes)
            raise OptionError(
                f"expected a table (B, n) of at most 64 columns to name, got {shapes}; leave "
                "out columns="
            )
        bounds = [
            x.new_full((4, x.shape[1]), torch.nan)
            if known is None
            else torch.stack([*known]).cpu()
            for x, known in tables
        ]
        values = torch.cat([x for x, _ in tables], dim=1)
        known = Bounds(*torch.cat(bounds, dim=1))
        return Columns(names.of_columns(values.shape[1]), values, known)

    @property
    def distance(self) -> Tensor:
        """Spreads from the mean of the training data, ``(B, n)``, > 0 above; NaN if unknown."""
        return (self.values - self.known.mean) / self.known.spread

    @property
    def spread(self) -> Tensor | None:
        """Spreads of the columns, ``(n,)``; None if they are not known."""
        return None if bool(self.known.spread.isnan().any()) else self.known.spread

    @property
    def outside(self) -> Tensor:
        """Spreads above the training data's range, or (< 0) below, ``(B, n)``; 0 inside."""
        return self.known.outside(self.values)

    def sentences(self, sample: int = 0) -> list[str]:
        """Return a sentence for each of the columns farthest outside the training data.

        Args:
            sample: Which sample of the batch.
        """
        values, away = plots.row(self.values, sample), plots.row(self.outside, sample)
        bad = (~values.isfinite()).nonzero()[:, 0].tolist()
        lines = [f"{self.names[i]} is {float(values[i])}: not a finite number" for i in bad]
        order = away.nan_to_num(0.0, 0.0, 0.0).abs().argsort(descending=True, stable=True)
        beyond = [i for i in order.tolist() if i not in bad and abs(float(away[i])) > 0]
        for i in beyond[:_TOP]:
            end, side = (
                (self.known.high, "above its largest")
                if away[i] > 0
                else (self.known.low, "below its smallest")
            )
            far = "far outside" if abs(float(away[i])) > _FAR else "outside"
            lines.append(
                f"{self.names[i]} = {values[i]:.5g} is {far} the training data: "
                f"{abs(float(away[i])):.3g} spreads {side} value, {end[i]:.5g}"
            )
        if len(beyond) > _TOP:
            lines.append(f"{len(beyond) - _TOP} more columns are outside the training data")
        return lines

    def inside(self, sample: int = 0) -> str:
        """Return a sentence on a sample of which no column is outside the training data.

        Args:
            sample: Which sample of the batch.
        """
        farthest = self.farthest(sample)
        if farthest is None:
            return (
                "how far columns are from the training data is not known: the fit is of a "
                "version that did not look; fit again"
            )
        return f"no column is outside the training data; farthest from its mean is {farthest}"

    def farthest(self, sample: int = 0) -> str | None:
        """Return the column farthest from the mean of the training data, with its distance.

        Args:
            sample: Which sample of the batch.

        Returns:
            Words; None where distances are not known, or not finite.
        """
        values, away = plots.row(self.values, sample), plots.row(self.distance, sample)
        if not bool(away.isfinite().all()):
            return None
        i = int(away.abs().argmax())
        return f"{self.names[i]} = {values[i]:.5g}, at {float(away[i]):+.3g} spreads"

    def plot(self, sample: int = 0) -> Figure:
        """Return bars: how many spreads columns are from the mean of the training data.

        Args:
            sample: Which sample of the batch. The columns farthest away are shown, those
                outside the range of the training data in another colour.
        """
        height = 1.2 + 0.28 * min(_DRAWN, len(self.names))
        title = plots.place_of(self.values, sample)
        return plots.figure_of([self.panel(sample)], 5.0, height, title)

    def panel(self, sample: int) -> plots.Panel:
        """Return the panel of `plot`, for a figure with others.

        Args:
            sample: As in `plot`.
        """
        away = plots.finite_row(self.distance, sample)
        order = away.abs().argsort(descending=True, stable=True)[:_DRAWN].tolist()
        values, beyond = plots.row(self.values, sample), plots.row(self.outside, sample)
        labels = [f"{self.names[i]} = {values[i]:.5g}" for i in order]
        lengths = [float(away[i]) for i in order]
        marked = [float(beyond[i]) != 0 for i in order]
        return partial(plots.spreads, labels=labels, lengths=lengths, marked=marked)
