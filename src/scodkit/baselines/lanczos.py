"""Lanczos vectors of a large symmetric matrix, in the memory of three of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def lanczos_vectors(
    times: Callable[[Tensor], Tensor], start: Tensor, steps: int, precision: float
) -> Iterator[Tensor]:
    """Yield an orthonormal basis of ``span(b, A b, A^2 b, ...)``, vector by vector.

    Each is made orthogonal to the two before it, which in exact arithmetic is enough. With
    rounding, vectors turn back into what the first ones have found as soon as that has
    converged: later ones may repeat it.

    Args:
        times: Multiplies ``A (N, N)`` with a vector; called once between two vectors.
        start: ``b``, ``(N,)``; if it is zero there are none.
        steps: How many vectors at most; fewer come where they span all that ``A`` can reach.
        precision: Of the products, relative.

    Yields:
        Unit vectors ``(N,)``, to be used before the next one is asked for.
    """
    length = float(start.norm())
    if not length:
        return
    known = [start / length]
    reach = 0.0
    yield known[-1]
    for _ in range(steps - 1):
        image = times(known[-1])
        reach = max(reach, float(image.norm()))
        for _ in range(2):  # once more, for what rounding left
            for vector in known:
                image = image - torch.dot(vector, image) * vector
        length = float(image.norm())
        if length <= 64 * precision * reach:  # nothing but rounding
            return
        known = [known[-1], image / length]
        yield known[-1]
