"""Where a taxiing aircraft is, from real camera frames of 8x16; damaged frames are unknown.

Not one of the paper's domains: a check of TaxiNet on frames that were not rendered here. They
come from the X-Plane simulator's wing camera on a clear morning, at random places of a clean
stretch of runway 200 m long, reduced to 8x16 grey numbers and shifted to a mean of 0.5.

Real are the frames, their labels and the set ``other_stretch``. Made from real ones, with
severities that were fixed before any score was seen, are the other sets of unknown frames.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from scodbench.data import load
from scodbench.domain import Domain, SketchSize, Splits
from scodbench.domains.taxinet import SCALE
from scodbench.nets.small import frames_net
from scodbench.samples import TensorSamples
from scodbench.training import Recipe
from scodkit.likelihoods import Gaussian
from scodkit.model.parameters import LastLayers

# metres of the runway, from and up to; what a frame has beyond its pose is alike over a few
# metres, and no more over ten
_TRAIN, _SELECTION, _TEST = (0, 110), (120, 150), (160, 194)

_NOISE = 0.05  # standard deviation; that of the pixels of all frames is 0.08
_FOG = 0.4  # of the contrast is left
_GLARE = 0.3  # is added, in a patch of so many rows and columns
_PATCH = (3, 4)
_DARK = 0.3  # of a dead row; no pixel of any frame is darker
_DEAD_ROWS = 2

# where the reduction looks, as shares of height and width: below the sky, right of the nose and
# not at what is nearest; frames of other drives show all of the screen (morning), or what is
# below the first 230 of its 960 rows (validation)
_CROP = ((5 / 200, 135 / 200), (55 / 360, 1.0))
_SCREEN_TOP = 230 / 960
_BRIGHTEST = 16  # of 16 x 16 pixels, whose mean is one of the reduced frame


def places(labels: Tensor) -> Tensor:
    """Return which metre of the runway each frame is from, ``(n,)`` from 0.

    The file has no place along the runway. Its frames come in runs over which the cross-track
    distance rises, and start anew on the left: that is how frames look that are sorted by whole
    metres first. The number of runs, 194, fits the 200 m; and how many frames there are in a
    run rises and falls every 30 runs, as dashes of the centre line follow each other every
    30 m.

    Args:
        labels: ``(n, 2)`` as of `load.taxinet_tiny`.

    Examples:
        >>> places(torch.tensor([[-2.0, 0.0], [3.0, 0.0], [-1.0, 0.0], [4.0, 0.0]]))
        tensor([0, 0, 1, 1])
    """
    starts = torch.diff(labels[:, 0], prepend=labels[:1, 0]) < 0
    return starts.cumsum(0)


def standardised(frames: Tensor) -> Tensor:
    """Return frames ``(n, 8, 16)`` as ``(n, 1, 8, 16)``, centred, of the order of one."""
    return (frames - 0.5).div(0.1).unsqueeze(1)


def centred(frames: Tensor) -> Tensor:
    """Return frames ``(n, 8, 16)`` shifted to a mean of 0.5 and cut to [0, 1], as all are."""
    return (frames - frames.mean((1, 2), keepdim=True) + 0.5).clamp(0, 1)


def noisy(frames: Tensor) -> Tensor:
    """Return frames with normal noise on every pixel: a sensor in poor light."""
    noise = torch.randn(frames.shape, generator=torch.Generator().manual_seed(0))
    return centred(frames + _NOISE * noise)


def foggy(frames: Tensor) -> Tensor:
    """Return frames with less contrast: fog, or dusk."""
    return 0.5 + _FOG * (frames - 0.5)


def glaring(frames: Tensor) -> Tensor:
    """Return frames with a bright patch somewhere: the sun on the lens."""
    bright = _GLARE * _patches(frames, _PATCH, torch.Generator().manual_seed(1))
    return centred(frames + bright)


def with_dead_rows(frames: Tensor) -> Tensor:
    """Return frames of which two rows next to each other are dark: a failing sensor."""
    shape = (_DEAD_ROWS, frames.shape[2])
    dead = _patches(frames, shape, torch.Generator().manual_seed(2))
    return centred(torch.where(dead, torch.tensor(_DARK), frames))


def mirrored(frames: Tensor) -> Tensor:
    """Return frames with left and right swapped: a camera on the other wing."""
    return frames.flip(2)


def _patches(frames: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return where a patch is, ``(n, 8, 16)`` of bool: of each frame at a place of its own."""
    found = []
    for size, length in zip(shape, frames.shape[1:], strict=True):
        first = torch.randint(length - size + 1, (len(frames), 1), generator=generator)
        at = torch.arange(length)
        found.append((at >= first) & (at < first + size))
    return found[0][:, :, None] & found[1][:, None, :]


def reduced(images: Tensor, top: float = 0.0) -> Tensor:
    """Return frames of the whole camera reduced to 8x16, the way the tiny ones were.

    That is: the part of the runway that is not hidden, in grey, as 128x256; of each square of
    16x16 pixels the mean of the 16 brightest, so that thin lines stay; a mean of 0.5.

    Args:
        images: ``(n, h, w, 3)`` of bytes, RGB.
        top: Share of the height that is cut off before.

    Returns:
        ``(n, 8, 16)`` float32 in [0, 1].
    """
    grey = images.float().div(255) @ torch.tensor([0.299, 0.587, 0.114])
    (first, last), (left, right) = _CROP
    rows = top + (1 - top) * (first + (last - first) * _middles(128))
    columns = left + (right - left) * _middles(256)
    # from -1 to 1 over the image, columns first
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1) * 2 - 1
    grid = grid.expand(len(images), -1, -1, -1)
    seen = grid_sample(grey[:, None], grid, padding_mode="border", align_corners=False)
    squares = seen.view(-1, 8, 16, 16, 16).transpose(2, 3).flatten(3)
    return centred(squares.topk(_BRIGHTEST, dim=3).values.mean(3))


def _middles(count: int) -> Tensor:
    """Return the middles of so many equal parts of [0, 1]."""
    return (torch.arange(count) + 0.5) / count


def splits(folder: Path | None = None) -> Splits:
    """Return frames of three parts of the runway, 10 m apart; damaged ones as unknown.

    Unknown are the test frames with noise, in fog, with glare, with dead rows and mirrored; and
    ``other_stretch``, real frames of three drives elsewhere on the runway, full of the marks of
    tyres. The mixed set is all of these and the test frames: every one has its true targets.
    """
    held = load.taxinet_tiny(folder)
    frames, labels = held["images"], held["labels"]
    metre = places(labels)

    def part(metres: tuple[int, int]) -> tuple[Tensor, Tensor]:
        inside = (metre >= metres[0]) & (metre < metres[1])
        return frames[inside], labels[inside]

    seen, truth = part(_TEST)
    damaged = {
        "noise": noisy(seen),
        "fog": foggy(seen),
        "glare": glaring(seen),
        "dead_rows": with_dead_rows(seen),
    }
    novel = {
        **{name: (frames, truth) for name, frames in damaged.items()},
        "mirrored": (mirrored(seen), -truth),
        "other_stretch": _other_stretch(folder),
    }
    mixed = zip((seen, truth), *novel.values(), strict=True)
    return Splits(
        _samples(*part(_TRAIN)),
        _samples(*part(_SELECTION)),
        _samples(seen, truth),
        {name: _samples(*own) for name, own in novel.items()},
        _samples(*(torch.cat(own) for own in mixed)),
    )


def _other_stretch(folder: Path | None) -> tuple[Tensor, Tensor]:
    morning, validation = load.taxinet_morning(folder), load.taxinet_validation(folder)
    frames = [reduced(morning["images"], _SCREEN_TOP), reduced(validation["images"])]
    return torch.cat(frames), torch.cat([morning["labels"], validation["labels"]])


def _samples(frames: Tensor, labels: Tensor) -> TensorSamples:
    return TensorSamples(frames, labels / torch.tensor(SCALE), standardised)


TAXINET_TINY = Domain(
    name="taxinet_tiny",
    title="TaxiNet, real 8x16",
    likelihood=Gaussian(),
    build=frames_net,
    splits=splits,
    # net and recipe had the least loss held out (two seeds: 0.0011) of this net and five fully
    # connected ones (0.0013 to 0.0040); half the batch at half the rate comes to no less
    recipe=Recipe(torch.optim.Adam, rate=6e-3, batch=128, epochs=100, anneal=True),
    all_layers=SketchSize(304, 50),
    last_layers=LastLayers(count=2),
    last=SketchSize(304, 50),
    local_rank=50,
)
