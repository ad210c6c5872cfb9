"""A small detector of drawn objects, with a score for each box it predicts.

The detector learns circles, squares and triangles. Then scenes come with stars and crosses, or
with known shapes in stripes, which no training scene had. Every box gets a score and a p-value.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from scodkit import Categorical, Gaussian, Heads, Monitor
from scodkit.metrics import separation

SIZE, STRIDE, PLACES = 64, 8, 5  # pixels of a scene, pixels of a cell, boxes at most
KNOWN = ("circle", "square", "triangle")
UNKNOWN = ("star", "cross")
LETTERS = 8.5  # points, in a picture of 5 inches: 8 pixels on a phone


# --- scenes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenes:
    """Drawn scenes with what is in them.

    Args:
        images: ``(n, 3, SIZE, SIZE)`` in [0, 1].
        boxes: ``(n, PLACES, 4)``: centre x, y and width, height, in pixels.
        kinds: ``(n, PLACES)``, index of the shape in ``KNOWN + UNKNOWN``; -1 for no object.
        strange: ``(n, PLACES)``, True for objects unlike those of the training scenes.
    """

    images: Tensor
    boxes: Tensor
    kinds: Tensor
    strange: Tensor


def shape_mask(kind: str, radius: float, turn: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return functions of the pixels around an object: its mask, and both coordinates."""
    steps = torch.arange(-SIZE, SIZE) + 0.0
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    u = (x * math.cos(turn) + y * math.sin(turn)) / radius
    v = (y * math.cos(turn) - x * math.sin(turn)) / radius
    if kind == "circle":
        inside = u**2 + v**2 < 0.8
    elif kind == "square":
        inside = torch.maximum(u.abs(), v.abs()) < 0.75
    elif kind == "triangle":
        inside = (v < 0.55) & (v > 1.9 * u.abs() - 1.05)
    elif kind == "cross":
        inside = (torch.minimum(u.abs(), v.abs()) < 0.28) & (u.abs() + v.abs() < 1.25)
    else:  # a star of five rays
        angle, length = torch.atan2(v, u), (u**2 + v**2).sqrt()
        inside = length < 0.62 + 0.38 * torch.cos(5 * angle)
    return inside, u, v


def draw(count: int, seed: int, strange: str | None = None) -> Scenes:
    """Return scenes of one to four objects that do not touch.

    Args:
        count: How many scenes.
        seed: Of all that is drawn.
        strange: What the first object of each scene is: one of ``"shape"`` or ``"stripes"``;
            None for scenes like those of the training.
    """
    random = torch.Generator().manual_seed(seed)

    def number(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=random))

    images = torch.zeros(count, 3, SIZE, SIZE)
    boxes, kinds = torch.zeros(count, PLACES, 4), torch.full((count, PLACES), -1)
    odd = torch.zeros(count, PLACES, dtype=torch.bool)
    for n, image in enumerate(images):
        image += torch.tensor([number(0.0, 0.35) for _ in range(3)])[:, None, None]
        placed: list[tuple[float, float, float]] = []
        for i in range(int(number(1, 5))):
            radius = number(6, 10)
            for _ in range(20):
                x, y = number(radius, SIZE - radius), number(radius, SIZE - radius)
                if all(math.hypot(x - a, y - b) > radius + c + 2 for a, b, c in placed):
                    break
            else:
                continue
            placed.append((x, y, radius))
            first = strange is not None and i == 0
            names = UNKNOWN if first and strange == "shape" else KNOWN
            name = names[int(number(0, len(names)))]
            inside, u, _ = shape_mask(name, radius, number(-0.4, 0.4))
            rows, columns = inside.any(1).nonzero()[:, 0], inside.any(0).nonzero()[:, 0]
            top, left = round(y) - SIZE, round(x) - SIZE
            window = (slice(-top, -top + SIZE), slice(-left, -left + SIZE))
            colour = torch.tensor([number(0.45, 1.0) for _ in range(3)])[:, None, None]
            if first and strange == "stripes":
                colour = colour * (0.35 + 0.65 * (u[window] * 7).sin().gt(0))
            image.copy_(torch.where(inside[window], colour, image))
            spans = [(float(c[0]) + float(c[-1]) + 1) / 2 for c in (columns, rows)]
            sides = [float(c[-1] - c[0]) + 1 for c in (columns, rows)]
            boxes[n, i] = torch.tensor([spans[0] + left, spans[1] + top, *sides])
            kinds[n, i] = (*KNOWN, *UNKNOWN).index(name)
            odd[n, i] = first
    images += 0.03 * torch.randn(images.shape, generator=random)
    return Scenes(images.clamp(0, 1), boxes, kinds, odd)


# --- the detector --------------------------------------------------------------------------


class Detector(nn.Module):
    """Objects by their centres, on a grid of cells (after CenterNet, Zhou et al. 2019).

    Returns up to `PLACES` boxes of an image: class logits, boxes (centre in pixels, logarithms
    of the sides) and which of the places have one.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 48)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Conv2d(48, 48, 3, padding=1), nn.ReLU())
        self.object = nn.Conv2d(48, 1, 1)
        self.name = nn.Conv2d(48, len(KNOWN), 1)
        self.sides = nn.Conv2d(48, 4, 1)

    def maps(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what each cell says: an object's centre or not, its class, its box."""
        features = self.body(2 * images - 1)
        return self.object(features)[:, 0], self.name(features), self.sides(features)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the heads at the likeliest peaks of the map of objects."""
        objects, names, sides = self.maps(images)
        peaks = objects == F.max_pool2d(objects[:, None], 3, 1, 1)[:, 0]
        sure = objects.masked_fill(~peaks, -1e4).flatten(1)
        best, where = sure.topk(PLACES, 1)

        def at(maps: Tensor) -> Tensor:
            cells = where[:, :, None].expand(-1, -1, maps.shape[1])
            return maps.flatten(2).transpose(1, 2).gather(1, cells)

        return {"class": at(names), "box": at(sides), "cell": where, "present": best > 0}


def pixels(found: dict[str, Tensor], where: Tensor) -> Tensor:
    """Return boxes in pixels, ``(n, PLACES, 4)``: centre x, y and width, height."""
    across = SIZE // STRIDE
    corner = torch.stack([where % across, where // across], 2) * STRIDE
    offset, sides = found["box"].split(2, 2)
    return torch.cat([corner + STRIDE * offset, 16 * sides.exp()], 2)


def train(scenes: Scenes, epochs: int = 25) -> Detector:
    """Return a detector, trained in about half a minute on one core."""
    torch.manual_seed(0)
    model = Detector()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    batches = math.ceil(len(scenes.images) / 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 8e-3, epochs * batches)
    image, place = (scenes.kinds >= 0).nonzero().unbind(1)
    centre, size = scenes.boxes[image, place].split(2, 1)
    column, row = (centre / STRIDE).long().unbind(1)
    offset = centre / STRIDE - torch.stack([column, row], 1)
    targets = torch.cat([offset, (size / 16).log()], 1)
    heat = torch.zeros(len(scenes.images), SIZE // STRIDE, SIZE // STRIDE)
    heat[image, row, column] = 1.0
    for _ in range(epochs):
        for chosen in torch.randperm(len(heat)).split(64):
            number = torch.full((len(heat),), -1)
            number[chosen] = torch.arange(len(chosen))
            here = number[image] >= 0
            cells = number[image][here], slice(None), row[here], column[here]
            objects, names, sides = model.maps(scenes.images[chosen])
            loss = F.binary_cross_entropy_with_logits(
                objects, heat[chosen], pos_weight=torch.tensor(4.0)
            )
            loss = loss + 0.3 * F.cross_entropy(names[cells], scenes.kinds[image, place][here])
            loss = loss + 2 * F.smooth_l1_loss(sides[cells], targets[here], beta=0.1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return model.eval()


# --- what it finds -------------------------------------------------------------------------


@dataclass(frozen=True)
class Matches:
    """Boxes that were predicted, beside the objects that are there.

    Args:
        strange: ``(n, PLACES)``, True where the box is of an object unlike those known.
        good: ``(n, PLACES)``, True where it is of another object.
        right: ``(n, PLACES)``, True where it also has the right class.
        error: ``(n, PLACES, 4)``, of the box head against that object.
        seen: Share of strange objects that have a box.
    """

    strange: Tensor
    good: Tensor
    right: Tensor
    error: Tensor
    seen: float


def match(found: dict[str, Tensor], where: Tensor, scenes: Scenes) -> Matches:
    """Match each box with the nearest object, if its centre is within half of its size."""
    boxes, objects = pixels(found, where), scenes.boxes
    apart = torch.cdist(boxes[:, :, :2], objects[:, :, :2])
    apart = apart.masked_fill((scenes.kinds < 0)[:, None, :], torch.inf)
    distance, index = apart.min(2)

    def of_object(values: Tensor) -> Tensor:
        return values.gather(1, index)

    size = of_object(objects[:, :, 2:].amax(2))
    matched = found["present"] & (distance < size / 2)
    strange = matched & of_object(scenes.strange)
    right = found["class"].argmax(2) == of_object(scenes.kinds)
    nearest = objects.gather(1, index[:, :, None].expand(-1, -1, 4))
    error = torch.cat(
        [
            (boxes[:, :, :2] - nearest[:, :, :2]) / STRIDE,
            (boxes[:, :, 2:] / nearest[:, :, 2:].clamp_min(1e-6)).log(),
        ],
        2,
    )
    seen = float(strange.any(1).double().sum() / max(1, int(scenes.strange.any(1).sum())))
    good = matched & ~strange
    return Matches(strange, good, right & good, error, seen)


# --- what the monitor says -----------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """A set of scenes as the monitor sees them.

    Args:
        scenes: What was drawn.
        matches: Of the boxes with what was drawn.
        boxes: In pixels, ``(n, PLACES, 4)``.
        present: ``(n, PLACES)``, which places have a box.
        score: Of each box, ``(n, PLACES)``, nats.
        heads: What of that each head adds, by name.
        p_value: Of each box, ``(n, PLACES)``.
        image: Score of each image, ``(n,)``, nats.
        doubt: One less the largest softmax of each box, ``(n, PLACES)``, 0 without a box.
    """

    scenes: Scenes
    matches: Matches
    boxes: Tensor
    present: Tensor
    score: Tensor
    heads: Mapping[str, Tensor]
    p_value: Tensor
    image: Tensor
    doubt: Tensor


def judge(monitor: Monitor, scenes: Scenes) -> Judged:
    """Return what a monitor and the detector say of some scenes."""
    batches = scenes.images.split(64)
    found = monitor.boxes(iter(batches), progress=False)
    with torch.no_grad():
        output = monitor.model(scenes.images)
    doubt = 1 - output["class"].softmax(2).amax(2)
    assert found.p_value is not None
    return Judged(
        scenes=scenes,
        matches=match(output, output["cell"], scenes),
        boxes=pixels(output, output["cell"]),
        present=found.present,
        score=found.score,
        heads=found.heads,
        p_value=found.p_value,
        image=monitor.score(iter(batches), progress=False),
        doubt=doubt * found.present,
    )


def report(known: Judged, strange: dict[str, Judged]) -> dict[str, dict[str, float]]:
    """Print and return AUROC and rates at 5 % false alarms, for each kind of strange scene."""

    def auroc(good: Tensor, bad: Tensor) -> float:
        return float(separation(good, bad).auroc)

    flagged = known.p_value <= 0.05
    good = known.matches.good
    rows = {}
    print(f"good scenes with any box flagged: {float(flagged.any(1).float().mean()):.1%}")
    for name, them in strange.items():
        odd, alarms = them.matches.strange, them.p_value <= 0.05
        rows[name] = {
            "objects with a box": them.matches.seen,
            "AUROC of boxes": auroc(known.score[good], them.score[odd]),
            **{
                f"AUROC of boxes, head {head}": auroc(scores[good], them.heads[head][odd])
                for head, scores in known.heads.items()
            },
            "AUROC of boxes, max softmax": auroc(known.doubt[good], them.doubt[odd]),
            "AUROC of images": auroc(known.image, them.image),
            "AUROC of images, worst box": auroc(known.score.amax(1), them.score.amax(1)),
            "AUROC of images, worst softmax": auroc(known.doubt.amax(1), them.doubt.amax(1)),
            "strange boxes flagged": float(alarms[odd].float().mean()),
            "other boxes beside them flagged": float(alarms[them.matches.good].float().mean()),
        }
        listed = "".join(f"\n  {what:34} {value:.3f}" for what, value in rows[name].items())
        print(f"{name}:{listed}")
    return rows


def picture(known: Judged, strange: dict[str, Judged], path: str) -> None:
    """Draw scenes with the p-values of their boxes, beside the scores of all boxes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from scodkit.explain.plots import png_metadata

    plt.rcParams.update({"font.size": LETTERS})
    figure = plt.figure(figsize=(5, 7.0), dpi=200, layout="constrained")
    above, below = figure.subfigures(2, height_ratios=(1.5, 1))
    cells = above.subplots(2, 3)
    for row, (name, them) in zip(cells, strange.items(), strict=True):
        # the first of each kind with at least three boxes, one of them strange
        usable = (them.present.sum(1) >= 3) & them.matches.strange.any(1)
        for cell, n in zip(row, usable.nonzero()[:, 0].tolist(), strict=False):
            draw_scene(cell, them, n)
        row[0].set_ylabel(name)
    above.suptitle("p-values of boxes, in three scenes of each kind", weight="bold")
    bar = above.colorbar(_colours(), ax=cells, location="bottom", aspect=40, pad=0.02)
    bar.set_label("p-value of a box, the colour of its outline")
    bar.set_ticks([0.002, 0.01, 0.05, 0.2, 1], labels=["0.002", "0.01", "0.05", "0.2", "1"])
    bar.ax.minorticks_off()
    draw_scores(below.subplots(), known, strange)
    figure.savefig(path, metadata=png_metadata(figure))


def _colours() -> Any:
    """Return the colours of p-values: orange where they are small."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    colours = LinearSegmentedColormap.from_list("p", ["#D55E00", "#F0E442", "#56B4E9"])
    return ScalarMappable(LogNorm(2e-3, 1.0), colours)


def draw_scene(axis: Any, them: Judged, n: int) -> None:
    """Draw a scene with its boxes in the colours of their p-values."""
    from matplotlib.patches import Rectangle

    colours, here = _colours(), them.present[n]
    axis.imshow(them.scenes.images[n].permute(1, 2, 0), extent=(0, SIZE, SIZE, 0))
    boxes, p_values = them.boxes[n][here].tolist(), them.p_value[n][here].tolist()
    for (x, y, w, h), p in zip(boxes, p_values, strict=True):
        edge = {"fill": False, "ec": colours.to_rgba(p), "lw": 2.2}
        axis.add_patch(Rectangle((x - w / 2, y - h / 2), w, h, **edge))
        shade = {"fc": "black", "ec": "none", "alpha": 0.6, "pad": 0.8}
        text = {"ha": "center", "va": "center", "color": "white", "bbox": shade}
        axis.text(x, y + h / 2, f"{p:.2g}", **text)
    axis.set(xticks=[], yticks=[], xlim=(0, SIZE), ylim=(SIZE, 0))


def draw_scores(axis: Any, known: Judged, strange: dict[str, Judged]) -> None:
    """Draw histograms of the scores of boxes, with the threshold of the alarm."""
    from matplotlib.ticker import LogLocator, NullLocator

    sets = {"known objects": (known.score[known.matches.good], "#56B4E9")}
    for (name, them), colour in zip(strange.items(), ("#D55E00", "#CC79A7"), strict=True):
        sets[name] = (them.score[them.matches.strange], colour)
    ends = torch.cat([scores for scores, _ in sets.values()]).log10()
    bins = torch.logspace(float(ends.min()), float(ends.max()), 40).tolist()
    for name, (scores, colour) in sets.items():
        weights = torch.full((len(scores),), 100 / len(scores))
        look = {"histtype": "step", "lw": 1.8, "color": colour, "label": name}
        axis.hist(scores, bins, weights=weights, **look)
    least = min(float(them.score[them.p_value <= 0.05].min()) for them in strange.values())
    axis.set_ylim(0, 1.3 * axis.get_ylim()[1])  # room for the legend
    axis.axvline(least, color="black", lw=1, ls="--")
    words = "alarm, in at most\n5 % of good scenes"
    axis.text(least * 1.07, axis.get_ylim()[1], words, va="top")
    axis.set(xscale="log", xlabel="score of a box (nats)", ylabel="% of boxes")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_title("Scores of all boxes", weight="bold")
    axis.legend(loc="upper left", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def main(path: str | None = None) -> tuple[Judged, dict[str, dict[str, float]]]:
    """Train, fit, calibrate, ask; and draw, where there is a path for it."""
    model = train(draw(2000, seed=1))
    held_out = draw(400, seed=2)
    with torch.no_grad():
        found = model(held_out.images)
    matches = match(found, found["cell"], held_out)
    # the noise of the box head, where it is not what it was trained on
    variance = tuple(matches.error[matches.good].var(0).tolist())
    likelihoods = {"class": Categorical(), "box": Gaussian(variance)}
    heads = Heads(likelihoods, boxes=("class", "box"), present="present")
    monitor = Monitor(model, heads, rank=100)
    monitor.fit(draw(500, seed=1).images.split(64), progress=False)
    monitor.calibrate(draw(400, seed=3).images.split(64), progress=False)
    known = judge(monitor, draw(300, seed=4))
    strange = {
        "stars and crosses": judge(monitor, draw(300, seed=5, strange="shape")),
        "known shapes in stripes": judge(monitor, draw(300, seed=6, strange="stripes")),
    }
    rows = report(known, strange)
    if path is not None:
        picture(known, strange, path)
    return known, rows


if __name__ == "__main__":
    main(*sys.argv[1:2])
