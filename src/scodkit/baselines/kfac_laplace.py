"""Kronecker-factored Laplace approximation (Ritter et al., 2018)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from scodkit.baselines.baseline import Baseline, Picks, State
from scodkit.baselines.data import TrainingData
from scodkit.baselines.kronecker import Block, KroneckerFactors, pack, unpack
from scodkit.baselines.kronecker_layers import supported_parameters
from scodkit.baselines.predictive import Predictive, linearised, mixture
from scodkit.baselines.prior_precision import excess_surprise, most_evident
from scodkit.baselines.weight_sets import Sets, WeightSets, copies
from scodkit.errors import NonFiniteError, OptionError
from scodkit.factors import Factors, FactorSource, MemoryBudget, choose_engine
from scodkit.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from scodkit.network import Inputs
from scodkit.parameters import LastLayers, ParameterSet, select, select_names

# what `tune` tries unless told otherwise: 1e-4, 10^-3.5, ..., 1e4
GRID = tuple(10 ** (exponent / 2) for exponent in range(-8, 9))


class KFACLaplace(Baseline):
    """Uncertainty of the prediction under a Gaussian posterior of the weights.

    The posterior is centred at the trained weights; its precision is the Fisher information of
    the training data, with Kronecker factors for each layer, plus that of the prior. The score
    is that of the prediction averaged over the posterior. For regression: its total variance
    (squared output units, summed over outputs, the noise included). For classification: the
    entropy of the mean probabilities (nats).

    A fit reads the data once and needs no targets: one backward pass per output or class, by
    laplace-torch, on a copy of the network that is dropped afterwards. To score takes
    ``samples`` forward passes; or one and a backward pass per output, where the network is
    linearised. Kept are the factors' eigenvectors (``2 o^2 + i^2`` numbers for a layer with
    ``i`` inputs and ``o`` outputs) and the sampled weights.

    Args:
        model: The trained network, of ``nn.Linear`` and ``nn.Conv2d`` layers.
        likelihood: `Gaussian`, `Categorical`, or `Bernoulli` with one logit. All directions of
            the output Fisher count.
        last_layer: Be uncertain about the last layer alone.
        samples: Weights drawn from the posterior to average over, once and for all; None for
            the closed form of the network linearised in its weights.
        prior_precision: One over the variance of a weight before training. None for that with
            the largest marginal likelihood of the training data, which suits the closed form;
            sampled weights want a larger one: see `tune`, and `chosen_precision`.
        seed: Of the draws.
        skip_unsupported: Keep the weights of layers without Kronecker factors as they are
            (normalisations, embeddings, ...), rather than refuse them.
        picks: ``inputs=``, ``outputs=``, and ``targets=`` for `tune`; see `Picks`.

    Attributes:
        memory_budget: Bytes that per-sample gradients may take at a time, as of a `Monitor`.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> method = KFACLaplace(model, Gaussian(), samples=None, prior_precision=1.0)
        >>> _ = method.fit([torch.ones(3, 1)], progress=False)
        >>> method.score(torch.tensor([[0.0], [2.0]]))  # noise, bias, weight: 1 + 1/4 + x^2/4
        tensor([1.2500, 2.2500])
    """

    handles: ClassVar = (Categorical, Bernoulli, Gaussian)
    because: ClassVar = "laplace-torch has no Kronecker factors for it"
    memory_budget = MemoryBudget()

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        last_layer: bool = False,
        samples: int | None = 30,
        prior_precision: float | None = None,
        seed: int = 0,
        skip_unsupported: bool = False,
        **picks: Unpack[Picks],
    ) -> None:
        super().__init__(model, likelihood, **picks)
        if samples is not None and samples < 2:
            raise OptionError(f"expected two samples or more, or None, got {samples!r}")
        if prior_precision is not None:
            _check_precisions([prior_precision])
        self.last_layer = last_layer
        self.samples = samples
        self.prior_precision = prior_precision
        self.seed = seed
        self.skip_unsupported = skip_unsupported
        self._runs = WeightSets(self._network, shared=last_layer)
        self._last_source: FactorSource | None = None

    @property
    def chosen_precision(self) -> float:
        """The prior precision in use: given, or chosen by `fit` or `tune`."""
        return float(super()._ready()["prior_precision"])

    def tune(
        self,
        loader: Iterable[Any],
        grid: Sequence[float] = GRID,
        *,
        progress: bool = True,
    ) -> Self:
        """Choose the prior precision by how well held-out targets are predicted.

        Args:
            loader: Validation data with targets, like the training data; read once for each
                precision, as far as it takes to see that another one is better.
            grid: Prior precisions to try.
            progress: Show a progress bar.

        Returns:
            The method itself, with the precision of least negative log-likelihood.

        Raises:
            NonFiniteError: If that is infinite or NaN at every precision.
        """
        state = super()._ready()
        _check_precisions(grid)
        doing = "tuning KFACLaplace" if progress else None
        data = TrainingData(self._network, loader, self._targets, doing)
        data.check_repeatable("KFACLaplace.tune")
        losses = [math.inf] * len(grid)
        with self._network.evaluating():
            noise = self._noise(state)
            # the narrowest first: they are seldom far off, the widest soon seen to be
            for i in sorted(range(len(grid)), key=lambda i: -grid[i]):
                tried = self._at_precision(grid[i], state, noise)
                losses[i] = self._loss(data, tried, min(losses))
            if min(losses) == math.inf:
                raise NonFiniteError(
                    "expected finite predictions of the validation data at some prior "
                    f"precision, got none at {list(grid)}; mend or remove samples with a NaN "
                    "or an infinity, or try larger precisions"
                )
            best = grid[losses.index(min(losses))]
            self._state = self._at_precision(best, state, noise)
        return self

    def _learn(self, data: TrainingData) -> State:
        factors: KroneckerFactors | None = None
        names: list[str] = []
        for call in data.calls():
            if factors is None:
                names = self._choose(call)
                factors = KroneckerFactors(self._network, self.likelihood, names)
            factors.add(call)
        assert factors is not None
        blocks = factors.decomposed()
        precision = self.prior_precision
        if precision is None:
            weights = select_names(self.model, names).weights(self.model).values()
            precision = most_evident(
                torch.cat([block.values.flatten() for block in blocks.values()]),
                sum(float(weight.double().square().sum()) for weight in weights),
            )
        like = next(iter(blocks.values())).output_values
        return {**pack(blocks), "prior_precision": like.new_tensor(precision)}

    def _ready(self) -> State:
        """See `Baseline._ready`.

        Returns:
            The same, with weights drawn: not before they are asked for, as `tune` draws others.
        """
        state = super()._ready()
        if self.samples is None or any(name.startswith("samples:") for name in state):
            return state
        with self._network.evaluating():
            precision = float(state["prior_precision"])
            self._state = self._at_precision(precision, state, self._noise(state))
        return self._state

    def _choose(self, call: Inputs) -> list[str]:
        """Return the parameters to be uncertain about."""
        asked = LastLayers(count=1) if self.last_layer else "all"
        names = select(asked, self._network, call).names
        return supported_parameters(self._network, names, call, skip=self.skip_unsupported)

    def _noise(self, state: State) -> dict[str, Tensor]:
        """Return what draws are made of, whatever the precision; nothing without samples."""
        if self.samples is None:
            return {}
        parameters = self._parameters(state)
        blocks = unpack(state, parameters.names)
        # on the CPU and in float64: draws must not depend on the device or the dtype
        generator = torch.Generator().manual_seed(self.seed)
        turned = {}
        for name, weight in parameters.weights(self.model).items():
            shape = (self.samples, weight.numel())
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            turned[name] = blocks[name].turned(noise.to(weight.device, weight.dtype))
        return turned

    def _at_precision(
        self, precision: float, state: State, noise: Mapping[str, Tensor]
    ) -> State:
        """Return the state with another prior precision, and weights drawn for it."""
        parameters = self._parameters(state)
        blocks = unpack(state, parameters.names)
        prior = state["prior_precision"].new_tensor(precision)
        weights = parameters.weights(self.model)
        drawn = {
            f"samples:{name}": weights[name]
            + blocks[name].deviations(own, prior).reshape(-1, *weights[name].shape)
            for name, own in noise.items()
        }
        return {**state, "prior_precision": prior, **drawn}

    def _parameters(self, state: State) -> ParameterSet:
        """Return the parameters that are uncertain, in the model's order."""
        named = [name for name, _ in self.model.named_parameters()]
        return select_names(
            self.model, [name for name in named if f"output_values:{name}" in state]
        )

    def _loss(self, data: TrainingData, state: State, best: float) -> float:
        """Return how badly all targets are predicted, in nats; no NaN.

        Args:
            data: With targets.
            state: Says at which precision.
            best: What another one reached; infinity is returned where that is not.
        """
        total = 0.0
        for call, targets in data.pairs():
            total += float(excess_surprise(self._predict(call, state), targets).sum())
            if total > best:
                return math.inf
        # weights drawn from a wide posterior may be beyond what a network can compute with
        return math.inf if math.isnan(total) else total

    def _judge(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        predictive = self._predict(call, state)
        return predictive.output, predictive.score

    def _predict(self, call: Inputs, state: State) -> Predictive:
        if self.samples is None:
            return linearised(self.likelihood, *self._linear(call, state))
        drawn = self._drawn(state)
        sets = Sets(self.samples, lambda: drawn, lambda some: self._one_by_one(some, drawn))
        return mixture(self.likelihood, self._runs.outputs(sets, call))

    def _drawn(self, state: State) -> dict[str, Tensor]:
        """Return the sampled weights by name of the parameter, ``(samples, ...)`` each."""
        names = self._parameters(state).names
        return {name: state[f"samples:{name}"] for name in names}

    def _one_by_one(self, call: Inputs, drawn: Mapping[str, Tensor]) -> Tensor:
        assert self.samples is not None
        each = ({name: own[k] for name, own in drawn.items()} for k in range(self.samples))
        return torch.stack([self._network.at(weights, copies(call)) for weights in each])

    def _linear(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        """Return the output ``(B, *shape)`` and the variance of each of them, ``(B, d)``."""
        parameters = self._parameters(state)
        blocks, prior = unpack(state, parameters.names), state["prior_precision"]
        outputs: dict[int, Tensor] = {}
        variances: dict[int, list[Tensor]] = {}
        for piece in self._source(call, parameters).pieces(call, hold=True):
            outputs[piece.samples.start] = piece.output
            some = variances.setdefault(piece.samples.start, [])
            some.append(_variance(piece.factors, parameters, blocks, prior))
        each = [torch.cat(some, dim=1) for some in variances.values()]
        return torch.cat(list(outputs.values())), torch.cat(each)

    def _source(self, call: Inputs, parameters: ParameterSet) -> FactorSource:
        """Return what turns batches into Jacobians; the engine is chosen on a first batch."""
        source, device = self._last_source, self._network.device
        if (
            source is None
            or source.engine.device != device
            or source.engine.parameters != parameters
        ):
            with torch.no_grad():
                shape = tuple(self._network(copies(call.samples(slice(0, 1)))).shape[1:])
            engine = choose_engine(self._network, parameters, call)
            # the rows of noise of variance 1 are those of the identity
            source = FactorSource(engine, Gaussian(), shape, self.memory_budget)
            self._last_source = source
        return source

    def _options(self) -> Mapping[str, Any]:
        return {
            "last_layer": self.last_layer,
            "samples": self.samples,
            "prior_precision": self.prior_precision,
            "seed": self.seed,
            "skip_unsupported": self.skip_unsupported,
        }


def _variance(
    factors: Factors, parameters: ParameterSet, blocks: Mapping[str, Block], prior: Tensor
) -> Tensor:
    """Return the variance along each row, ``(b, q)``."""
    total = prior.new_zeros(())
    for columns, rows in factors.blocks():
        # small neighbours come together
        for part in parameters.blocks:
            start, stop = part.columns.start - columns.start, part.columns.stop - columns.start
            if start >= 0 and part.columns.stop <= columns.stop:
                total = total + blocks[part.name].quadratic(rows[:, :, start:stop], prior)
    return total


def _check_precisions(precisions: Sequence[float]) -> None:
    if not precisions or not all(0 < value < math.inf for value in precisions):
        raise OptionError(
            f"expected positive, finite prior precisions, got {list(precisions)}; one over the "
            "variance of a weight before training, such as 1.0"
        )
