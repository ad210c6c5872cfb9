"""Which parts of an input a score responds to: its derivative with respect to the input."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scodkit.errors import BatchError, EngineFallbackWarning, OptionError, first_line
from scodkit.explain import plots
from scodkit.factors.alone import AloneEngine, FunctionalEngine, LoopEngine
from scodkit.factors.engine import Linearization, row_bytes
from scodkit.factors.pieces import (
    FactorSource,
    fill_samples,
    finite_samples,
    pick,
    relative_distance,
    tolerance,
)
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs, ordinary
from scodkit.model.network import Network, differentiable_attention
from scodkit.model.parameters import ParameterSet
from scodkit.scoring import score as scoring
from scodkit.scoring.energies import Energies
from scodkit.sketch.eigenbasis import Eigenbasis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# samples taken both at once and alone before all are taken at once
_TRIED = 2


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
        names: Of the columns of a table; none for other inputs.
        spread: Of each column in the training data, ``(n,)``, if they are known.

    Examples:
        >>> saliency = Saliency(torch.tensor([[2.0, -1.0]]), torch.tensor([[0.3, 0.5]]))
        >>> saliency.gradient[0].argmax().item()
        0
    """

    gradient: Tensor
    input: Tensor
    names: tuple[str, ...] = ()
    spread: Tensor | None = None

    @property
    def unit(self) -> str:
        """Unit of the slopes that are shown: of columns they are compared by their spreads."""
        return "nats per unit" if self.spread is None else "nats per spread"

    def steepest(self, sample: int = 0, top: int = 5) -> dict[str, float]:
        """Return the steepest slopes of a sample, in `unit`, by their place in the input.

        Args:
            sample: Which sample of the batch.
            top: How many.
        """
        slopes = self.shown(sample)
        order = slopes.flatten().abs().argsort(descending=True, stable=True)[:top].tolist()
        return {_place(i, slopes.shape, self.names): float(slopes.flatten()[i]) for i in order}

    def shown(self, sample: int) -> Tensor:
        """Return the slopes of a sample, in `unit`, on the CPU.

        Args:
            sample: Which sample of the batch.
        """
        slopes = plots.finite_row(self.gradient, sample)
        return slopes if self.spread is None else slopes * self.spread.view(slopes.shape)

    def plot(self, sample: int = 0) -> Figure:
        """Return an image beside a map of its slopes, or bars for columns or a vector.

        Args:
            sample: Which sample of the batch. Images are ``(C, H, W)`` or ``(H, W)``; slopes
                are summed over channels.
        """
        title = plots.place_of(self.gradient, sample)
        return plots.figure_of(self.panels(sample), 5.6, 2.8, title)

    def panels(self, sample: int) -> list[plots.Panel]:
        """Return the panels of `plot`, for a figure with others.

        Args:
            sample: As in `plot`.
        """
        gradient = self.shown(sample)
        if self.names:
            draw = partial(plots.named_slopes, names=self.names, gradient=gradient.flatten())
            return [partial(draw, unit=self.unit, top=8)]
        if gradient.ndim == 1:
            return [partial(plots.slopes, gradient=gradient)]
        image = partial(plots.image, pixels=plots.row(self.input, sample), title="input")
        return [image, partial(plots.slope_map, gradient=gradient)]


def _place(flat: int, shape: torch.Size, names: Sequence[str]) -> str:
    """Return the place of a number in an input: its column, or row and column of an image."""
    if names:
        return names[flat]
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), shape)]
    kinds = {2: ("row", "column"), 3: ("channel", "row", "column")}.get(len(place))
    if kinds is None:
        return ", ".join(map(str, place))
    return " ".join(f"{kind} {i}" for kind, i in zip(kinds, place, strict=True))


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
    rows in weight space of all samples: for derivatives with respect to inputs only. No weight
    of the model is part of the graph.

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
    """Return the derivative of each sample's score with respect to its input.

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
        >>> from scodkit.factors.hooks import HookEngine
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
            part = call.samples(slice(start, start + step)).map(_leaf)
            leaf, score = _floating_point_input(part), scores(part)
            gradient = torch.zeros_like(leaf)
            if score.requires_grad:  # not where the model sees no more than signs of numbers
                (gradient,) = torch.autograd.grad(score.sum(), leaf, materialize_grads=True)
            gradients.append(fill_samples(gradient, ~score.isfinite(), torch.nan))
    return Saliency(torch.cat(gradients), inputs.detach())


@dataclass
class _Scores:
    """Differentiable scores: of all samples at once, where that agrees with plain autograd.

    Args:
        network: The model.
        parameters: The chosen weights.
        likelihood: Says which rows count.
        basis: The eigenbasis, on the model's device.
        prior_scale: ``eps``.
        engine: Pulls rows back; None before the first finite samples.

    Raises:
        OptionError: If the likelihood draws at random.
    """

    network: Network
    parameters: ParameterSet
    likelihood: Likelihood
    basis: Eigenbasis
    prior_scale: float
    engine: AloneEngine | None = None

    def __post_init__(self) -> None:
        if self.likelihood.draws:
            raise OptionError(
                f"expected a likelihood without random draws, got {self.likelihood}, whose "
                "scores jump with the draws; type saliency=False"
            )

    def __call__(self, call: Inputs) -> Tensor:
        """Return the scores of a batch, ``(B,)`` in float64."""
        with self.network.evaluating(), differentiable_attention():
            if self.engine is None:
                finite = finite_samples(call, self.network(call).detach())
                tried = finite.nonzero()[:_TRIED, 0].tolist()
                self.engine = self._chosen(pick(call, tried)) if tried else None
            engine = self.engine or LoopEngine(self.network, self.parameters, graph=True)
            linear = engine.linearize(call)
            finite = finite_samples(call, linear.output.detach())
            rows = self.likelihood.factor(fill_samples(linear.output, ~finite, 0.0))
            energies = self._energies(linear, rows)
            score = scoring.score(energies, self.basis, self.prior_scale)
            score = torch.where(finite & score.isfinite(), score, torch.inf)
        has_slopes = any(tensor.requires_grad for tensor in call.tensors())
        return score if has_slopes else score.detach()

    def _chosen(self, few: Inputs) -> AloneEngine:
        """Return the engine to use: plain autograd unless function transforms agree with it.

        Slopes by function transforms are wrong for some of torch's own functions: layer norm,
        as of torch 2.13.

        Raises:
            OptionError: If plain autograd has no slopes.
        """
        loop = LoopEngine(self.network, self.parameters, graph=True)
        together = FunctionalEngine(self.network, self.parameters, graph=True)
        with self.network.in_full_precision():  # TF32 rounds to 1e-3
            try:
                expected = self._slopes(loop, few)
            except RuntimeError as error:
                raise OptionError(
                    "expected a model that torch can differentiate twice, but it raised "
                    f"{first_line(error)}; type saliency=False"
                ) from error
            try:
                off = max(map(relative_distance, self._slopes(together, few), expected))
                reason = f"all at once they differ from plain autograd's by {off:.1e} relative"
            except Exception as error:  # whatever a third-party module raises under a transform
                off = torch.inf
                reason = f"all at once it raised {first_line(error)}"
        if off <= tolerance(expected[-1]):
            return together
        warnings.warn(
            f"{type(self.network.model).__name__} is differentiated one sample after the "
            f"other, for the right slopes, more slowly; {reason}",
            EngineFallbackWarning,
            stacklevel=2,
        )
        return loop

    def _slopes(self, engine: AloneEngine, few: Inputs) -> list[Tensor]:
        """Return derivatives of the energies with respect to inputs and rows at the output."""
        few = few.map(_leaf)
        linear = engine.linearize(few)
        rows = self.likelihood.factor(linear.output).detach().requires_grad_()
        energies = self._energies(linear, rows)
        # not torch.autograd.grad: it passes over functions marked as differentiable once only;
        # not of the score, a difference of near-equals
        torch.autograd.backward(energies.total.sum() - 0.5 * energies.along.sum())
        leaves = [tensor for tensor in (*few.tensors(), rows) if tensor.requires_grad]
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    def _energies(self, linear: Linearization, rows: Tensor) -> Energies:
        """Return the energies of rows ``(B, p, d)`` at the output, with their graph.

        By plain products: the kernels of `Factors.project` have no derivatives.
        """
        norms, along = [], []
        factors = linear.pull_back(rows)
        for columns, pulled in factors.blocks():
            vectors = self.basis.vectors[columns].to(pulled.device)
            wide = torch.promote_types(pulled.dtype, vectors.dtype)
            norms.append(pulled.square().sum((1, 2), dtype=torch.float64))
            along.append((pulled.to(wide) @ vectors.to(wide)).double())
        if factors.outside is not None:
            norms.append(factors.outside.sum((1, 2)))
        total = torch.stack(norms).sum(0)
        return Energies(total, torch.stack(along).sum(0).square().sum(1))


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
