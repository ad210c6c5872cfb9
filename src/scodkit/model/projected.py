"""Projected weights: of each layer's gradient ``G`` some entries of ``P_out^T G P_in``.

The columns of ``P_out`` and ``P_in`` are orthonormal, so that the gradient's entries in the
projected space are coordinates in weight space: those of the weights along ``u v^T`` for
columns ``u`` of ``P_out`` and ``v`` of ``P_in``. `scodkit.fit.learn` finds the columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from scodkit.errors import ParameterSelectionError
from scodkit.model.parameters import Block, ParameterSet, Selection
from scodkit.numerics import artifact
from scodkit.numerics.hashing import digest_of
from scodkit.numerics.matmul import Thin

Moments = Literal["gradient", "kfac", "random"]

# parameters with up to so many times rank^2 weights are kept whole
_FEW = 4

_MATRIX = 2  # axes of a matrix

# options in a file
_OPTIONS: dict[str, artifact.Check] = {
    "rank": artifact.whole(1),
    "moments": artifact.that("the name of moments", lambda name: name in get_args(Moments)),
    "samples": artifact.whole(1),
    "seed": artifact.INTEGER,
}
PROJECTED = artifact.fields(
    {
        **_OPTIONS,
        "digest": artifact.TEXT,
        "shapes": artifact.table(artifact.each(artifact.whole(1))),
    }
)


@dataclass(frozen=True)
class Projected:
    """Weights of which each layer's gradient is projected to ``rank^2`` numbers, on average.

    They are the entries of ``P_out^T G P_in``, over all layers, in which the eigenvalues of
    both sides let most of the curvature be expected.

    A fit learns the projections in up to three passes over its first samples: it reads these
    ahead and fits them, too, so that data has to be read once only. A shuffled loader is best:
    what the first samples do not move is left to the prior.

    Args:
        rank: The root of how many numbers of a layer's gradient are looked at, on average.
        layers: Which weights: ``"all"``, `LastLayers`, names or glob patterns, or a callable.
        moments: What the columns are leading eigenvectors of. ``"gradient"``: the mean of
            ``G^T G`` and of ``G G^T`` over gradients ``G``. ``"kfac"``: the mean of ``a a^T``
            and of ``d d^T`` over activations and gradients at the outputs. ``"random"``: none,
            for comparison; random ones are worth little.
        samples: How many samples to learn from.
        given: Projections to use, not to learn: ``monitor.projections`` of another fit. Fits of
            parts of the data merge if they have the same.
        seed: Of the random numbers that learning starts from.

    Examples:
        >>> Projected(rank=8).rank
        8
    """

    rank: int = 16
    layers: Selection = "all"
    moments: Moments = "gradient"
    samples: int = 512
    given: Projections | None = field(default=None, repr=False)
    seed: int = 0

    def __post_init__(self) -> None:
        problem = None
        for name in ("rank", "samples"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                problem = f"{name} as a whole number >= 1, got {value!r}; type {name}=16"
        if type(self.seed) is not int:
            problem = f"seed as a whole number, got {self.seed!r}"
        if self.moments not in get_args(Moments):
            problem = f"moments='gradient', 'kfac' or 'random', got {self.moments!r}"
        if isinstance(self.layers, Projected):
            problem = "layers to project, got projected ones; type Projected(layers='all')"
        if self.given is not None and not isinstance(self.given, Projections):
            problem = (
                f"projections as of another fit, got {self.given!r}; type "
                "Projected(given=monitor.projections)"
            )
        elif self.given is not None and self.layers != "all":
            problem = (
                f"no layers beside given projections, which are of {len(self.given.names)} "
                f"weights, got {self.layers!r}; type Projected(given=...) alone"
            )
        if problem:
            raise ParameterSelectionError(f"expected {problem}")

    def sides(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return outputs and inputs of a weight to be projected; None if it is kept whole.

        Args:
            shape: Of the weight; that of a convolution counts as ``(outputs, patch)``.
        """
        sides = sides_of(shape)
        few = sides is None or math.prod(sides) <= _FEW * self.rank**2
        return None if few else sides

    def most(self, parameters: ParameterSet) -> int:
        """Return how many coordinates there will be at most, ``N'``."""
        sizes = (math.prod(block.shape) for block in parameters.blocks)
        projected = (self.sides(block.shape) is not None for block in parameters.blocks)
        pairs = zip(sizes, projected, strict=True)
        return sum(self.rank**2 if own else size for size, own in pairs)


def sides_of(shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the sides of a weight as a matrix; None for vectors and single numbers.

    Examples:
        >>> sides_of((8, 3, 5, 5)), sides_of((1, 9, 4)), sides_of((7,))
        ((8, 75), (9, 4), None)
    """
    sizes = list(shape)
    while sizes and sizes[0] == 1:
        sizes.pop(0)
    return (sizes[0], math.prod(sizes[1:])) if len(sizes) >= _MATRIX else None


@dataclass(frozen=True, eq=False)
class Pair:
    """The projections of one weight ``(o, i)``.

    Args:
        sides: ``o`` and ``i``.
        out: ``P_out (o, r)``, orthonormal columns; None for the identity.
        into: ``P_in (i, s)``, likewise.
        kept: Which entries of ``P_out^T G P_in`` are coordinates, by their places in the flat
            ``(r s)``, ascending; None for all.
    """

    sides: tuple[int, int]
    out: Tensor | None
    into: Tensor | None
    kept: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(r, s)``, of ``P_out^T G P_in``."""
        own = zip((self.out, self.into), self.sides, strict=True)
        rows, columns = (side if p is None else p.shape[1] for p, side in own)
        return rows, columns

    @property
    def coordinates(self) -> tuple[int, ...]:
        """The shape of the coordinates: ``(r, s)``, or how many of these are kept."""
        return self.shape if self.kept is None else (len(self.kept),)

    @property
    def swapped(self) -> Pair:
        """The projections of the transposed weight, with all entries."""
        return Pair(self.sides[::-1], self.into, self.out)

    @property
    def complete(self) -> bool:
        """Whether all of a gradient is inside."""
        return math.prod(self.coordinates) == math.prod(self.sides)

    def of_outputs(self, which: slice) -> Pair:
        """Return the projections of some of the weight's rows, from the first to the last.

        Where ``P_out`` is the identity, so it is of these rows alone.
        """
        out = None if self.out is None else self.out[which]
        return Pair((which.stop - which.start, self.sides[1]), out, self.into)

    @cached_property
    def _left(self) -> Thin | None:
        return None if self.out is None else Thin(self.out)

    @cached_property
    def _right(self) -> Thin | None:
        return None if self.into is None else Thin(self.into)

    def left(self, delta: Tensor) -> Tensor:
        """Return gradients at outputs ``(..., o)`` times ``P_out``."""
        return delta if self._left is None else self._left.after(delta)

    def right(self, a: Tensor) -> Tensor:
        """Return activations ``(..., i)`` times ``P_in``."""
        return a if self._right is None else self._right.after(a)

    def of_gradients(self, rows: Tensor) -> Tensor:
        """Return ``P_out^T G P_in``, flat, of gradients ``(..., o i)``."""
        wide = self.right(rows.reshape(*rows.shape[:-1], *self.sides))
        return self.left(wide.mT).mT.flatten(-2)

    def to_weights(self, coordinates: Tensor) -> Tensor:
        """Return ``P_out C P_in^T``, flat, of coordinates ``(..., n)``."""
        if self.kept is not None:
            entries = coordinates.new_zeros(*coordinates.shape[:-1], math.prod(self.shape))
            coordinates = entries.index_copy(-1, self.kept.to(coordinates.device), coordinates)
        whole = coordinates.reshape(*coordinates.shape[:-1], *self.shape)
        if self.into is not None:
            whole = whole @ self.into.mT.to(whole)
        if self.out is not None:
            whole = self.out.to(whole) @ whole
        return whole.flatten(-2)

    def to(self, device: torch.device) -> Pair:
        """Return the pair on another device."""
        parts = (self.out, self.into, self.kept)
        return Pair(self.sides, *(p if p is None else p.to(device) for p in parts))


class Projections:
    """The projections of a fit: a pair of matrices for each weight that is projected.

    Args:
        options: How they were found.
        names: All weights of the fit, projected or whole, in the model's order.
        pairs: Of those that are projected, by name.
    """

    def __init__(
        self, options: Projected, names: tuple[str, ...], pairs: Mapping[str, Pair]
    ) -> None:
        self.options = replace(options, layers=names, given=None)
        self.names, self.pairs = names, dict(pairs)

    @cached_property
    def digest(self) -> str:
        """A hash of all of it: fits with the same one merge."""
        return digest_of(self.tensors(), salt=" ".join(self.names))

    def tensors(self) -> dict[str, Tensor]:
        """Return the matrices, by the name of the weight and ``out``, ``in`` or ``kept``."""
        named: dict[str, Tensor | None] = {}
        for name, pair in self.pairs.items():
            named |= {f"{name}.out": pair.out, f"{name}.in": pair.into}
            named |= {f"{name}.kept": pair.kept}
        return {name: matrix for name, matrix in named.items() if matrix is not None}

    def of(self, whole: ParameterSet) -> ProjectedSet:
        """Return the projected weights of a model.

        Args:
            whole: The weights.

        Raises:
            ParameterSelectionError: If they are not those of the projections.
        """
        shapes = {block.name: block.shape for block in whole.blocks}
        sides = {name: sides_of(shapes.get(name, ())) for name in self.pairs}
        if whole.names != self.names or any(
            sides[name] != pair.sides for name, pair in self.pairs.items()
        ):
            raise ParameterSelectionError(
                f"expected the {len(self.names)} weights of the projections, "
                f"{self.names[0]} to {self.names[-1]}, got others, or of other shapes; type "
                "Projected(given=...) for a model of the same shapes, or leave out given="
            )
        blocks, start = [], 0
        for block in whole.blocks:
            pair = self.pairs.get(block.name)
            shape = block.shape if pair is None else pair.coordinates
            stop = start + math.prod(shape)
            blocks.append(Block(block.name, shape, slice(start, stop)))
            start = stop
        return ProjectedSet(tuple(blocks), whole, self)

    def pack(self, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return header data, and tensors with prefixed names."""
        header = {name: getattr(self.options, name) for name in _OPTIONS}
        header |= {"digest": self.digest}
        header["shapes"] = {name: list(pair.coordinates) for name, pair in self.pairs.items()}
        return header, {prefix + name: matrix for name, matrix in self.tensors().items()}

    @staticmethod
    def unpack(
        header: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        prefix: str,
        whole: ParameterSet,
    ) -> ProjectedSet:
        """Return the weights of a model, with the projections that `pack` took apart.

        Args:
            header: As `PROJECTED` allows.
            tensors: Those of the projections, and others.
            prefix: Of the names of those of the projections.
            whole: The weights.

        Raises:
            CorruptArtifactError: If the projections are not as they were saved.
        """
        sides = {block.name: sides_of(block.shape) for block in whole.blocks}
        pairs = {}
        for name, shape in header["shapes"].items():
            own, ends = sides.get(name), ("out", "in", "kept")
            out, into, kept = (tensors.get(f"{prefix}{name}.{end}") for end in ends)
            if own is None:
                artifact.refuse("projections of a matrix", f"some of {name}")
            for matrix, side in zip((out, into), own, strict=True):
                _check(name, matrix, side)
            pairs[name] = Pair(own, out, into, kept)
            _check_kept(name, kept, math.prod(pairs[name].shape))
            if list(pairs[name].coordinates) != shape:
                artifact.refuse(f"{shape} coordinates of {name}", str(pairs[name].coordinates))
        found = Projections(options_in(header, whole.names), whole.names, pairs)
        if found.digest != header["digest"]:
            artifact.refuse("projections as they were saved", "others")
        return found.of(whole)

    def to(self, device: torch.device | str) -> Projections:
        """Return the projections on another device; the digest stays the same."""
        pairs = {name: pair.to(torch.device(device)) for name, pair in self.pairs.items()}
        return Projections(self.options, self.names, pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Projections) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Projections({len(self.pairs)} of {len(self.names)} weights, {self.digest[:8]})"


def options_in(header: Mapping[str, Any], names: Sequence[str]) -> Projected:
    """Return how to learn the projections anew that a file has.

    Args:
        header: As `PROJECTED` allows.
        names: Of the weights.
    """
    return Projected(layers=list(names), **{name: header[name] for name in _OPTIONS})


def _check(name: str, matrix: Tensor | None, side: int) -> None:
    """Check a projection from a file: the identity, or orthonormal columns.

    Raises:
        CorruptArtifactError: If it is neither.
    """
    if matrix is None:
        return
    artifact.tensor((side, None), artifact.WIDE)(f"a projection of {name}", matrix)
    gram = matrix.double().mT @ matrix.double()
    off = (gram - torch.eye(len(gram), dtype=gram.dtype)).abs().max()
    if not float(off) <= math.sqrt(torch.finfo(matrix.dtype).eps):
        artifact.refuse(f"orthonormal columns in the projections of {name}", "others")


def _check_kept(name: str, kept: Tensor | None, entries: int) -> None:
    """Check which entries of a projected gradient count, from a file.

    Raises:
        CorruptArtifactError: If they are not places of entries, ascending.
    """
    if kept is None:
        return
    artifact.tensor(kept.shape[:1], (torch.int64,))(f"entries of {name}", kept)
    places = [-1, *kept.tolist(), entries]
    if not len(kept) or any(a >= b for a, b in itertools.pairwise(places)):
        artifact.refuse(f"ascending places of entries of {name}", "others")


@dataclass(frozen=True)
class ProjectedSet(ParameterSet):
    """Chosen weights in projected coordinates: blocks and columns are those of the latter.

    Args:
        full: The weights themselves.
        projections: Of them.
    """

    full: ParameterSet
    projections: Projections

    def in_full(self) -> ParameterSet:
        """See `ParameterSet.in_full`.

        Returns:
            The weights that are projected.
        """
        return self.full

    @property
    def selection(self) -> Projected:  # type: ignore[override]
        """See `ParameterSet.selection`.

        Returns:
            How they were projected; the projections are learnt again.
        """
        return self.projections.options

    @property
    def complete(self) -> bool:
        """Whether the projected space has all weights."""
        return self.num_parameters == self.full.num_parameters

    def pairs_at(self, device: torch.device) -> dict[int, tuple[int, Block, Pair | None]]:
        """Return place, block and projections of each weight, by its first column in full."""
        found = self._by_device.get(device)
        if found is None:
            pairs = self.projections.to(device).pairs
            found = {
                full.columns.start: (i, block, pairs.get(block.name))
                for i, (full, block) in enumerate(
                    zip(self.full.blocks, self.blocks, strict=True)
                )
            }
            self._by_device.clear()  # of the device that the model was on
            self._by_device[device] = found
        return found

    @cached_property
    def _by_device(self) -> dict[torch.device, dict[int, tuple[int, Block, Pair | None]]]:
        return {}

    def spread(self, directions: Tensor) -> Tensor:
        """See `ParameterSet.spread`.

        Returns:
            ``P y`` for each direction ``y``.
        """
        pairs = self.pairs_at(directions.device).values()
        parts = [(directions[:, block.columns], pair) for _, block, pair in pairs]
        return torch.cat([z if p is None else p.to_weights(z) for z, p in parts], dim=1)

    def divided(self, index: int, count: int) -> tuple[tuple[str, ...], range]:
        """See `ParameterSet.divided`.

        Returns:
            All of them.

        Raises:
            ParameterSelectionError: If there is more than one part.
        """
        if count > 1:
            raise ParameterSelectionError(
                "expected weights to be divided among processes, got projected ones, which "
                "are few; type Monitor(..., parameters=Projected(...))"
            )
        return super().divided(index, count)
