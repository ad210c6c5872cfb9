"""Sketched Lanczos uncertainty, SLU (Miani, Beretta and Hauberg, 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from scodkit.baselines.baseline import State, TrainingData
from scodkit.baselines.weight_space import WeightSpaceBaseline, over_pieces
from scodkit.errors import NondeterministicError, NonFiniteError, OptionError
from scodkit.factors.choose import choose_jacobian
from scodkit.factors.engine import Factors, Sums
from scodkit.factors.pieces import FactorSource, finite_samples
from scodkit.factors.products import Jacobian, ProductSource
from scodkit.model.inputs import Inputs
from scodkit.numerics.matmul import squared_norms, tall_svd
from scodkit.sketch import Map, SparseSign, documents
from scodkit.sketch.maps import check_map

# entries of the sketching matrix made at a time
_CHUNK = 1 << 20
_CHUNK_ON_GPU = 1 << 26

# sketch size over rank, where none is given
_SIZE_PER_RANK = 20

# relative difference between the squared outputs of two passes that rounding may explain
_SAME_OUTPUTS = 1e-4

# rows of some samples: columns, and the rows in these ``(b q, columns)``
_Blocks = list[tuple[slice, Tensor]]


@dataclass(eq=False, repr=False, kw_only=True)
class SketchedLanczos(WeightSpaceBaseline):
    """``|L|_F^2 - |Q^T S L|_F^2``: SCOD by Lanczos over many passes, in little memory.

    Each pass over the training data multiplies its Fisher information with one vector, which
    gives the next Lanczos vector; of each only ``s`` numbers are kept, its sketch by a random
    map ``S``. ``Q`` is an orthonormal basis of the sketches. Vectors cannot be made orthogonal
    to those that are gone, so later ones repeat what has converged (see `lanczos_vectors`);
    what is numerically dependent among the sketches is dropped.

    The start is the Fisher information times a random vector, so that no direction is spent
    on what it does not reach: ``rank`` passes for ``rank`` vectors. The same Fisher-weighted
    factor ``L`` is used in the fit and in the score. (The authors' code scores classifiers
    with the plain Jacobian, which is another quantity than the projection of ``L``.)

    If ``S`` changes squared lengths in the span of the Lanczos vectors and ``L`` by a factor
    within ``1 +- e``, the score is within ``2 e |L|_F^2`` of the one without a sketch: a lot
    where little of ``L`` is outside, as for most inputs of a trained network. With
    ``sketched_length`` the score is ``|S L|_F^2 - |Q^T S L|_F^2``, and the same factor
    ``1 +- e`` holds for the score itself. Not the paper's, but it needs far smaller sketches.
    A typical ``e`` for one vector is ``sqrt(2 / s)``. For Gaussian maps the mean of either is
    ``1 - k / s`` times the score without a sketch. With ``size >= N`` there is none.

    Memory: the fit holds three vectors of ``N`` numbers and ``s k`` numbers, scoring only the
    latter; the map is made from its seed when it is needed. (SCOD holds ``T N`` and ``k N``.)
    If all of the data's factors fit into ``memory_budget``, they are kept, and one pass does.
    Otherwise a vector goes forward through the network and back, a batch at a time, which
    forms no factors.
    The paper's budget of ``b`` vectors is ``size=b * N // rank``. No targets needed. Nats
    (squared units), >= 0.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises; any.
        rank: ``k``, Lanczos steps, each a pass over the data.
        size: ``s``, numbers kept of each Lanczos vector; by default ``20 rank``.
        sketched_length: Whether to measure ``L`` itself by its sketch, too.
        seed: Of the map and of the random vector.
        map: A family of random maps from `scodkit.sketch`.
        parameters: Which weights, as for `Monitor`.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Not used.

    Examples:
        >>> from scodkit import Gaussian
        >>> from torch import nn
        >>> method = SketchedLanczos(nn.Linear(2, 1, bias=False), Gaussian(), rank=1)
        >>> method = method.fit([torch.tensor([[1.0, 0.0], [2.0, 0.0]])], progress=False)
        >>> method.score(torch.tensor([[3.0, 0.0], [3.0, 4.0]]))
        tensor([ 0., 16.])
    """

    learnt: ClassVar = ("basis", "passes")

    rank: int = 50
    size: int | None = None
    sketched_length: bool = False
    seed: int = 0
    map: Map = SparseSign()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.map, Mapping):  # as a saved file describes it
            self.map = documents.build(self.map, Map)
        check_map(self.map, self.seed)
        if self.size is None:
            self.size = _SIZE_PER_RANK * self.rank
        if not 1 <= self.rank <= self.size:
            raise OptionError(
                f"expected 1 <= rank <= size, got rank={self.rank}, size={self.size}; type "
                f"size={_SIZE_PER_RANK * max(1, self.rank)} or leave it out"
            )

    def _learn(self, data: TrainingData) -> State:
        data.check_repeatable("SketchedLanczos")
        example = data.first()
        num_parameters = self._parameters_beyond(self.rank, example).num_parameters
        fisher = _Fisher(data, self._source(example))
        generator = torch.Generator().manual_seed(self.seed)
        start = torch.randn(num_parameters, dtype=torch.float64, generator=generator)
        start = fisher.times(start.to(self._network.device))
        precision = torch.finfo(fisher.dtype).eps
        sketch = self._sketch(num_parameters)
        sketches = start.new_zeros(self.rank, min(sketch.shape))
        for i, vector in enumerate(lanczos_vectors(fisher.times, start, self.rank, precision)):
            sketches[i] = sketch.of(vector[None], 0)[0]
        basis = _orthonormal(sketches.mT, math.sqrt(precision))
        return {"basis": basis, "passes": torch.tensor([fisher.passes])}

    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        sketch = self._sketch(self._parameters(call).num_parameters)

        def outside(factors: Factors) -> Tensor:
            total, sketched, inside = sketch.lengths(factors, state["basis"])
            return (sketched if self.sketched_length else total) - inside

        output, score = over_pieces(self._source(call), call, outside)
        return output, score.clamp_min(0)

    def _sketch(self, num_parameters: int) -> _Sketch:
        assert self.size is not None
        return _Sketch(self.map, (num_parameters, self.size), self.seed)

    def _options(self) -> Mapping[str, Any]:
        return {**super()._options(), "map": documents.describe(self.map)}


@dataclass(frozen=True)
class _Sketch:
    """``S``, which keeps squared lengths on average; the identity where it would be as large.

    Args:
        mapping: The family of maps.
        shape: ``(N, s)``.
        seed: Which map of the family.
    """

    mapping: Map
    shape: tuple[int, int]
    seed: int

    @property
    def is_identity(self) -> bool:
        return self.shape[1] >= self.shape[0]

    def of(self, rows: Tensor, first: int) -> Tensor:
        """Return ``S`` times some columns of rows.

        Args:
            rows: ``(R, n)``.
            first: Where these columns sit among the ``N``.

        Returns:
            ``(R, s)`` in float64; of the identity ``rows``, where there are all ``N`` columns.
        """
        if self.is_identity:
            return rows.double()
        num_parameters, size = self.shape
        total = rows.new_zeros(len(rows), size, dtype=torch.float64)
        step = max(1, (_CHUNK_ON_GPU if rows.is_cuda else _CHUNK) // size)
        for start in range(0, rows.shape[1], step):
            part = rows[:, start : start + step]
            where = first + start
            # not cached: the whole map would take more memory than the vectors it sketches
            total += part @ self.mapping.rows(
                where, where + part.shape[1], self.shape, self.seed, part
            )
        return total * math.sqrt(num_parameters / size)  # the map's columns have unit length

    def lengths(self, factors: Factors, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``|L|_F^2``, ``|S L|_F^2`` and ``|Q^T S L|_F^2``, each ``(b,)`` in float64.

        Args:
            factors: Rows in weight space.
            basis: ``Q``, ``(s, k)``.
        """
        if self.is_identity:
            total, along = factors.project(basis)
            return total, total, along.square().sum((1, 2))
        sums = Sums()
        for columns, rows in factors.blocks():
            part = self.of(rows.flatten(0, 1), columns.start)
            sums.add(squared_norms(rows), part.reshape(*rows.shape[:2], -1))
        total, sketched = sums.result
        inside = (sketched @ basis).square().sum((1, 2))
        return total, sketched.square().sum((1, 2)), inside


class _Fisher:
    """Products with the sum of ``L_i L_i^T`` over the training data.

    Args:
        data: Read once for each product; only once if the cache holds all factors.
        source: Turns batches into factors; its budget is the size of the cache in bytes.

    Attributes:
        passes: How often the data was read so far.
        dtype: Of the factors; float64 before the first.
    """

    def __init__(self, data: TrainingData, source: FactorSource) -> None:
        self._data, self._source = data, source
        self._free_bytes = source.budget
        self._cache: list[_Blocks] | None = []  # None once the budget is exceeded
        self._products: ProductSource | None = None  # used then, where it can be trusted
        self._spread: float | None = None  # of all outputs, around the mean of the first batch
        self._centre: Tensor | None = None
        self.passes = 0
        self.dtype = torch.float64

    def times(self, vector: Tensor) -> Tensor:
        """Return the product with a vector ``(N,)``, both in float64.

        Raises:
            NonFiniteError: If a sample has a NaN or an infinity.
            NondeterministicError: If the data is not what it was in the first pass.
        """
        product = torch.zeros_like(vector)
        if self.passes and self._cache is not None:
            for blocks in self._cache:
                self._add_rows(blocks, vector, product)
            return product
        # read after the pass: on a GPU each read is a synchronisation
        finite = torch.ones((), dtype=torch.bool, device=vector.device)
        squares = torch.zeros((), dtype=torch.float64, device=vector.device)
        for call in self._data.calls():
            add = self._add_by_rows if self._products is None else self._add_by_products
            output = add(call, vector, product)
            finite &= finite_samples(call, output).all()
            if self._centre is None:  # a large common offset would hide differences
                self._centre = output.double().mean()
            squares += (output - self._centre).square().sum()
        self.passes += 1
        if not bool(finite & product.isfinite().all()):
            raise NonFiniteError(
                "expected finite training data, got a NaN or an infinity in a sample or in "
                "what the model makes of it; mend or remove that sample"
            )
        spread = float(squares)
        first = self._spread = spread if self._spread is None else self._spread
        if abs(spread - first) > _SAME_OUTPUTS * first:
            raise NondeterministicError(
                f"expected the same data in every pass, but the spread of the outputs was "
                f"{first:.6g} in the first and {spread:.6g} in a later one; switch random "
                "augmentation, and dropping of a last batch, off"
            )
        return product

    def _add_by_rows(self, call: Inputs, vector: Tensor, product: Tensor) -> Tensor:
        """Add a batch's share to a product, by its factors, and cache these if they fit.

        Returns:
            The model's output for the batch.
        """
        outputs: dict[int, Tensor] = {}
        had_room = self._cache is not None
        for piece in self._source.pieces(call, hold=True):
            outputs[piece.samples.start] = piece.output
            blocks = [(at, rows.flatten(0, 1)) for at, rows in piece.factors.blocks()]
            self._add_rows(blocks, vector, product)
            self._free_bytes -= sum(rows.nbytes for _, rows in blocks)
            if self._cache is None or self._free_bytes < 0:
                self._cache = None
            else:
                self._cache.append(blocks)
        if had_room and self._cache is None:
            self._products = self._trusted(call)
        return torch.cat(list(outputs.values()))

    def _add_rows(self, blocks: _Blocks, vector: Tensor, product: Tensor) -> None:
        self.dtype = blocks[0][1].dtype
        rounded = vector.to(self.dtype)
        along = torch.stack([rows @ rounded[at] for at, rows in blocks]).double().sum(0)
        for at, rows in blocks:
            product[at] += along.to(self.dtype) @ rows

    def _trusted(self, call: Inputs) -> ProductSource | None:
        """Return how to multiply without rows; None where that cannot be trusted."""
        engine, likelihood = self._source.engine, self._source.likelihood
        # drawn rows are few; in half precision a vector would lose too many digits
        if likelihood.draws or self.dtype not in (torch.float32, torch.float64):
            return None
        network, parameters = engine.network, engine.parameters
        if choose_jacobian(network, parameters, call)[0] is None:
            return None
        # one after the other: there is a single vector
        source = ProductSource(network, parameters, False, likelihood, 1, self._source.budget)
        return replace(source, memory=source.counted(call))

    def _add_by_products(self, call: Inputs, vector: Tensor, product: Tensor) -> Tensor:
        """Add a batch's share to a product, forward through the network and back.

        Returns:
            The model's output for the batch.
        """
        source, outputs = self._products, []
        assert source is not None
        step = source.portions(call.batch_size).samples
        for start in range(0, call.batch_size, step):
            samples = call.samples(slice(start, start + step))
            jacobian = Jacobian(source.network, source.parameters, samples)
            along = jacobian.push(vector.to(self.dtype)[None]).transpose(0, 1)
            weighted = source.likelihood.curvature_times(jacobian.output, along)
            for at, part in jacobian.pull(weighted.transpose(0, 1)):
                product[at] += part.flatten()
            outputs.append(jacobian.output)
        return torch.cat(outputs)


def _orthonormal(vectors: Tensor, cutoff: float) -> Tensor:
    """Return an orthonormal basis of the columns, without singular values below a cutoff."""
    basis, lengths, _ = tall_svd(vectors)  # GPU libraries have no SVD of millions of rows
    independent: Tensor = basis[:, lengths > cutoff * lengths[:1]]
    return independent.contiguous()


def lanczos_vectors(
    times: Callable[[Tensor], Tensor], start: Tensor, steps: int, precision: float
) -> Iterator[Tensor]:
    """Yield an orthonormal basis of ``span(b, A b, A^2 b, ...)``, vector by vector.

    Each is made orthogonal to the two before it, which in exact arithmetic is enough. With
    rounding, later vectors may repeat directions of the first ones that have converged.

    Args:
        times: Multiplies ``A (N, N)`` with a vector; called once between two vectors.
        start: ``b``, ``(N,)``; if it is zero there are no vectors.
        steps: How many vectors at most; fewer where they span all that ``A`` can reach.
        precision: Of the products, relative.

    Yields:
        Unit vectors ``(N,)``, to be used before the next one is asked for.
    """
    length = float(start.norm())
    if not length:
        return
    latest = [start / length]
    reach = 0.0
    yield latest[-1]
    for _ in range(steps - 1):
        image = times(latest[-1])
        reach = max(reach, float(image.norm()))
        for _ in range(2):  # once more, for what rounding left
            for vector in latest:
                image = image - torch.dot(vector, image) * vector
        length = float(image.norm())
        if length <= 64 * precision * reach:  # nothing but rounding
            return
        latest = [latest[-1], image / length]
        yield latest[-1]
