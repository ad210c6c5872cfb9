"""Inputs as readers see them: pictures, predictions in words, and the most atypical ones.

Images are PNGs inside the page, vectors are bars.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import torch
from PIL import Image, ImageColor
from torch import Tensor

from scodkit.errors import ScodError
from scodkit.explain import plots
from scodkit.likelihoods import Bernoulli, Categorical, Likelihood
from scodkit.monitor import Monitor
from scodkit.report.page import Picture, cell, percent
from scodkit.report.report import ScoredSet

_PER_ROW = 6
_LARGEST = 160  # pixels along a side
_MOST_BARS = 96
_MOST_NUMBERS = 4


def gallery(
    monitor: Monitor, sets: Sequence[ScoredSet]
) -> tuple[dict[str, list[Picture]], str]:
    """Return the most and the least atypical inputs of the sets that can be shown.

    Args:
        monitor: Fitted.
        sets: Scored inputs.

    Returns:
        Two rows for each set, by their titles; and why there are no slopes, empty if there
        are.
    """
    rows: dict[str, list[Picture]] = {}
    note = ""
    for one in sets:
        if one.inputs is None or not _can_be_shown(one.inputs[0].shape):
            continue
        order = one.scores.argsort(stable=True).tolist()
        few = min(_PER_ROW, len(order) // 2 or 1)
        indices = order[::-1][:few] + order[:few]
        inputs = one.batch(indices)
        gradients, missing = _slopes(monitor, inputs)
        note = max(note, missing)
        pictures = [
            _picture(monitor.likelihood, one, index, sample, gradient)
            for index, sample, gradient in zip(indices, inputs, gradients, strict=True)
        ]
        rows[f"{one.name}: most atypical"] = pictures[:few]
        rows[f"{one.name}: least atypical"] = pictures[few:]
    return rows, note


def _can_be_shown(shape: torch.Size) -> bool:
    """Return whether samples are ``(H, W)``, ``(1, H, W)``, ``(3, H, W)``, or ``(n > 1,)``."""
    if len(shape) == 1:
        return shape[0] > 1
    return len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))


def _slopes(monitor: Monitor, inputs: Tensor) -> tuple[list[Tensor | None], str]:
    """Return the slopes of each input, None where there are none, and why not."""
    if not inputs.is_floating_point():
        return [None] * len(inputs), "No slopes: the inputs are not floating-point numbers."
    try:
        saliency = monitor.explain(inputs, saliency=True).saliency
    except ScodError as error:
        return [None] * len(inputs), f"No slopes: {error}."
    assert saliency is not None
    return [own if own.isfinite().all() else None for own in saliency.gradient], ""


def _picture(
    likelihood: Likelihood, one: ScoredSet, index: int, sample: Tensor, slopes: Tensor | None
) -> Picture:
    says = [] if one.labels is None else [one.labels[index]]
    if one.outputs is not None:
        says.append("predicted " + in_words(likelihood, one.outputs[index]))
    says.append(f"score {cell(float(one.scores[index])).text}")
    name = f"{one.name}, sample {index}"
    if sample.ndim == 1:
        slope_bars = [] if slopes is None else bars(slopes)
        return Picture(name, says, bars=bars(sample), slope_bars=slope_bars)
    drawn = None if slopes is None else slope_map(slopes)
    return Picture(name, says, image=image(sample), slopes=drawn)


def in_words(likelihood: Likelihood, output: Tensor) -> str:
    r"""Return a network's prediction for one input in words.

    Args:
        likelihood: Which distribution the output parametrises.
        output: ``(*shape)``, of one sample.

    Examples:
        >>> from scodkit import Gaussian
        >>> in_words(Categorical(), torch.tensor([0.0, 9.0]))
        'class 1 (100\xa0%)'
        >>> in_words(Gaussian(), torch.tensor([0.25, 3.0]))
        '0.25, 3'
    """
    if not bool(output.isfinite().all()):
        return "not finite"
    if isinstance(likelihood, Categorical) and output.ndim == 1:
        shares = output.double().softmax(0)
        best = int(shares.argmax())
        return f"class {best} ({percent(float(shares[best]), 0)})"
    values = output.double().flatten()[:_MOST_NUMBERS]
    if isinstance(likelihood, Bernoulli):
        shown = [percent(share, 0) for share in values.sigmoid().tolist()]
    else:
        shown = [f"{value:.3g}" for value in values.tolist()]
    more = f", ... ({output.numel()} numbers)" if output.numel() > _MOST_NUMBERS else ""
    return ", ".join(shown) + more


def image(sample: Tensor) -> str:
    """Return an image as a data URI, its own range of values from black to white.

    Args:
        sample: ``(H, W)`` or ``(C, H, W)``; NaN and infinities are black.
    """
    pixels = (plots.scaled_image(_finite(sample)) * 255).round().to(torch.uint8)
    return _data_uri(Image.fromarray(pixels.contiguous().numpy()))


def slope_map(gradient: Tensor) -> str:
    """Return slopes as a data URI: orange where more raises the score, blue where it lowers it.

    Args:
        gradient: ``(H, W)`` or ``(C, H, W)``; summed over channels. Zero is transparent.
    """
    slopes = plots.image_planes(_finite(gradient)).sum(0)
    strength = slopes.abs() / slopes.abs().max().clamp_min(1e-300)
    pixels = torch.empty(*slopes.shape, 4, dtype=torch.uint8)
    pixels[..., :3] = torch.tensor(ImageColor.getrgb(plots.LOWERS), dtype=torch.uint8)
    pixels[slopes > 0, :3] = torch.tensor(ImageColor.getrgb(plots.RAISES), dtype=torch.uint8)
    pixels[..., 3] = (strength * 255).round().to(torch.uint8)
    return _data_uri(Image.fromarray(pixels.numpy()))


def bars(values: Tensor) -> list[float]:
    """Return a vector as heights in [-1, 1]; of a long one the largest of each stretch.

    Args:
        values: ``(n,)``; NaN and infinities have no height.

    Examples:
        >>> bars(torch.tensor([1.0, -2.0, float("nan")]))
        [0.5, -1.0, 0.0]
    """
    heights = _finite(values)
    if len(heights) > _MOST_BARS:
        stretches = heights.tensor_split(_MOST_BARS)
        heights = torch.stack([part[part.abs().argmax()] for part in stretches])
    heights = heights / heights.abs().max().clamp_min(1e-300)
    return [round(height, 4) for height in heights.tolist()]


def _finite(values: Tensor) -> Tensor:
    return values.detach().double().cpu().nan_to_num(0.0, 0.0, 0.0)


def _data_uri(picture: Image.Image) -> str:
    picture.thumbnail((_LARGEST, _LARGEST))
    png = io.BytesIO()
    picture.save(png, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
