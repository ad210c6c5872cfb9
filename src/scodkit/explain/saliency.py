"""Which parts of an input a score responds to: its derivative by the input."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.func import vjp, vmap

from scodkit.errors import BatchError, EngineFallbackWarning, OptionError, first_line
from scodkit.explain import plots
from scodkit.factors import FactorSource, row_bytes
from scodkit.factors.pieces import finite_samples
from scodkit.likelihoods import Likelihood
from scodkit.model.network import Inputs, Network, differentiable_attention, ordinary
from scodkit.model.parameters import ParameterSet
from scodkit.scoring import score as scoring
from scodkit.scoring.score import Energies
from scodkit.sketch.eigenbasis import Eigenbasis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Weights: TypeAlias = Mapping[str, Tensor]

# samples taken both at once and alone before all are taken at once, and by how much their
# slopes may differ
_TRIED = 2
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_TOLERANCE_HALF = 1e-1


@dataclass(frozen=True)
class Saliency:
    """The slopes of scores in the numbers of their inputs.

    A slope says what the score would do if one number of the input changed a little; not why
    the input is atypical as a whole.

    Args:
        gradient: d score / d input, of the input's shape ``(B, *shape)``; signed: positive
            where a larger number would raise the score; nats (squared units) per unit of the
            input. NaN for samples with a NaN or an infinity.
        input: Where the slopes were taken, ``(B, *shape)``.

    Examples:
        >>> saliency = Saliency(torch.tensor([[2.0, -1.0]]), torch.tensor([[0.3, 0.5]]))
        >>> saliency.gradient[0].argmax().item()
        0
    """

    gradient: Tensor
    input: Tensor

    def plot(self, sample: int = 0) -> Figure:
        """Return an image beside a map of its slopes, or bars for the numbers of a vector.

        Args:
            sample: Which sample of the batch. Images are ``(C, H, W)`` or ``(H, W)``; slopes
                are summed over channels.
        """
        return plots.figure_of(self.panels(sample), 5.6, 2.6)

    def panels(self, sample: int) -> list[plots.Panel]:
        """Return the panels of `plot`, for a figure with others.

        Args:
            sample: As in `plot`.
        """
        gradient = plots.row(self.gradient, sample)
        plots.check_finite(gradient, sample)
        if gradient.ndim == 1:
            return [plots.slopes(gradient)]
        image = plots.row(self.input, sample)
        return [plots.image(image, "input"), plots.slope_map(gradient)]


def differentiable_score(
    network: Network,
    parameters: ParameterSet,
    likelihood: Likelihood,
    basis: Eigenbasis,
    prior_scale: float,
    call: Inputs,
) -> Tensor:
    """Return scores with a graph to those tensors of the call that require gradients.

    What `Monitor.score` returns, up to rounding, but slower and with a graph as large as the
    rows in weight space of all samples: for derivatives by the inputs alone. No weight of the
    model is part of the graph.

    Args:
        network: The model.
        parameters: The chosen weights.
        likelihood: Says which rows count; without random draws.
        basis: The eigenbasis, on the model's device.
        prior_scale: ``eps``, the standard deviation of the prior of a weight.
        call: The batch.

    Returns:
        ``(B,)`` in float64, nats (squared units), >= 0, larger = more atypical; infinite for
        samples with a NaN or an infinity. Warns with `EngineFallbackWarning` where the model
        has to be taken one sample after the other.

    Raises:
        OptionError: If the likelihood draws at random: with the input the draws would jump.

    Examples:
        >>> from torch import nn
        >>> from scodkit import Gaussian, Monitor
        >>> from scodkit.model.parameters import select
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> x = torch.randn(9, 2)
        >>> monitor = Monitor(net, Gaussian(), rank=5).fit([x], progress=False)
        >>> network, call = Network(net), Inputs((x.clone().requires_grad_(),), {})
        >>> parameters = select("all", network, call)
        >>> score = differentiable_score(
        ...     network, parameters, Gaussian(), monitor.basis, 1.0, call
        ... )
        >>> torch.allclose(score.float(), monitor.score(x), rtol=1e-4)
        True
        >>> torch.autograd.grad(score.sum(), call.args)[0].shape
        torch.Size([9, 2])
    """
    return _Scores(network, parameters, likelihood, basis, prior_scale)(call)


def saliency_of(
    source: FactorSource, call: Inputs, basis: Eigenbasis, prior_scale: float
) -> Saliency:
    """Return the derivative of each sample's score by its input.

    Args:
        source: Says which model, weights and likelihood; its budget sets how many samples are
            taken at a time.
        call: The batch, with one floating-point tensor in it.
        basis: The eigenbasis, on the model's device.
        prior_scale: ``eps``, the standard deviation of the prior of a weight.

    Returns:
        The derivative; the model and the batch are left as they were.

    Raises:
        BatchError: If there is no floating-point tensor in the call, or more than one.

    Examples:
        >>> from torch import nn
        >>> from scodkit import Gaussian, Monitor
        >>> from scodkit.factors import HookEngine
        >>> from scodkit.model.parameters import select
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> x = torch.randn(9, 2)
        >>> basis = Monitor(net, Gaussian(), rank=5).fit([x], progress=False).basis
        >>> network, call = Network(net), Inputs((x,), {})
        >>> engine = HookEngine(network, select("all", network, call))
        >>> source = FactorSource(engine, Gaussian(), (1,), 2**20)
        >>> saliency_of(source, call, basis, 1.0).gradient.shape
        torch.Size([9, 2])
    """
    network, parameters = source.engine.network, source.engine.parameters
    inputs = _floating_point_input(call)
    one_sample = max(1, source.directions) * row_bytes(network, parameters)
    step = max(1, source.budget // one_sample)
    scores = _Scores(network, parameters, source.likelihood, basis, prior_scale)
    gradients = [inputs[:0].detach()]
    with network.evaluating():
        for start in range(0, call.batch_size, step):
            some = call.samples(slice(start, start + step)).map(_leaf)
            leaf, score = _floating_point_input(some), scores(some)
            gradient = torch.zeros_like(leaf)
            if score.requires_grad:  # not where the model sees no more than signs of numbers
                (gradient,) = torch.autograd.grad(score.sum(), leaf, materialize_grads=True)
            gradients.append(_filled(gradient, ~score.isfinite(), torch.nan))
    return Saliency(torch.cat(gradients), inputs.detach())


@dataclass
class _Scores:
    """Scores as functions of the inputs: of all samples at once, where that can be trusted.

    Args:
        network: The model.
        parameters: The chosen weights.
        likelihood: Says which rows count.
        basis: The eigenbasis, on the model's device.
        prior_scale: ``eps``.
        at_once: Whether samples are taken all at once; None before the first finite ones.

    Raises:
        OptionError: If the likelihood draws at random.
    """

    network: Network
    parameters: ParameterSet
    likelihood: Likelihood
    basis: Eigenbasis
    prior_scale: float
    at_once: bool | None = None

    def __post_init__(self) -> None:
        if self.likelihood.draws:
            raise OptionError(
                f"expected a likelihood without random draws, got {self.likelihood}, whose "
                "scores jump with the draws; type saliency=False"
            )

    def __call__(self, call: Inputs) -> Tensor:
        """Return the scores of a batch, ``(B,)`` in float64."""
        with self.network.evaluating(), differentiable_attention():
            # without graphs of their own: gradients are to go to the inputs only
            named = self.network.model.named_parameters()
            weights = {name: ordinary(parameter.detach()) for name, parameter in named}
            output = self.network.at(weights, call.map(torch.clone))
            finite = finite_samples(call, output.detach())
            rows = self.likelihood.factor(_filled(output, ~finite, 0.0))
            if self.at_once is None and finite.any():
                some = finite.nonzero()[:_TRIED, 0]
                few = call.map(lambda t: t[some])
                with self.network.in_full_precision():  # TF32 rounds to 1e-3
                    self.at_once = self._passes(weights, few, rows[some])
            pull_back = self._together if self.at_once else self._one_by_one
            energies = pull_back(weights, call, rows)
            score = scoring.score(energies, self.basis, self.prior_scale)
        return torch.where(finite & score.isfinite(), score, torch.inf)

    def _passes(self, weights: Weights, few: Inputs, rows: Tensor) -> bool:
        """Return whether samples taken at once have the slopes plain autograd gives them.

        Some of torch's own functions have not: layer norm, as of torch 2.13.

        Raises:
            OptionError: If plain autograd has none.
        """
        few, rows = few.map(_leaf), rows.detach().requires_grad_()
        leaves = [tensor for tensor in (*few.tensors(), rows) if tensor.requires_grad]
        try:
            expected = _slopes(self._one_by_one(weights, few, rows), leaves)
        except RuntimeError as error:
            raise OptionError(
                "expected a model that torch can differentiate twice, but it raised "
                f"{first_line(error)}; type saliency=False"
            ) from error
        try:
            off = _distance(_slopes(self._together(weights, few, rows), leaves), expected)
            reason = f"all at once they differ from plain autograd's by {off:.1e} relative"
        except Exception as error:  # whatever a third-party module raises under a transform
            off = torch.inf
            reason = f"all at once it raised {first_line(error)}"
        if off <= _TOLERANCE.get(rows.dtype, _TOLERANCE_HALF):
            return True
        warnings.warn(
            f"{type(self.network.model).__name__} is differentiated one sample after the "
            f"other, for the right slopes, more slowly; {reason}",
            EngineFallbackWarning,
            stacklevel=2,
        )
        return False

    def _together(self, weights: Weights, call: Inputs, rows: Tensor) -> Energies:
        """Return the energies of rows ``(B, p, d)`` at the output, by function transforms."""

        def of_one(tensors: list[Tensor], sample_rows: Tensor) -> tuple[Tensor, Tensor]:
            def output_at(chosen: Weights) -> Tensor:
                at = {**weights, **chosen}
                # clones: the model may begin with an in-place function
                args, kwargs = call.with_tensors([t[None].clone() for t in tensors])
                return self.network.at_raw(at, args, kwargs, 1)[0].flatten()

            chosen = {name: weights[name] for name in self.parameters.names}
            pull = vjp(output_at, chosen)[1]
            return self._reduced(vmap(lambda row: pull(row)[0])(sample_rows))

        return Energies(*vmap(of_one)(call.tensors(), rows))

    def _one_by_one(self, weights: Weights, call: Inputs, rows: Tensor) -> Energies:
        """Return the same by plain autograd: slow, and obviously right."""
        has_slopes = any(tensor.requires_grad for tensor in (*call.tensors(), rows))
        names = self.parameters.names
        chosen = {name: weights[name].detach().requires_grad_() for name in names}
        reduced = []
        for i, sample_rows in enumerate(rows):
            sample = call.samples(slice(i, i + 1)).map(torch.clone)
            output = self.network.at({**weights, **chosen}, sample).flatten()
            pulled = [
                torch.autograd.grad(
                    output,
                    list(chosen.values()),
                    grad_outputs=row,
                    retain_graph=True,
                    create_graph=has_slopes,
                    materialize_grads=True,
                )
                for row in sample_rows
            ]
            stacked = (torch.stack(parts) for parts in zip(*pulled, strict=True))
            reduced.append(self._reduced(dict(zip(names, stacked, strict=True))))
        return Energies(*(torch.stack(parts) for parts in zip(*reduced, strict=True)))

    def _reduced(self, pulled: Weights) -> tuple[Tensor, Tensor]:
        """Return ``|L|_F^2`` and ``|u_j^T L|^2`` ``(k,)`` from rows ``(p, *shape)`` by name."""
        norms, along = [], []
        for block in self.parameters.blocks:
            rows = pulled[block.name].flatten(1)
            vectors = self.basis.vectors[block.columns].to(rows.device)
            wide = torch.promote_types(rows.dtype, vectors.dtype)
            norms.append(rows.square().sum(dtype=torch.float64))
            along.append((rows.to(wide) @ vectors.to(wide)).double())
        return torch.stack(norms).sum(0), torch.stack(along).sum(0).square().sum(0)


def _slopes(energies: Energies, leaves: list[Tensor]) -> list[Tensor]:
    """Return derivatives of what scores are made of, without a difference of near-equals."""
    for leaf in leaves:
        leaf.grad = None
    # not torch.autograd.grad: it passes over functions marked as differentiable once only
    torch.autograd.backward(energies.total.sum() - 0.5 * energies.along.sum())
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def _distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative distance of any slopes; NaN if one is."""
    tiny = torch.finfo(torch.float64).tiny
    pairs = [(a.double(), b.double()) for a, b in zip(actual, expected, strict=True)]
    return float(torch.stack([(a - b).norm() / (b.norm() + tiny) for a, b in pairs]).max())


def _floating_point_input(call: Inputs) -> Tensor:
    inputs = [tensor for tensor in call.tensors() if tensor.is_floating_point()]
    if len(inputs) == 1:
        return inputs[0]
    kinds = ", ".join(f"{tuple(t.shape)} of {t.dtype}" for t in call.tensors())
    advice = (
        "a score has no slope in whole numbers: type saliency=False"
        if not inputs
        else "for several call scodkit.explain.differentiable_score and torch.autograd.grad"
    )
    raise BatchError(
        f"expected one floating-point tensor among the model's inputs, got {kinds}; {advice}"
    )


def _leaf(tensor: Tensor) -> Tensor:
    leaf = ordinary(tensor).detach()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def _filled(tensor: Tensor, where: Tensor, value: float) -> Tensor:
    """Return a tensor ``(B, ...)`` with a value in place of some samples, ``(B,)``."""
    return tensor.masked_fill(where.view(-1, *(1,) * (tensor.ndim - 1)), value)
