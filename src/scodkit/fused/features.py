"""Features of training data, the input of a network's last layer, in a few megabytes.

Their mean in each predicted class, one covariance for all classes, and a random choice of them.
All of it can be added up over batches and merged over parts of the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from scodkit.baselines.features import Moments
from scodkit.baselines.mahalanobis import whitening
from scodkit.errors import BatchError, MergeError
from scodkit.factors.rules.rows import activations_along
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.numerics.hashing import hashed, signs
from scodkit.numerics.torch_private import Convolution, get_proxy_mode
from scodkit.scoring.energies import Energies
from scodkit.scoring.score import score
from scodkit.sketch.eigenbasis import Eigenbasis

# the neighbour whose distance counts, where there are so many samples
_NEIGHBOUR = 50

# features beyond which they are added up in so many random groups, each with a random sign: on
# average that keeps squared distances (Charikar et al. 2002)
_WIDEST = 2048

# bytes of distances, and of outputs along basis vectors, at a time
_AT_ONCE = 2**28

# squared distance of unit vectors, below which the rounding of a cosine decides
_SAME = 1e-7

# samples to keep, and bytes for them and their covariance
_FEWEST, _MOST, _BYTES = 1000, 10_000, 2**26

_MOMENTS = ("counts", "means", "scatter", "precision")


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass, with what went into a layer and came out of it.

    Args:
        output: Of the model, ``(B, *shape)``.
        layer_input: Of the layer, ``(B, ...)``.
        layer_output: What the layer made of it, before any hook or layer changed that.
        layer: The layer.
    """

    output: Tensor
    layer_input: Tensor
    layer_output: Any
    layer: nn.Module

    @property
    def features(self) -> Tensor:
        """The layer's input in float64, ``(B, m)``: the mean over positions, if it has any.

        Maps have their channels first, except those that go into a Linear layer or a LayerNorm.
        """
        wide = self.layer_input.double()
        if wide.ndim == 1:
            return wide[:, None]
        channels_last = isinstance(self.layer, (nn.Linear, nn.LayerNorm)) or wide.ndim == 3
        if isinstance(self.layer, Convolution) or not channels_last:
            return wide.flatten(2).mean(2) if wide.ndim > 2 else wide
        return wide.reshape(len(wide), -1, wide.shape[-1]).mean(1)

    @property
    def ends_in_layer(self) -> bool:
        """Whether the model's outputs are those of a Linear layer, all or the first ones.

        One that computes what torch's own does, of a weight that is a parameter: no subclass
        with a forward pass of its own, no parametrisation.
        """
        made, output = self.layer_output, self.output
        return (
            getattr(self.layer.forward, "__func__", None) is nn.Linear.forward
            and "weight" in (own := dict(self.layer.named_parameters()))
            and own.keys() <= {"weight", "bias"}
            and isinstance(made, Tensor)
            and made.dtype == output.dtype
            and made.ndim == output.ndim == 2
            and made.shape[1] >= output.shape[1]
            and torch.equal(made[:, : output.shape[1]].nan_to_num(), output.nan_to_num())
        )


def last_layer(network: Network, call: Inputs) -> str:
    """Return the name of the layer whose input are the features.

    The Linear layer that is called last, for outputs ``(B, d)``; for maps and sequences, and
    for networks without one, the Linear or convolutional layer that is called last.

    Args:
        network: The model, held in eval mode.
        call: Its inputs.

    Raises:
        BatchError: If there is none whose input has the batch as its first axis.
    """
    model = network.running(call)
    called: list[tuple[str, nn.Module]] = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = next(iter((*args, *kwargs.values())), None)
            if _shape(given)[:1] == (call.batch_size,):
                called.append((name, module))

        return hook

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, Convolution)):
                hooks.enter_context(
                    module.register_forward_pre_hook(note(name), with_kwargs=True)
                )
        output = network(call)
    linear = [name for name, module in called if isinstance(module, nn.Linear)]
    names = linear if output.ndim == 2 and linear else [name for name, _ in called]
    if not names:
        raise BatchError(
            "expected a Linear or convolutional layer to take features from, got none whose "
            f"input is ({call.batch_size}, ...), one row per sample; name another module: "
            "Fused(..., layer='...')"
        )
    return names[-1]


def forward_pass(network: Network, call: Inputs, name: str) -> ForwardPass:
    """Run the model once, and keep what goes into a layer and comes out of it.

    Args:
        network: The model, held in eval mode.
        call: Its inputs.
        name: Of the layer.

    Returns:
        The output, and the layer's input and output.

    Raises:
        BatchError: If the layer is not given one tensor of numbers with a row per sample.
    """
    layer = network.running(call).get_submodule(name)
    inputs: list[Tensor] = []
    outputs: list[Any] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # a copy: the layer, or one after it, may change its input in place
        given = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        inputs.extend(tensor.detach().clone() for tensor in list(given)[:1])

    def after(_: nn.Module, __: object, result: Any) -> None:
        outputs.append(result.clone() if isinstance(result, Tensor) else result)

    with (
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, prepend=True),
        torch.no_grad(),
    ):
        output = network(call)
    taken = [tensor for tensor in inputs if tensor.is_floating_point()]
    if len(inputs) != 1 or not taken or _shape(taken[0])[:1] != (call.batch_size,):
        got = [(_shape(tensor), tensor.dtype) for tensor in inputs]
        raise BatchError(
            f"expected the layer {name!r} to be called once, with a floating-point tensor "
            f"({call.batch_size}, ...), one row per sample, got {got}; name another module: "
            "Fused(..., layer='...')"
        )
    return ForwardPass(output, inputs[0], outputs[0], layer)


def _shape(value: object) -> tuple[int, ...]:
    """Return the shape of a tensor; none for others, and for nested tensors."""
    if isinstance(value, Tensor) and not value.is_nested:
        return tuple(value.shape)
    return ()


def variance_of_logits(
    features: Tensor,
    outputs: int,
    basis: Eigenbasis,
    weight: slice,
    bias: slice | None,
    prior_scale: float,
) -> Tensor:
    """Return ``tr V`` of outputs that are a Linear layer's, chosen alone, in closed form.

    Its Jacobian is ``I (x) (a, 1)``: a vector of weights ``u`` moves the output by
    ``U_W a + u_b``.

    Args:
        features: ``a``, ``(B, m)`` in float64.
        outputs: How many of the layer's are the model's, the first ones.
        basis: The eigenbasis of the layer's weights.
        weight: Where its weight sits among the chosen columns.
        bias: Where its bias does; None if it has none.
        prior_scale: ``eps``.

    Returns:
        ``(B,)`` in float64, squared units of the outputs, >= 0.
    """
    vectors, wide = basis.vectors, basis.values.dtype
    rows = vectors[weight][: outputs * features.shape[1]].to(features.device, wide)
    lengths, along = features.square().sum(1), []
    at_once = max(1, _AT_ONCE // (2 * 8 * outputs * basis.rank))
    for part in torch.split(features.to(wide), at_once):
        moved = activations_along(part, rows).double()
        if bias is not None:
            moved += vectors[bias][:outputs, None].to(moved)
        along.append(moved.square().sum(0))
    if bias is not None:
        lengths = lengths + 1
    return score(Energies(outputs * lengths, torch.cat(along)), basis, prior_scale)


def narrowed(features: Tensor) -> Tensor:
    """Return at most 2048 features of each sample, ``(B, m)``, made of more where there are."""
    width = features.shape[1]
    if width <= _WIDEST:
        return features
    place = torch.arange(width, device=features.device)
    signed = features * signs(0, 1, place)
    return features.new_zeros(len(features), _WIDEST).index_add_(
        1, hashed(0, 2, place) % _WIDEST, signed
    )


def _kth_largest(values: Tensor, k: int) -> Tensor:
    """Return the ``k``-th largest value of each row ``(n, m)``, ``(n,)``."""
    if values.device.type != "cpu" or get_proxy_mode() is not None:  # of a recording
        return values.topk(k, dim=1, sorted=False).values.amin(1)
    # three times as fast as torch's topk on a CPU
    place = values.shape[1] - k
    return torch.from_numpy(np.partition(values.numpy(), place, axis=1)[:, place])


def most_samples(features: int, allowed: int) -> int:
    """Return how many samples to keep, in so many bytes with the covariance.

    Args:
        features: Of each sample.
        allowed: Bytes.
    """
    width = min(features, _WIDEST)
    left = min(allowed, _BYTES) - width**2 * torch.float64.itemsize
    return max(_FEWEST, min(_MOST, left // (width * torch.float32.itemsize)))


class FeatureBank:
    """The training features that later ones are compared with.

    Args:
        classes: Number of classes; 1 where samples are of no single one.
        most: Different samples to keep: a random choice that depends on the samples alone.
    """

    def __init__(self, classes: int, most: int) -> None:
        self.most = most
        self._moments = Moments(classes)
        self._samples: list[Tensor] = []  # of length 1, (b, m) in float32
        self._keys: list[Tensor] = []
        self._chosen = False  # whether these are down to the ones to be kept
        self._prepared: dict[str, Tensor] | None = None  # what distances need

    def add(
        self, features: Tensor, labels: Tensor, keys: Tensor, precision: float = 0.0
    ) -> None:
        """Add the features of a batch.

        Args:
            features: ``(B, m)`` in float64, finite.
            labels: The predicted classes, ``(B,)``.
            keys: Random numbers that depend on the samples alone, ``(B,)`` in int64.
            precision: Relative rounding of the features.
        """
        features = self._fitting(features)
        if not len(features):  # none of them were finite
            return
        self._moments.add(features, labels, precision)
        self._keep(normalize(features).float(), keys)

    def _fitting(self, features: Tensor) -> Tensor:
        """Return features as they are kept, ``(B, m)``.

        Raises:
            BatchError: If there are more or fewer than before.
        """
        features, width = narrowed(features), self._moments.means.shape[1]
        if width not in (0, features.shape[1]):
            raise BatchError(
                f"expected {width} features per sample, as there were before, got "
                f"{features.shape[1]}; let all samples have one size, or name a layer behind "
                "the pooling: Fused(..., layer='...')"
            )
        return features

    def emptied(self) -> FeatureBank:
        """Return a bank for more features of the same kind, without any."""
        bank = FeatureBank(self.num_classes, self.most)
        bank._moments.means = torch.zeros_like(self._moments.means)
        return bank

    def merge(self, other: FeatureBank) -> None:
        """Add the features of another bank, which is left alone.

        Raises:
            MergeError: If there are more or fewer classes or features in it.
        """
        mine, theirs = tuple(self._moments.means.shape), tuple(other._moments.means.shape)
        if mine != theirs:
            raise MergeError(
                f"expected as many classes and features in both, got {mine} and {theirs}; fit "
                "one model on samples of one size, or name a layer behind the pooling: "
                "Fused(..., layer='...')"
            )
        self.most = min(self.most, other.most)  # with larger keys, one may have dropped some
        self._moments.merge(other._moments)
        self._keep(other.samples, other.keys)

    def _keep(self, samples: Tensor, keys: Tensor) -> None:
        self._samples.append(samples)
        self._keys.append(keys.to(samples.device))
        self._prepared = None
        self._chosen = False
        if sum(map(len, self._keys)) > 2 * self.most:
            self._choose()

    def _choose(self) -> None:
        """Keep the samples with the smallest keys, in whatever order they came, each once.

        Or samples that come often would be the only ones that are kept.
        """
        keys, samples = torch.cat(self._keys), torch.cat(self._samples)
        order = keys.argsort(stable=True)
        new = torch.ones_like(order, dtype=torch.bool)
        new[1:] = keys[order].diff() != 0
        order = order[new][: self.most]
        self._keys, self._samples = [keys[order]], [samples[order]]
        self._chosen = True

    @property
    def empty(self) -> bool:
        """Whether nothing has been added yet."""
        return not self._keys

    @property
    def samples(self) -> Tensor:
        """The features that are kept, scaled to length 1, ``(n, m)`` in float32."""
        if not self._chosen:
            self._choose()
        return self._samples[0]

    @property
    def keys(self) -> Tensor:
        """Their keys, ``(n,)``."""
        assert self.samples is not None  # which are chosen by them
        return self._keys[0]

    def distance_to_neighbours(self, features: Tensor) -> Tensor:
        """Return the logarithm of the distance to a near neighbour, ``(B,)`` in float64.

        Of features scaled to length 1. The 50th neighbour, or the root of their number for
        fewer than 2,500 of them.

        Args:
            features: ``(B, m)`` in float64.
        """
        bank, count = self.samples, len(self.samples)
        neighbour = min(_NEIGHBOUR, max(1, round(count**0.5)))
        unit = normalize(self._fitting(features)).float()
        cosines = [
            _kth_largest(batch @ bank.T, neighbour)
            for batch in torch.split(unit, max(1, _AT_ONCE // (4 * count)))
        ]
        # of unit vectors: the cosine is 1 - d^2 / 2
        return (2 - 2 * torch.cat(cosines).double()).clamp_min(_SAME).log() / 2

    def distance_to_classes(self, features: Tensor) -> Tensor:
        """Return the logarithm of the squared Mahalanobis distance to the nearest class.

        Args:
            features: ``(B, m)`` in float64.

        Returns:
            ``(B,)`` in float64.
        """
        state = self._ready()
        white = (self._fitting(features) - state["centre"]) @ state["whitener"]
        nearest = torch.cdist(
            white, state["means"], compute_mode="donot_use_mm_for_euclid_dist"
        ).amin(1)
        return 2 * nearest.clamp_min(1e-12).log()

    def _ready(self) -> dict[str, Tensor]:
        if self._prepared is None:
            self._prepared = whitening(self._moments)
        return self._prepared

    def on(self, device: torch.device) -> FeatureBank:
        """Return the bank on a device: this one, if it is there."""
        if self.samples.device == device:
            return self
        moved = {name: tensor.to(device) for name, tensor in self.pack().items()}
        return FeatureBank.unpack(moved, self.most)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self._moments.counts)

    def pack(self) -> dict[str, Tensor]:
        """Return the bank as tensors by name."""
        moments = dict(zip(_MOMENTS, self._moments.sums(), strict=True))
        return {**moments, "samples": self.samples, "keys": self.keys}

    @staticmethod
    def unpack(tensors: Mapping[str, Tensor], most: int) -> FeatureBank:
        """Return the bank that `pack` took apart.

        Args:
            tensors: By name.
            most: Samples to keep.
        """
        bank = FeatureBank(len(tensors["counts"]), most)
        bank._moments = Moments.of(*(tensors[name] for name in _MOMENTS))
        bank._keep(tensors["samples"], tensors["keys"])
        return bank

    @staticmethod
    def merged(banks: Iterable[FeatureBank]) -> FeatureBank:
        """Return the bank of all features of several, which are left alone."""
        first, *others = banks
        whole = FeatureBank.unpack({n: t.clone() for n, t in first.pack().items()}, first.most)
        for other in others:
            whole.merge(other)
        return whole
