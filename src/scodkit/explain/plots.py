"""Drawing what explanations say. Needs matplotlib, which is imported on the first figure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from scodkit.errors import BatchError, OptionError, optional
from scodkit.explain.words import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure, SubFigure

# draws one panel of a figure on the given axes
Panel: TypeAlias = "Callable[[Axes], None]"

# Okabe and Ito (2008), for colour-blind readers too; the report's pictures have the same: what
# raises a score, what lowers it, neither, and two more
RAISES, LOWERS, OTHERS, GREEN, YELLOW = "#D55E00", "#0072B2", "#9A9A9A", "#009E73", "#E69F00"
_SMALL = 8


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, which ``pyplot.show()`` shows where pyplot has windows.

    Elsewhere it belongs to nobody: notebooks show what a cell returns, files are saved.

    Args:
        width: In inches.
        height: In inches.
    """
    figures = optional("matplotlib.figure", "plots")
    options: dict[str, Any] = {"figsize": (width, height), "dpi": 130, "layout": "constrained"}
    pyplot = sys.modules.get("matplotlib.pyplot")
    figure: Figure = (figures.Figure if pyplot is None else pyplot.figure)(**options)
    if pyplot is not None and not figure.canvas.required_interactive_framework:
        pyplot.close(figure)  # it would be shown twice in a notebook, and stay in memory
    return figure


def png_metadata(figure: Figure, dpi: float | None = None) -> dict[str, str | None]:
    """Return metadata of a PNG with the size of its smallest letters, in pixels of the file.

    A page that shows the file narrower can tell from it whether they can still be read.

    Args:
        figure: That is about to be saved.
        dpi: That it is saved with, the figure's own if None.
    """
    text = optional("matplotlib.text", "plots").Text
    figure.draw_without_rendering()  # which makes the labels of ticks
    sizes = [t.get_fontsize() for t in figure.findobj(text) if t.get_text().strip()]
    letters = min(sizes) * (dpi or figure.dpi) / 72
    return {"Software": None, "Letters": f"{letters:.2f} pixels at least"}


def row(tensor: Tensor, sample: int) -> Tensor:
    """Return one sample of a batch, on the CPU.

    Args:
        tensor: ``(B, ...)``.
        sample: Which one; counted from the end if negative.

    Raises:
        OptionError: If there is no such sample.
    """
    if not -len(tensor) <= sample < len(tensor):
        raise OptionError(f"expected a sample from 0 to {len(tensor) - 1}, got {sample}")
    return torch.as_tensor(tensor[sample]).detach().cpu()  # scores may be an array


def place_of(batch: Tensor, sample: int) -> str:
    """Return which sample of a batch is meant, in words.

    Args:
        batch: ``(B, ...)``.
        sample: Which one; counted from the end if negative.
    """
    return f"sample {sample % max(1, len(batch))} of {len(batch)}"


def finite_row(values: Tensor, sample: int) -> Tensor:
    """Return one sample of a batch, as `row` does, of which all values can be drawn.

    Args:
        values: ``(B, ...)``.
        sample: Which one.

    Raises:
        BatchError: If there is a NaN or an infinity, as where the score is infinite.
    """
    drawn = row(values, sample)
    if not drawn.isfinite().all():
        raise BatchError(
            f"expected a sample with a finite score to draw, got sample {sample}, which has a "
            "NaN or an infinity; plot another one: plot(sample=...)"
        )
    return drawn


def draw_beside(figure: Figure | SubFigure, panels: Sequence[Panel]) -> None:
    """Draw panels side by side.

    Args:
        figure: Where to.
        panels: One or more.
    """
    every_axes = figure.subplots(1, len(panels), squeeze=False).flat
    for axes, draw in zip(every_axes, panels, strict=True):
        draw(axes)


def figure_of(panels: Sequence[Panel], width: float, height: float, title: str) -> Figure:
    """Return a figure of panels side by side.

    Args:
        panels: One or more.
        width: In inches.
        height: In inches.
        title: Above all of them.
    """
    figure = new_figure(width, height)
    figure.suptitle(title, fontsize=10)
    draw_beside(figure, panels)
    return figure


def shares(
    axes: Axes, names: Sequence[str], values: Tensor, *, sample: int = 0, top: int
) -> None:
    """Draw a sample's shares as bars, the largest first, with percentages of their sum.

    Args:
        axes: Where to.
        names: Of the shares.
        values: ``(B, len(names))``, nats.
        sample: Which sample.
        top: How many to show one by one, >= 1; the others are shown as their sum.
    """
    parts = finite_row(values, sample)
    order = parts.abs().argsort(descending=True, stable=True).tolist()
    labels = [shortened(names[i]) for i in order[:top]]
    lengths = [float(parts[i]) for i in order[:top]]
    colours = _signed(lengths)
    if len(order) > top:
        labels.append(f"others ({len(order) - top})")
        lengths.append(float(parts[order[top:]].sum()))
        colours.append(OTHERS)
    bars = _horizontal_bars(axes, labels, lengths, colours)
    whole = sum(lengths)
    if whole > 0:
        percents = [f" {round(100 * length / whole)} % " for length in lengths]
        axes.bar_label(bars, percents, fontsize=_SMALL)
        axes.margins(x=0.15)  # for the percentages
    axes.axvline(0, color="black", lw=0.8)
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlabel("share of the score (nats)", fontsize=_SMALL)


def image(axes: Axes, pixels: Tensor, title: str) -> None:
    """Draw an image with its own range of values from black to white, or in colours.

    Args:
        axes: Where to.
        pixels: ``(H, W)`` or ``(C, H, W)``; of channels that are not three, the mean.
        title: Above it.
    """
    axes.imshow(scaled_image(pixels).tolist(), cmap="gray", vmin=0.0, vmax=1.0)
    axes.set_title(title, fontsize=_SMALL)
    axes.set(xticks=[], yticks=[])


def scaled_image(pixels: Tensor) -> Tensor:
    """Return an image ``(H, W)`` or ``(H, W, 3)`` whose own range of values is 0 to 1.

    Args:
        pixels: ``(H, W)`` or ``(C, H, W)``; of channels that are not three, the mean.
    """
    planes = image_planes(pixels)
    low, high = planes.min(), planes.max()
    scaled = (planes - low) / (high - low).clamp_min(torch.finfo(planes.dtype).tiny)
    return scaled.permute(1, 2, 0) if len(scaled) == 3 else scaled.mean(0)


def slope_map(axes: Axes, gradient: Tensor) -> None:
    """Draw slopes of an image, summed over channels, with zero in the middle of the colours.

    Args:
        axes: Where to.
        gradient: ``(H, W)`` or ``(C, H, W)``, nats per unit of the input.
    """
    slopes = image_planes(gradient).sum(0)
    limit = float(slopes.abs().max()) or 1.0
    maps = optional("matplotlib.colors", "plots").LinearSegmentedColormap
    colours = maps.from_list("slopes", [LOWERS, "white", RAISES])
    shown = axes.imshow(slopes.tolist(), cmap=colours, vmin=-limit, vmax=limit)
    bar = axes.figure.colorbar(shown, ax=axes, shrink=0.85)
    bar.ax.tick_params(labelsize=_SMALL)
    axes.set_title("slope of the score (nats per unit)", fontsize=_SMALL)
    axes.set(xticks=[], yticks=[])


def slopes(axes: Axes, gradient: Tensor) -> None:
    """Draw slopes of a vector as bars, in its order.

    Args:
        axes: Where to.
        gradient: ``(n,)``, nats per unit of the input.
    """
    lengths = gradient.tolist()
    axes.bar(range(len(lengths)), lengths, color=_signed(lengths))
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xlabel("place in the input", fontsize=_SMALL)
    axes.set_ylabel("slope of the score\n(nats per unit)", fontsize=_SMALL)
    _plain(axes)


def named_slopes(
    axes: Axes, names: Sequence[str], gradient: Tensor, *, unit: str, top: int
) -> None:
    """Draw slopes in the columns of a table as bars, the steepest first.

    Args:
        axes: Where to.
        names: Of the columns.
        gradient: ``(n,)``.
        unit: Of the slopes.
        top: How many to show.
    """
    order = gradient.abs().argsort(descending=True, stable=True)[:top].tolist()
    lengths = [float(gradient[i]) for i in order]
    _horizontal_bars(axes, [shortened(names[i]) for i in order], lengths, _signed(lengths))
    axes.axvline(0, color="black", lw=0.8)
    axes.set_xlabel(f"slope of the score ({unit})", fontsize=_SMALL)


def spreads(
    axes: Axes, labels: Sequence[str], lengths: Sequence[float], marked: Sequence[bool]
) -> None:
    """Draw how far the columns of a table are from the mean of the training data.

    Args:
        axes: Where to.
        labels: Names and values.
        lengths: Distances in spreads.
        marked: Which are outside the range of the training data.
    """
    colours = [RAISES if outside else OTHERS for outside in marked]
    _horizontal_bars(axes, [shortened(label) for label in labels], lengths, colours)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_xlabel("spreads from the training mean", fontsize=_SMALL)
    title = "columns (orange: outside the training range)" if any(marked) else "columns"
    axes.set_title(title, fontsize=_SMALL)


def _signed(lengths: Sequence[float]) -> list[str]:
    return [RAISES if length >= 0 else LOWERS for length in lengths]


def distances(axes: Axes, index: Tensor, distance: Tensor) -> None:
    """Draw the nearest references of one sample, with bars for their distances.

    Args:
        axes: Where to.
        index: ``(count,)``, their indices.
        distance: ``(count,)``, sqrt(nats) / eps.
    """
    labels = [f"reference {i}" for i in index.tolist()]
    _horizontal_bars(axes, labels, distance.tolist(), OTHERS)
    axes.set_xlabel("distance (sqrt(nats) / eps)", fontsize=_SMALL)
    axes.set_title("nearest references", fontsize=_SMALL)


def image_planes(image: Tensor) -> Tensor:
    """Return an image as ``(C, H, W)`` in float32 or float64.

    Raises:
        BatchError: If it is not an image.
    """
    if image.ndim not in (2, 3):
        raise BatchError(
            "expected an image (H, W) or (C, H, W) per sample to draw, got shape "
            f"{tuple(image.shape)}; draw the tensor in a way of your own"
        )
    planes = image.detach().cpu().to(torch.promote_types(image.dtype, torch.float32))
    return planes if planes.ndim == 3 else planes[None]


def _horizontal_bars(
    axes: Axes, labels: Sequence[str], lengths: Sequence[float], colours: Sequence[str] | str
) -> BarContainer:
    """Return labelled bars, the first one on top."""
    bars = axes.barh(range(len(labels)), lengths, color=colours)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    _plain(axes)
    return bars


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=_SMALL)
    axes.spines[["top", "right"]].set_visible(False)
