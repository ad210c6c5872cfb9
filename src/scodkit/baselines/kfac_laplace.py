"""Kronecker-factored Laplace approximation (Ritter et al., 2018), by laplace-torch."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from typing_extensions import Self

from scodkit.baselines import predictions
from scodkit.baselines.baseline import State, TrainingData, check_finite, class_logits
from scodkit.baselines.deep_ensemble import WeightSets
from scodkit.baselines.predictions import Predictive
from scodkit.baselines.weight_space import WeightSpaceBaseline, over_pieces
from scodkit.errors import NonFiniteError, OptionError, optional
from scodkit.factors.engine import Factors
from scodkit.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from scodkit.model.inputs import Inputs, ordinary
from scodkit.model.network import Network
from scodkit.model.parameters import LastLayers, ParameterSet, Selection, select, select_names

# prior precisions that `tune` tries by default: 1e-4, 10^-3.5, ..., 1e4
GRID = tuple(10 ** (exponent / 2) for exponent in range(-8, 9))

# steps of Adam (laplace-torch's default of 100 ends a percent away), and rounds of it: its
# steps are too short where the best prior precision is far off
_STEPS, _ROUNDS = 300, 5
# slope of the log evidence that counts as zero, relative to the prior's part of it
_FLAT = 1e-2


@dataclass(eq=False, repr=False, kw_only=True)
class KFACLaplace(WeightSpaceBaseline):
    """Uncertainty of the prediction under a Gaussian posterior of the weights.

    The posterior is centred at the trained weights; its precision is the Fisher information of
    the training data, with Kronecker factors for each layer, plus that of the prior. The score
    is that of the prediction averaged over the posterior. For regression: its total variance
    (squared output units, summed over outputs, the noise included). For classification: the
    entropy of the mean probabilities (nats). The output of a call is the mean prediction.

    A fit reads the data once and needs no targets: one backward pass per output or class. A
    score takes a forward pass and a backward pass per output, where the network is linearised;
    or ``samples`` forward passes. The state holds the factors' eigenvectors (``2 o^2 + i^2``
    numbers for a layer with ``i`` inputs and ``o`` outputs) and the sampled weights.

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
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Picks the targets from a batch of `tune`; see `Picks`.

    Attributes:
        memory_budget: Bytes that per-sample gradients may take at a time, as of a `Monitor`.

    Examples:
        >>> method = KFACLaplace(nn.Linear(1, 1), Gaussian(), prior_precision=1.0)
        >>> _ = method.fit([torch.ones(3, 1)], progress=False)
        >>> method.score(torch.tensor([[0.0], [2.0]]))  # noise, bias, weight: 1 + 1/4 + x^2/4
        tensor([1.2500, 2.2500])
    """

    handles: ClassVar = (Categorical, Bernoulli, Gaussian)
    because: ClassVar = "laplace-torch has no Kronecker factors for it"

    parameters: Selection = field(default="all", init=False)  # `last_layer` chooses
    last_layer: bool = False
    samples: int | None = None
    prior_precision: float | None = None
    seed: int = 0
    skip_unsupported: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None and self.samples < 2:
            raise OptionError(
                f"expected two samples or more, or None, got {self.samples!r}; type samples=30"
            )
        if self.prior_precision is not None:
            _check_precisions([self.prior_precision])
        self._weight_sets = WeightSets(self._network)

    @property
    def takes_targets(self) -> bool:
        """Whether a fit reads the targets of the training data."""
        return True

    @property
    def chosen_precision(self) -> float:
        """The prior precision in use: given, or chosen by `fit` or `tune`."""
        return float(self._ready()["prior_precision"])

    def tune(
        self, loader: Iterable[Any], grid: Sequence[float] = GRID, *, progress: bool = True
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
        state = self._ready()
        _check_precisions(grid)
        description = "tuning KFACLaplace" if progress else None
        data = TrainingData(self._network, loader, self.targets, description)
        data.check_repeatable("KFACLaplace.tune")
        # not laplace-torch's grid search: it carries its running loss from one precision to
        # the next, draws from the global generator, and judges regression by squared errors
        with self._evaluating():
            best, chosen = math.inf, None
            # narrow posteriors first: they are seldom far off, and wide ones soon ruled out
            for precision in sorted(grid, reverse=True):
                loss = self._loss(data, self._with_precision(state, precision), best)
                if loss < math.inf:
                    best, chosen = loss, precision
            if chosen is None:
                raise NonFiniteError(
                    "expected finite predictions of the validation data at some prior "
                    f"precision, got none at {list(grid)}; mend or remove samples with a NaN "
                    "or an infinity, or try larger precisions"
                )
            self._state = self._with_precision(state, chosen)
        return self

    def _learn(self, data: TrainingData) -> State:
        self._last_source = None  # this fit may choose other weights
        posterior: Any = None
        names: list[str] = []
        count = 0
        # not laplace-torch's fit: it has to know the number of samples in advance, and
        # decomposes in float32, where small eigenvalues are lost beside large ones
        for call in data.calls():
            if posterior is None:
                names = self._choose(call)
                posterior = self._new_posterior(names)
            # a dict, the form in which laplace-torch takes more than one tensor
            batch = {"call": call, "first": call.tensors()[0]}
            with torch.no_grad():
                output = check_finite(posterior.model(batch), "outputs")
            # the factors do not depend on targets: predictions stand in for them
            targets = output if isinstance(self.likelihood, Gaussian) else output.argmax(1)
            posterior.H += posterior.backend.kron(batch, targets, N=1)[1]
            count += call.batch_size
        state: State = {"prior_precision": posterior.prior_precision}
        for name, factors in zip(names, posterior.H.kfacs, strict=True):
            for side, factor in enumerate(factors):
                check_finite(factor, "Kronecker factors")
                values, vectors = torch.linalg.eigh(factor.double())
                # the inputs' factor must be a mean over the data; with N=1 it is a sum
                values = values.clamp_min(0) / (count if side else 1)
                state[f"values:{name}:{side}"] = values.to(factor)
                state[f"vectors:{name}:{side}"] = vectors.to(factor).contiguous()
        precision = self.prior_precision
        if precision is None:
            posterior.H = posterior.H_facs = self._fisher(state)
            posterior.mean = parameters_to_vector(posterior.params).detach()
            precision = _maximise_evidence(posterior)
        return self._with_precision(state, precision)

    def _choose(self, call: Inputs) -> list[str]:
        """Return the names of the uncertain parameters, in the model's order.

        Raises:
            OptionError: If layers without Kronecker factors are not to be skipped, or if no
                layer has any.
        """
        selection = LastLayers(count=1) if self.last_layer else "all"
        names = select(selection, self._network, call).names
        example = call.samples(slice(0, 2))
        reasons = _without_factors(_twin(self._network, names), names, example)
        supported = [name for name in names if name.rpartition(".")[0] not in reasons]
        if reasons and not (self.skip_unsupported and supported):
            got = ", ".join(f"{name or 'the model'} ({why})" for name, why in reasons.items())
            skip = "type skip_unsupported=True to keep their weights as they are"
            raise OptionError(
                "expected layers that laplace-torch has Kronecker factors for (nn.Linear, "
                f"nn.Conv2d, each called once, in float32 or float64), got {got}; "
                f"{skip if supported else 'compare with another baseline here'}"
            )
        return supported

    def _new_posterior(self, names: Sequence[str]) -> Any:
        """Return laplace-torch's posterior of some parameters, on a twin of the network.

        Its ``last_layer`` silently takes the network's output for that layer's, which is wrong
        for logits of two classes, scaled outputs and picked ones. Gradients switched off
        elsewhere give the same posterior, of any layer. The backend is its default, which has
        all directions of the output Fisher; BackPACK's takes neither switched-off gradients
        nor several inputs.
        """
        return peer("laplace").Laplace(
            _Standardised(_twin(self._network, names), self.likelihood),
            "regression" if isinstance(self.likelihood, Gaussian) else "classification",
            subset_of_weights="all",
            hessian_structure="kron",
            backend=peer("laplace.curvature").CurvlinopsGGN,
            dict_key_x="first",
        )

    def _fisher(self, state: State) -> Any:
        """Return the Fisher information of the training data, as laplace-torch's matrix.

        With the prior precision added, it is the precision of the posterior.
        """
        names = self._uncertain(state).names
        parts = (
            [[state[k] for i in (0, 1) if (k := f"{part}:{n}:{i}") in state] for n in names]
            for part in ("vectors", "values")
        )
        return peer("laplace.utils").KronDecomposed(*parts)

    def _with_precision(self, state: State, precision: float) -> State:
        """Return the state at another prior precision, with weights drawn at it."""
        state = {**state, "prior_precision": state["prior_precision"].new_tensor([precision])}
        if self.samples is not None:
            uncertain = self._uncertain(state)
            mean = parameters_to_vector(uncertain.weights(self.model).values())
            # on the CPU and in float64: draws must not depend on the device or the dtype
            generator = torch.Generator().manual_seed(self.seed)
            shape = self.samples, len(mean)
            noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(mean)
            precision_matrix = self._fisher(state) + state["prior_precision"]
            drawn = mean + precision_matrix.bmm(noise, exponent=-0.5)
            for block in uncertain.blocks:
                part = drawn[:, block.columns]
                state[f"samples:{block.name}"] = part.reshape(-1, *block.shape)
        return state

    def _uncertain(self, state: State) -> ParameterSet:
        """Return the parameters that a state has factors of, in the model's order."""
        named = dict(self.model.named_parameters())
        return select_names(self.model, [n for n in named if f"values:{n}:0" in state])

    def _loss(self, data: TrainingData, state: State, best: float) -> float:
        """Return the negative log-likelihood of all targets, in nats above the least possible.

        Args:
            data: With targets.
            state: At the precision to try.
            best: The least loss so far: infinity is returned as soon as this one exceeds it,
                and where it is NaN.
        """
        total = 0.0
        for call, targets in data.pairs():
            predicted = self._predict(call, state)
            predictions.check_targets(self.likelihood, predicted.output, targets)
            if isinstance(self.likelihood, Gaussian):
                assert predicted.variance is not None
                error = predicted.output.flatten(1) - targets.reshape(len(targets), -1)
                ratio = predicted.variance / self.likelihood.noise_variance(predicted.output)
                losses = (error.square() / predicted.variance + ratio.log()) / 2
            else:
                losses = predictions.negative_log_likelihood(
                    self.likelihood, predicted.output, targets
                )
            total += float(losses.sum())  # of numbers >= 0
            if not total <= best:
                return math.inf
        return total

    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        predictive = self._predict(call, state)
        return predictive.output, predictive.score

    def _predict(self, call: Inputs, state: State) -> Predictive:
        if self.samples is not None:
            prefix = "samples:"
            drawn = {k.removeprefix(prefix): state[k] for k in state if k.startswith(prefix)}
            sets = [{n: draws[k] for n, draws in drawn.items()} for k in range(self.samples)]
            runs = [functools.partial(self._network.at, weights) for weights in sets]
            outputs = self._weight_sets.outputs(call, runs, lambda: drawn)
            return predictions.mixture(self.likelihood, outputs)
        output, variance = self._linearised(call, state)
        if isinstance(self.likelihood, Gaussian):
            total = variance + self.likelihood.noise_variance(output)
            return Predictive(self.likelihood, output, total)
        # the mean of a logistic function of a Gaussian variable (MacKay, 1992)
        scale = (1 + math.pi / 8 * variance).rsqrt()
        return Predictive(self.likelihood, output * scale.reshape(output.shape), None)

    def _linearised(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        """Return outputs ``(B, *shape)`` and their variances due to the weights, ``(B, d)``.

        The Jacobians are our engines': those that laplace-torch takes of a batch cost the
        square of its size, and a NaN in one sample would reach the others.
        """
        precision = self._fisher(state) + state["prior_precision"]

        def variances(factors: Factors) -> Tensor:
            blocks = sorted(factors.blocks(), key=lambda block: block[0].start)
            rows = torch.cat([part for _, part in blocks], dim=2)
            scaled: Tensor = precision.bmm(rows, exponent=-0.5).reshape(rows.shape)
            return scaled.square().sum(2)

        # unit variances, so that the rows at the output are those of the identity
        source = replace(self._source(call), likelihood=Gaussian())
        return over_pieces(
            source, call, variances, lambda *parts: torch.cat(parts, dim=1), hold=True
        )

    def _parameters(self, call: Inputs) -> ParameterSet:
        return self._uncertain(self._ready())


class _Standardised(nn.Module):
    """The model as laplace-torch needs it: logits ``(B, C)``, or noise of variance 1."""

    def __init__(self, network: Network, likelihood: Likelihood) -> None:
        super().__init__()
        self.model = network.model  # registers its parameters
        self.network, self.likelihood = network, likelihood

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        output = self.network(batch["call"])
        if isinstance(self.likelihood, Gaussian):
            return self.likelihood.root(output) * output.flatten(1)
        return class_logits(self.likelihood, output)


def _twin(network: Network, names: Sequence[str]) -> Network:
    """Return a copy of the modules that shares the weights; ``names`` require gradients."""
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(ordinary(weight.detach()), requires_grad=name in names)
        for name, weight in network.model.named_parameters()
    }
    return network.of(copy.deepcopy(network.model, memo))


def _without_factors(twin: Network, names: Sequence[str], example: Inputs) -> dict[str, str]:
    """Return why layers have no Kronecker factors, or wrong ones, by name.

    Args:
        twin: A throw-away copy of the network, which gets hooks and gradients.
        names: Of the parameters in question.
        example: Samples to run, a few.
    """
    places = Counter(id(p) for _, p in twin.model.named_parameters(remove_duplicate=False))
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    layers = {name: twin.model.get_submodule(name) for name in owners}
    calls: dict[nn.Module, list[Any]] = {layer: [] for layer in layers.values()}
    for layer in calls:
        layer.register_forward_pre_hook(lambda hooked, args: calls[hooked].append(args))
    output = twin(example)
    if output.requires_grad:
        torch.autograd.backward(output.sum())
    reasons = {}
    for name, layer in layers.items():
        weights, runs = list(layer.parameters()), calls[layer]
        if not _has_factors(layer):
            reasons[name] = f"with {layer.extra_repr()} in {weights[0].dtype}"
        elif any(places[id(weight)] > 1 for weight in weights):
            reasons[name] = "with weights in common with another"
        elif len(runs) != 1:
            reasons[name] = f"called {len(runs)} times"
        elif len(runs[0]) != 1 or runs[0][0].ndim < 2 or len(runs[0][0]) != example.batch_size:
            reasons[name] = "called with something else than a tensor with a row a sample"
        elif any(weight.grad is None for weight in weights):
            reasons[name] = "without influence on the output"
    return {name: f"{type(layers[name]).__name__} {why}" for name, why in reasons.items()}


def _has_factors(layer: nn.Module) -> bool:
    """Return whether laplace-torch is known to get such a layer right: an allow-list."""
    weights = dict(layer.named_parameters())
    return (
        type(layer) in {nn.Linear, nn.Conv2d}
        and list(weights) in (["weight"], ["weight", "bias"])
        and weights["weight"].dtype in {torch.float32, torch.float64}
        and sum(weight.numel() for weight in weights.values()) > 1
        and getattr(layer, "groups", 1) == 1
        and getattr(layer, "padding_mode", "zeros") == "zeros"
    )


def _maximise_evidence(posterior: Any) -> float:
    """Return the prior precision with the largest marginal likelihood of the training data.

    Raises:
        NonFiniteError: If there is none, as weights or Fisher information are zero.
    """
    for _ in range(_ROUNDS):
        with warnings.catch_warnings():
            # about the link function, on which the evidence does not depend
            warnings.filterwarnings("ignore", "By default `link_approx`")
            start = posterior.prior_precision
            posterior.optimize_prior_precision(n_steps=_STEPS, init_prior_prec=start)
        logarithm = posterior.prior_precision.log().requires_grad_()
        evidence = posterior.log_marginal_likelihood(logarithm.exp())
        (slope,) = torch.autograd.grad(evidence, logarithm)
        posterior.prior_precision = logarithm.detach().exp()
        if bool(slope.abs() <= _FLAT * posterior.scatter):
            return float(posterior.prior_precision)
    raise NonFiniteError(
        "expected a marginal likelihood of the training data with a maximum to choose a prior "
        f"precision by, got none up to {float(start):.3g}, as where weights or Fisher "
        "information are zero; type prior_precision=1.0"
    )


def _check_precisions(precisions: Sequence[float]) -> None:
    if not precisions or not all(0 < value < math.inf for value in precisions):
        raise OptionError(
            f"expected positive, finite prior precisions, got {list(precisions)}; one over the "
            "variance of a weight before training, such as 1.0"
        )


# installed without their dependencies: they list torchvision, of which nothing is used
_INSTALL = (
    "laplace-torch==0.3 curvlinops-for-pytorch==3.0.1 asdfghjkl==0.1a4 "
    "backpack-for-pytorch==1.7.1 unfoldNd==0.2.3 einconv==0.1.0"
)


def peer(name: str) -> Any:
    """Return a module of laplace-torch.

    Args:
        name: ``laplace`` or one of its submodules.
    """
    with warnings.catch_warnings():
        # raised on import by one of laplace-torch's backends, which is not used
        warnings.filterwarnings("ignore", "`torch.jit.script`")
        return optional(name, "peers", f"pip install --no-deps {_INSTALL}")
