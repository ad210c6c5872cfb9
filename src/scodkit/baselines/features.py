"""Features, the input of a network's last layer: how to read them, and their moments."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scodkit.baselines.baseline import Baseline, TrainingData, check_finite
from scodkit.errors import BatchError, OptionError
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network

# share of the largest variance below which a direction counts as constant; rounding of
# features in float32 leaves about 1e-14
_NO_VARIANCE = 1e-12
# share of a sample's largest logit that rounding explains, in half precision too
_OTHER_LOGITS = 0.02
# how many module names a message lists; the last ones
_LISTED = 20
# rounding errors of one feature that a sum of products may accumulate
_ROUNDINGS = 8


@dataclass(frozen=True)
class ForwardPass:
    """The output of one forward pass, and the input of one layer on the way.

    Args:
        output: Of the model, ``(B, *shape)``.
        layer_input: The layer's input, ``(B, ..., m)``, as it was when the layer was called.
        layer: The layer.
        name: Its name in the model.
    """

    output: Tensor
    layer_input: Tensor
    layer: nn.Module
    name: str

    @functools.cached_property
    def features(self) -> Tensor:
        """The layer's input in float64, flattened to ``(B, m)``."""
        return self.layer_input.reshape(len(self.layer_input), -1).double()

    @property
    def precision(self) -> float:
        """Relative rounding of the features."""
        floating = self.layer_input.is_floating_point()
        return torch.finfo(self.layer_input.dtype).eps if floating else 0.0

    def head(self) -> tuple[Tensor, Tensor]:
        """Return the weight ``(C, m)`` and the bias ``(C,)`` that make the ``C`` logits.

        The first rows of the layer, where the model leaves out the last of its outputs.

        Raises:
            BatchError: If it is no Linear layer, is applied along further axes, or the output
                is not what it returned.
        """
        layer = self.layer
        if not isinstance(layer, nn.Linear) or self.layer_input.ndim != 2:
            raise BatchError(
                f"expected a Linear layer applied to features (B, m), got {self.name!r}, a "
                f"{type(layer).__name__} applied to {tuple(self.layer_input.shape)}; name the "
                "layer that makes the logits: layer='...', or compare with Mahalanobis or KNN "
                "here"
            )
        weight = layer.weight.detach()[: self.output.shape[1]]
        bias = weight.new_zeros(len(weight))
        if layer.bias is not None:
            bias = layer.bias.detach()[: len(weight)]
        logits = functional.linear(self.layer_input.to(weight.dtype), weight, bias)
        if logits.shape != self.output.shape or not _same_logits(logits, self.output):
            raise BatchError(
                f"expected a model that returns what its layer {self.name!r} makes, got other "
                "numbers; let it return these logits as they are (all, or the first ones), "
                "without softmax or temperature, or name the layer that makes the output: "
                "layer='...'"
            )
        return weight, bias


def _same_logits(logits: Tensor, output: Tensor) -> bool:
    finite = (logits.isfinite() & output.isfinite()).all(1, keepdim=True)
    allowed = _OTHER_LOGITS * output.abs().amax(1, keepdim=True)
    return bool(((logits - output).abs() <= allowed).logical_or(~finite).all())


def forward_pass(network: Network, call: Inputs, layer: str | None = None) -> ForwardPass:
    """Run the model once, and record the input of a layer.

    Args:
        network: The model, held in eval mode.
        call: Its inputs.
        layer: Name of the module whose input is recorded; None for the ``nn.Linear`` that is
            called last.

    Returns:
        The output and the layer's input.

    Raises:
        BatchError: If no such layer is called, or it is called several times.
    """
    model = network.running(call)
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    calls: Counter[str] = Counter()
    last: dict[str, Tensor | None] = {}

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # copies: the layer itself, or one after it, may change its input in place
        copies = (
            v.detach().clone() for v in (*args, *kwargs.values()) if isinstance(v, Tensor)
        )
        calls[name] += 1
        last.clear()
        last[name] = next(copies, None)

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name in linear if layer is None else [layer]:
            module, hook = model.get_submodule(name), functools.partial(note, name)
            hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        output = network(call)
    if not last:
        expected = "a Linear layer" if layer is None else f"the layer {layer!r}"
        raise BatchError(
            f"expected a forward pass that calls {expected}, got one that does not; name a "
            f"module that is called: layer=..., {_names(modules)}"
        )
    ((name, layer_input),) = last.items()
    if calls[name] > 1 or layer_input is None or layer_input.shape[:1] != (call.batch_size,):
        got = None if layer_input is None else tuple(layer_input.shape)
        raise BatchError(
            f"expected the layer {name!r} to be called once per forward pass, with a tensor "
            f"({call.batch_size}, ...), one row per sample, got {calls[name]} calls, the last "
            f"with {got}; name another module: layer=..., {_names(modules)}"
        )
    return ForwardPass(output, layer_input, model.get_submodule(name), name)


def _names(modules: Mapping[str, nn.Module]) -> str:
    named = [repr(name) for name in modules if name]
    more = f" and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
    return "one of " + ", ".join(named[-_LISTED:]) + more


class Moments:
    """Number and mean of the samples of each class, and their scatter about these means.

    In one pass and in float64. Batches are merged by the differences of their means from those
    so far (Chan et al., 1983), so that a large common mean costs no precision.

    Args:
        classes: Number of classes.

    Attributes:
        counts: Samples per class, ``(C,)``.
        means: ``(C, m)``; zero for classes without samples.

    Examples:
        >>> moments = Moments()
        >>> moments.add(torch.tensor([[1.0], [3.0]]))
        >>> moments.means, moments.covariance()
        (tensor([[2.]], dtype=torch.float64), tensor([[1.]], dtype=torch.float64))
    """

    def __init__(self, classes: int = 1) -> None:
        self.counts = torch.zeros(classes, dtype=torch.float64)
        self.means = torch.zeros(classes, 0, dtype=torch.float64)
        self._scatter = torch.zeros(0, 0, dtype=torch.float64)
        self._precision = 0.0

    def add(
        self, features: Tensor, labels: Tensor | None = None, precision: float = 0.0
    ) -> None:
        """Add a batch.

        Args:
            features: ``(B, m)``.
            labels: Class indices ``(B,)``; None where there is one class.
            precision: Relative rounding of the features.
        """
        self._precision = max(self._precision, precision)
        features = features.double()
        if not self._scatter.numel():  # the first batch says how many features, and where
            width = features.shape[1]
            self.counts = features.new_zeros(len(self.counts))
            self.means = features.new_zeros(len(self.counts), width)
            self._scatter = features.new_zeros(width, width)
        if labels is None:
            labels = torch.zeros(len(features), dtype=torch.long, device=features.device)
        present, local = torch.unique(labels, return_inverse=True)
        member = functional.one_hot(local, len(present)).double()
        new, old = member.sum(0), self.counts[present]
        offset = features - self.means[labels]
        shift = member.T @ offset / new[:, None]
        within = offset - shift[local]
        self._scatter += within.T @ within
        self._scatter += shift.T @ (shift * (old * new / (old + new))[:, None])
        self.counts[present] += new
        self.means[present] += shift * (new / (old + new))[:, None]

    def merge(self, other: Moments) -> None:
        """Add the samples of other moments, of as many classes and features.

        Args:
            other: Left alone.
        """
        if not self._scatter.numel():
            self.counts, self.means, self._scatter = (t.clone() for t in other.sums()[:3])
        elif other._scatter.numel():
            total = (self.counts + other.counts).clamp_min(1)[:, None]
            shift = other.means - self.means
            weights = self.counts[:, None] * other.counts[:, None] / total
            self._scatter += other._scatter + shift.T @ (shift * weights)
            self.means += shift * other.counts[:, None] / total
            self.counts += other.counts
        self._precision = max(self._precision, other._precision)

    def sums(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return counts, means, scatter and precision, as `of` takes them."""
        precision = torch.tensor(self._precision, dtype=torch.float64)
        return self.counts, self.means, self._scatter, precision

    @staticmethod
    def of(counts: Tensor, means: Tensor, scatter: Tensor, precision: Tensor) -> Moments:
        """Return the moments that `sums` took apart.

        Args:
            counts: Samples per class, ``(C,)``.
            means: Of each class, ``(C, m)``.
            scatter: About these means, ``(m, m)``.
            precision: Relative rounding of the features.
        """
        moments = Moments(len(counts))
        moments.counts, moments.means, moments._scatter = counts, means, scatter
        moments._precision = float(precision)
        return moments

    def covariance(self) -> Tensor:
        """Return the covariance ``(m, m)`` about the classes' means: the mean over samples."""
        return self._scatter / self.counts.sum()

    def principal_components(self, origin: Tensor | None = None) -> tuple[Tensor, Tensor, int]:
        """Return variances ``(m,)``, largest first, their directions ``(m, m)``, and the rank.

        Directions with less than 1e-12 of the largest variance do not count in the rank, nor
        those with less than rounding of the features alone may leave.

        Args:
            origin: The point that the variances are about, ``(m,)``, for a single class; by
                default each class's mean.
        """
        covariance = self.covariance()
        largest = self.means.square().amax(0) + covariance.diagonal()
        rounding = float((_ROUNDINGS * self._precision) ** 2 * largest.max())
        if origin is not None:
            offset = self.means[0] - origin
            covariance = covariance + offset[:, None] * offset
        values, vectors = torch.linalg.eigh(covariance)
        values, vectors = values.flip(0), vectors.flip(1)
        least = max(_NO_VARIANCE * float(values[0]), rounding)
        rank = int((values > least).sum()) if values[0] > 0 else 0
        return values, vectors, rank


@dataclass(eq=False, repr=False, kw_only=True)
class FeatureBaseline(Baseline):
    """A method that scores features: the input of the last Linear layer, or of a named one.

    Features are flattened to ``(B, m)``, whatever axes the layer is applied along, and taken
    in the same forward pass as the output. Methods that need the layer's weights as well
    refuse further axes; see `ForwardPass.head`.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises; any.
        layer: Name of the module whose input are the features, as in ``named_modules()``; None
            for the ``nn.Linear`` that the forward pass calls last.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Picks the targets from a training batch; see `Picks`.
    """

    layer: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        modules = dict(self.model.named_modules(remove_duplicate=False))
        if self.layer is not None and self.layer not in modules:
            raise OptionError(
                f"expected the name of a module of the model, got layer={self.layer!r}; type "
                f"{_names(modules)}, or None for the last Linear layer"
            )

    def _pass(self, call: Inputs, width: int | None = None) -> ForwardPass:
        """Return one forward pass, with ``width`` features per sample (None: any number).

        Raises:
            BatchError: If there are more or fewer features.
        """
        forward = forward_pass(self._network, call, self.layer)
        features = forward.features.shape[1]
        if width is not None and features != width:
            raise BatchError(
                f"expected {width} features per sample, as there were before, got {features}; "
                "let all samples have one size, or name a layer behind the pooling: layer='...'"
            )
        return forward

    def _training_passes(
        self, data: TrainingData, *, with_targets: bool = False
    ) -> Iterator[tuple[ForwardPass, Tensor | None]]:
        """Yield a forward pass of each batch, with finite features, and the targets or None."""
        width = None
        pairs = data.pairs() if with_targets else ((call, None) for call in data.calls())
        for call, targets in pairs:
            forward = self._pass(call, width)
            check_finite(forward.features, "features")
            width = forward.features.shape[1]
            yield forward, targets
