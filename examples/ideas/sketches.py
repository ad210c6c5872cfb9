"""What three sketches of the same curvature keep, beside the curvature itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import control
import look
import torch
from torch import Tensor

from scodkit import Eigenbasis, Monitor
from scodkit.sketch import Exact, FrequentDirections, Nystrom, Sketch, TwoSided

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZES = (128, 208, 448)  # vectors of N numbers
SHOWN = 208  # of which the eigenvalues are drawn


def sketches(size: int) -> dict[str, tuple[Sketch, int]]:
    """Return sketches that hold so many vectors, each with the rank it supports."""
    half = size // 2
    return {
        "Nystrom": (Nystrom(size=size), half),
        "TwoSided": (TwoSided(size=size), (size - 4) // 6),
        "FrequentDirections": (FrequentDirections(size=half), half),
        "shrink=False": (FrequentDirections(size=half, shrink=False), half),
    }


@dataclass(frozen=True)
class Kept:
    """What one sketch has kept.

    Args:
        ratio: Its eigenvalues over the exact ones, ``(k,)``, from the largest on.
        error: Nuclear norm of the difference to the exact matrix, over the exact trace.
        above: Largest eigenvalue of sketched minus exact, over the largest exact eigenvalue:
            positive where the sketch claims curvature that there is not.
        score: Median score of held-out inputs, nats.
        certified: Whether the library gives a certificate.
    """

    ratio: Tensor
    error: float
    above: float
    score: float
    certified: bool


@dataclass(frozen=True)
class Found:
    """What is kept, by name of the sketch and vectors held.

    Args:
        kept: By name, then by size.
        best: The least error that any matrix of rank ``size // 2`` can have, by size.
        exact: Median score of held-out inputs with all of the curvature, nats.
    """

    kept: dict[str, dict[int, Kept]]
    best: dict[int, float]
    exact: float


def find() -> Found:
    """Fit the control network with every sketch, and without one."""
    made = control.trained()

    def fitted(sketch: Sketch, rank: int) -> tuple[Eigenbasis, float]:
        monitor = Monitor(made.net, control.LIKELIHOOD, rank=rank, sketch=sketch)
        monitor.fit(made.x.split(250), progress=False)
        return monitor.basis, float(monitor.score(made.heldout).median())

    exact, median = fitted(Exact(), rank=10**6)
    kept: dict[str, dict[int, Kept]] = {name: {} for name in sketches(SHOWN)}
    for size in SIZES:
        for name, (sketch, rank) in sketches(size).items():
            basis, score = fitted(sketch, rank)
            # eigenvalues of exact minus sketched
            gap = torch.linalg.eigvalsh(dense(exact) - dense(basis))
            kept[name][size] = Kept(
                ratio=basis.values / exact.values[: basis.rank],
                error=float(gap.abs().sum() / exact.values.sum()),
                above=-float(gap[0] / exact.values[0]),
                score=score,
                certified=basis.certified,
            )
    best = {n: float(exact.values[n // 2 :].sum() / exact.values.sum()) for n in SIZES}
    return Found(kept, best, median)


def dense(basis: Eigenbasis) -> Tensor:
    """Return a basis as a matrix ``(N, N)``."""
    return (basis.vectors * basis.values) @ basis.vectors.T


LOOKS = {
    "Nystrom": (look.BLUE, "-", "o"),
    "TwoSided": (look.RED, "-", "s"),
    "FrequentDirections": (look.GREEN, "-", "^"),
    "shrink=False": (look.GREEN, ":", "v"),
}


def draw(found: Found) -> Figure:
    """Draw the eigenvalues above and the errors below."""
    figure, (above, below) = look.panels((2.6, 2.8))
    _eigenvalues(above, found)
    _errors(below, found)
    return figure


def _eigenvalues(axes: Axes, found: Found) -> None:
    axes.axhline(1, color="black", lw=1)
    for name, by_size in found.kept.items():
        colour, line, _ = LOOKS[name]
        ratio = by_size[SHOWN].ratio
        axes.plot(range(1, len(ratio) + 1), ratio, color=colour, ls=line, lw=1.8, label=name)
    look.name_axes(axes, "direction, from the largest eigenvalue on", "share of the exact one")
    axes.set_ylim(0, 1.12)
    look.title(axes, f"Eigenvalues kept with {SHOWN} vectors")
    look.key(axes, loc="lower left")


def _errors(axes: Axes, found: Found) -> None:
    for name, by_size in found.kept.items():
        colour, line, marker = LOOKS[name]
        errors = [by_size[size].error for size in SIZES]
        axes.plot(SIZES, errors, color=colour, ls=line, marker=marker, ms=4, label=name)
    best = [found.best[size] for size in SIZES]
    axes.plot(SIZES, best, color="black", ls="--", lw=1, label="best of rank T/2")
    look.name_axes(axes, "memory T (vectors of N = 1,346 numbers)", "error / trace")
    axes.set(xscale="log", yscale="log", ylim=(1e-4, 0.2))
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.minorticks_off()
    look.title(axes, "Error of the sketched matrix (nuclear norm)")
    look.key(axes, loc="lower left")
