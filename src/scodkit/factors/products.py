"""Matrix-free products with the curvature of a batch, within a memory budget.

``C = sum_i J_i^T F_theta_i J_i`` times a few columns takes one Jacobian-vector product each,
the output's Fisher information in closed form, and one backward pass: whatever the number of
outputs, and without per-sample gradients.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from scodkit.errors import NonFiniteError
from scodkit.factors.live_bytes import COUNTED_SIZES, Memory
from scodkit.factors.pieces import check_alone, check_some_alone, distinct, finite_samples
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs, ordinary
from scodkit.model.network import Network, differentiable_attention
from scodkit.model.parameters import ParameterSet
from scodkit.numerics.matmul import sum_dtype

# samples of a batch that are compared alone, and whose operations are counted
_ALONE = 2
_COUNTED = 2


@dataclass(frozen=True)
class Curvature:
    """``C = sum_i L_i L_i^T`` over samples, as a matrix-free operator.

    Args:
        jacobian: Of the network at those samples.
        likelihood: Of the output; gives its Fisher information.
        columns_at_once: Columns that fit into memory at a time.
    """

    jacobian: Jacobian
    likelihood: Likelihood
    columns_at_once: int

    @property
    def num_data(self) -> int:
        """Number of samples."""
        return len(self.jacobian.output)

    @property
    def num_rows(self) -> int:
        """Number of rows the factors of the samples would have: a bound on the rank."""
        return self.num_data * self.likelihood.num_directions(self.jacobian.output.shape[1:])

    def add_times(self, vectors: Tensor, total: Tensor) -> Tensor:
        """Add ``C v`` to the columns of a matrix, in place.

        Args:
            vectors: Vectors ``v`` in weight space, ``(t, N)``.
            total: The matrix to add to, ``(N, t)``.

        Returns:
            The sum of all ``v . C v``, a scalar in float64.

        Raises:
            NonFiniteError: If the products overflow; nothing is added then.
        """
        jacobian = self.jacobian
        along = jacobian.push(vectors).transpose(0, 1)
        weighed = self.likelihood.curvature_times(jacobian.output, along)
        trace: Tensor = torch.linalg.vecdot(along, weighed).double().sum()
        pulled = list(jacobian.pull(weighed.transpose(0, 1)))
        if not _are_finite(trace, *(rows for _, rows in pulled)):
            raise NonFiniteError(
                "expected finite products with the curvature, but they overflow in "
                f"{vectors.dtype}; type fit(..., products=False), or monitor a model in float64"
            )
        for columns, rows in pulled:  # shaped like the weights: flattening would copy
            total[columns].view(*rows.shape[1:], len(rows)).add_(rows.movedim(0, -1))
        return trace


@dataclass(frozen=True)
class ProductPiece:
    """A slice of a batch's samples with their curvature.

    Args:
        samples: The slice of the batch.
        finite: ``(b,)``, False where an input or the output has a NaN or an infinity.
        good: ``(b,)``, False where an input, the output or a gradient has one.
        curvature: Of the good samples; None if there are none.
    """

    samples: slice
    finite: Tensor
    good: Tensor
    curvature: Curvature | None


@dataclass(frozen=True)
class Portions:
    """How a batch is split to fit a memory budget.

    Args:
        samples: Samples at a time.
        columns: Columns at a time.
        bytes: Memory for these together.
    """

    samples: int
    columns: int
    bytes: int

    @staticmethod
    def of(memory: Memory, budget: int, batch_size: int, columns: int) -> Portions:
        """Return the largest portions, at least one sample and one column.

        Args:
            memory: Of samples with a column each.
            budget: Bytes to stay within.
            batch_size: Samples in a batch.
            columns: Number of columns ``T``.
        """
        # half of the memory for samples, or there might be none for columns
        samples = min(memory.most_samples(budget // 2, 1), max(1, batch_size))
        width = min(memory.most_vectors(budget, samples), columns)
        return Portions(samples, width, memory.at(samples, width))


@dataclass(frozen=True)
class ProductSource:
    """The curvature operators of batches: model, weights, likelihood and memory budget.

    Args:
        network: The model.
        parameters: The chosen weights.
        together: Whether products are vectorised over columns.
        likelihood: Of the output; gives its Fisher information.
        columns: Number of columns ``T`` to multiply with.
        budget: Bytes to stay within.
        memory: Of samples and columns; None for one sample at a time.
        checked: Batch sizes at which samples are known not to interact.
    """

    network: Network
    parameters: ParameterSet
    together: bool
    likelihood: Likelihood
    columns: int
    budget: int
    memory: Memory | None = None
    checked: set[int] = field(default_factory=set, compare=False)

    def of(self, network: Network) -> ProductSource:
        """Return a copy for the same model, run in another precision."""
        return replace(self, network=network)

    def pieces(self, call: Inputs) -> Iterator[ProductPiece]:
        """Split a batch into pieces that fit into memory.

        Args:
            call: The batch.

        Yields:
            The pieces, in order. A non-finite sample is left out of its piece's curvature: it
            would spoil the whole sum.
        """
        portions = self.portions(call.batch_size)
        for start in range(0, call.batch_size, portions.samples):
            samples = slice(start, min(start + portions.samples, call.batch_size))
            part = call.samples(samples)
            whole = self._at(part)
            self._check(part, whole)
            finite = finite_samples(part, whole.output)
            good, jacobian = self._good(part, whole, finite)
            del whole  # and with it the graph of non-finite samples
            curvature = None
            if jacobian is not None:
                curvature = Curvature(jacobian, self.likelihood, portions.columns)
            yield ProductPiece(samples, finite, good, curvature)

    def _check(self, call: Inputs, jacobian: Jacobian) -> None:
        """Refuse models whose samples interact, on the first batch of each size."""
        if call.batch_size == 1 or call.batch_size in self.checked:
            return
        proves = check_some_alone(self.network, call, jacobian.output, _ALONE)
        # the same for directional derivatives, along a direction in weight space
        generator = torch.Generator().manual_seed(call.batch_size)
        direction = torch.randn(1, self.parameters.num_parameters, generator=generator)
        direction = direction.to(jacobian.output)
        indices = distinct(call, _ALONE)
        alone = [self._at(call.samples(slice(i, i + 1))).push(direction)[0] for i in indices]
        check_alone(self.network, jacobian.push(direction)[0][indices], torch.cat(alone))
        if proves:
            self.checked.add(call.batch_size)

    def portions(self, batch_size: int) -> Portions:
        """Return how batches of a size are split."""
        if self.memory is None:
            # a column, its product and a temporary; each portion costs passes of every sample
            column = 3 * self.parameters.num_parameters * torch.float64.itemsize
            width = min(self.columns, max(1, self.budget // column))
            return Portions(1, width, width * column)
        return Portions.of(self.memory, self.budget, batch_size, self.columns)

    def counted(self, call: Inputs) -> Memory | None:
        """Return the memory of products, measured on a few samples and columns.

        Args:
            call: A batch, of which the first samples are run.

        Returns:
            None if the model cannot be run under a dispatch mode.
        """
        size, device = self.parameters.num_parameters, self.network.device
        # the sketch's dtype: the model's first weights may be frozen, in half precision
        dtype = sum_dtype(*self.parameters.weights(self.network.model).values())
        total = torch.zeros(size, max(COUNTED_SIZES), dtype=dtype, device=device)

        def run(samples: int, columns: int) -> None:
            curvature = Curvature(self._at(call.first(samples)), self.likelihood, columns)
            with contextlib.suppress(NonFiniteError):  # raised after all memory is allocated
                curvature.add_times(total.new_ones(columns, size), total[:, :columns])

        return Memory.counted(run)

    def _at(self, call: Inputs) -> Jacobian:
        return Jacobian(self.network, self.parameters, call, self.together)

    def _good(
        self, call: Inputs, jacobian: Jacobian, finite: Tensor
    ) -> tuple[Tensor, Jacobian | None]:
        """Return which samples have finite gradients, and the Jacobian at these, if any."""
        if bool(finite.all()) and self._is_smooth(jacobian):
            return finite, jacobian
        good = finite.clone()
        for i in finite.nonzero().flatten().tolist():
            good[i] = self._is_smooth(self._at(call.samples(slice(i, i + 1))))
        if not bool(good.any()):
            return good, None
        return good, self._at(call.map(lambda t: t[good]))

    def _is_smooth(self, jacobian: Jacobian) -> bool:
        """Return whether a Jacobian is finite, in the forward and the backward direction."""
        size = self.parameters.num_parameters
        along = jacobian.push(jacobian.output.new_ones(1, size))
        back = (rows for _, rows in jacobian.pull(torch.ones_like(along)))
        return _are_finite(along, *back)


def _are_finite(*tensors: Tensor) -> bool:
    largest = [torch.linalg.vector_norm(t, torch.inf).double() for t in tensors]
    return bool(torch.stack(largest).amax() < torch.inf)


@dataclass(frozen=True)
class Passes:
    """Cost of one sample.

    Args:
        forward: Floating-point operations of a forward pass.
        backward: Floating-point operations of a backward pass to the chosen weights; a
            Jacobian-vector product costs as many beyond its forward pass.
    """

    forward: int
    backward: int


def count_passes(network: Network, parameters: ParameterSet, call: Inputs) -> Passes:
    """Return the operations of a forward and a backward pass, counted by running each once.

    Matrix products and convolutions are counted, other operations are not.

    Args:
        network: The model, in eval mode.
        parameters: The chosen weights.
        call: A batch, of which the first samples are run.
    """
    few = call.samples(slice(0, _COUNTED))
    with FlopCounterMode(display=False) as forward:
        jacobian = Jacobian(network, parameters, few)
        rows = torch.ones_like(jacobian.output).flatten(1)[None]
    with FlopCounterMode(display=False) as backward:
        list(jacobian.pull(rows))
    return Passes(
        forward=forward.get_total_flops() // few.batch_size,
        # every weight is multiplied at least once
        backward=max(
            backward.get_total_flops() // few.batch_size, 2 * parameters.num_parameters
        ),
    )


class Jacobian:
    """A network linearised at one batch: its output, its Jacobian and the transpose of that.

    The cost of a product does not depend on the number of outputs, and no per-sample gradient
    is ever formed.

    Args:
        network: The model, in eval mode.
        parameters: The chosen weights.
        call: The batch.
        together: Whether products are vectorised over vectors (`vmap`); one vector at a time
            otherwise, for models that cannot be vectorised.
    """

    def __init__(
        self, network: Network, parameters: ParameterSet, call: Inputs, together: bool = False
    ) -> None:
        self._network = network
        self._parameters = parameters
        self._call = call
        self._together = together
        # separate leaves; the other weights are detached, so that no graph leads to them
        self._weights = {
            name: weight.requires_grad_()
            for name, weight in parameters.weights(network.model).items()
        }
        self._others = {
            name: ordinary(weight.detach())
            for name, weight in network.model.named_parameters()
            if name not in self._weights
        }

    @functools.cached_property
    def _graph(self) -> Tensor:
        return self._output_at(self._weights)

    @functools.cached_property
    def output(self) -> Tensor:
        """The model's output, ``(B, *shape)``, detached."""
        return self._graph.detach()

    def push(self, tangents: Tensor) -> Tensor:
        """Return ``J_i v`` for every vector ``v`` and sample ``i``, by forward-mode autograd.

        Args:
            tangents: Vectors in weight space, ``(t, N)``.

        Returns:
            ``(t, B, d)``, detached.
        """

        def along(tangent: dict[str, Tensor]) -> Tensor:
            pushed: Tensor = jvp(self._output_at, (self._weights,), (tangent,))[1]
            return pushed.flatten(1)

        named = {
            b.name: tangents[:, b.columns]
            .reshape(len(tangents), *b.shape)
            .to(self._weights[b.name].dtype)
            for b in self._parameters.blocks
        }
        _load_forward_mode()
        with torch.no_grad():
            if self._together:
                pushed: Tensor = vmap(along)(named)
                return pushed
            count = range(len(tangents))
            return torch.stack([along({n: t[i] for n, t in named.items()}) for i in count])

    def pull(self, cotangents: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Return ``sum_i J_i^T r_i`` for every vector, which has a row ``r_i`` per sample.

        Args:
            cotangents: Vectors at the flattened output, ``(t, B, d)``.

        Yields:
            Ranges of columns with their part of the sums, ``(t, *shape of the parameter)``.
            Weights that the output does not depend on are left out: their part is zero.
        """
        if not self._graph.requires_grad:
            return
        shaped = cotangents.reshape(len(cotangents), *self._graph.shape)
        if self._together:
            pulled = self._gradients(shaped)
        else:
            by_weight = zip(*map(self._gradients, shaped), strict=True)
            pulled = [None if parts[0] is None else torch.stack(parts) for parts in by_weight]
        for block, gradient in zip(self._parameters.blocks, pulled, strict=True):
            if gradient is not None and gradient.numel():
                yield block.columns, gradient

    def _output_at(self, weights: dict[str, Tensor]) -> Tensor:
        with differentiable_attention():
            return self._network.at({**self._others, **weights}, self._call)

    def _gradients(self, rows: Tensor) -> list[Tensor | None]:
        """Return the gradients of the weights for rows at the output, batched if vectorised."""
        gradients = torch.autograd.grad(
            self._graph,
            list(self._weights.values()),
            rows,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=self._together,
        )
        return [None if g is None else g.detach().to_dense() for g in gradients]


@functools.cache
def _load_forward_mode() -> None:
    """Load torch's forward-mode rules, which emit deprecation warnings about torch itself."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):  # of torch 2.13, of 2.15
            warnings.filterwarnings("ignore", category=category)
        jvp(torch.exp, (torch.zeros(1),), (torch.ones(1),))
