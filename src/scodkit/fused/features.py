"""Features of training data (the inputs of a network's last layer) in a few megabytes.

The mean of each predicted class, one covariance for all classes, and a random subset. All of
it can be accumulated over batches and merged over parts of the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from scodkit.baselines.features import Moments
from scodkit.baselines.mahalanobis import whitening
from scodkit.errors import BatchError
from scodkit.factors.rules.layer import activations_along
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.numerics.hashing import hashed, signs
from scodkit.numerics.torch_private import Convolution
from scodkit.scoring.score import Energies, score
from scodkit.sketch.eigenbasis import Eigenbasis

# the neighbour whose distance counts, if there are enough samples
_NEIGHBOUR = 50

# more features than this are hashed into so many groups and summed with random signs (count
# sketch): squared distances are kept in expectation (Charikar et al. 2002)
_WIDEST = 2048

# squared distance of unit vectors, below which rounding of a cosine decides
_SAME = 1e-7

# bytes of distances at a time
_AT_ONCE = 2**28

# samples to keep, and bytes for them and their covariance
_FEWEST, _MOST, _BYTES = 1000, 10_000, 2**26

_MOMENTS = ("counts", "means", "scatter", "precision")


@dataclass(frozen=True)
class ForwardPass:
    """The output of one forward pass, with the input and output of a layer.

    Args:
        output: Of the model, ``(B, *shape)``.
        layer_input: Of the layer, ``(B, ...)``.
        layer_output: Of the layer.
        layer: The layer.
    """

    output: Tensor
    layer_input: Tensor
    layer_output: Any
    layer: nn.Module

    @property
    def features(self) -> Tensor:
        """The layer's input in float64, ``(B, m)``: the mean over positions, if it has any."""
        wide = self.layer_input.double()
        if wide.ndim == 1:
            return wide[:, None]
        if isinstance(self.layer, Convolution):
            return wide.flatten(2).mean(2)
        return wide.reshape(len(wide), -1, wide.shape[-1]).mean(1)

    @property
    def ends_in_layer(self) -> bool:
        """Whether the model's outputs are those of a Linear layer, all or the first ones."""
        last, output = self.layer_output, self.output
        return (
            isinstance(self.layer, nn.Linear)
            and isinstance(last, Tensor)
            and last.ndim == output.ndim == 2
            and last.shape[1] >= output.shape[1]
            and torch.equal(last[:, : output.shape[1]].nan_to_num(), output.nan_to_num())
        )


def last_layer(network: Network, call: Inputs) -> str:
    """Return the name of the layer whose inputs are the features.

    For outputs ``(B, d)`` the Linear layer that is called last; for maps and sequences, and
    for networks without a Linear layer, the Linear or convolutional layer called last.

    Args:
        network: The model, in eval mode.
        call: Its inputs.

    Raises:
        BatchError: If there is none whose input has the batch as its first axis.
    """
    model = network.running(call)
    called: list[tuple[str, nn.Module]] = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and len(args[0]) == call.batch_size:
                called.append((name, module))

        return hook

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, Convolution)):
                hooks.enter_context(module.register_forward_pre_hook(note(name)))
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
    """Run the model once, and record the input and output of a layer.

    Args:
        network: The model, in eval mode.
        call: Its inputs.
        name: Of the layer.

    Returns:
        The output, and the layer's input and output.

    Raises:
        BatchError: If the layer is not given one tensor with a row per sample.
    """
    layer = network.running(call).get_submodule(name)
    inputs: list[Tensor] = []
    outputs: list[Any] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # a copy: the layer, or one after it, may change its input in place
        given = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        inputs.extend(tensor.detach().clone() for tensor in list(given)[:1])

    def after(_: nn.Module, __: object, result: Any) -> None:
        outputs.append(result)

    with (
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after),
        torch.no_grad(),
    ):
        output = network(call)
    if len(inputs) != 1 or inputs[0].shape[:1] != (call.batch_size,):
        shapes = [tuple(tensor.shape) for tensor in inputs]
        raise BatchError(
            f"expected the layer {name!r} to be called once, with a tensor "
            f"({call.batch_size}, ...), one row per sample, got {shapes}; name another module: "
            "Fused(..., layer='...')"
        )
    return ForwardPass(output, inputs[0], outputs[0], layer)


def variance_of_logits(
    features: Tensor,
    outputs: int,
    basis: Eigenbasis,
    weight: slice,
    bias: slice | None,
    prior_scale: float,
) -> Tensor:
    """Return ``tr V`` of the outputs of a Linear layer, chosen alone, in closed form.

    Its Jacobian is ``I (x) (a, 1)``: a vector of weights ``u`` moves the output by
    ``U_W a + u_b``.

    Args:
        features: ``a``, ``(B, m)`` in float64.
        outputs: How many of the layer's outputs are the model's, counted from the first.
        basis: The eigenbasis of the layer's weights.
        weight: Columns of its weight among the chosen ones.
        bias: Columns of its bias; None if it has none.
        prior_scale: ``eps``.

    Returns:
        ``(B,)`` in float64, squared units of the outputs, >= 0.
    """
    vectors = basis.vectors
    rows = vectors[weight][: outputs * features.shape[1]]
    moved = activations_along(features.to(vectors.dtype), rows).double()
    lengths = features.square().sum(1)
    if bias is not None:
        moved = moved + vectors[bias][:outputs, None].double()
        lengths = lengths + 1
    return score(Energies(outputs * lengths, moved.square().sum(0)), basis, prior_scale)


def narrowed(features: Tensor) -> Tensor:
    """Return at most 2048 features of each sample, ``(B, m)``: a count sketch of more."""
    width = features.shape[1]
    if width <= _WIDEST:
        return features
    place = torch.arange(width, device=features.device)
    signed = features * signs(0, 1, place)
    return features.new_zeros(len(features), _WIDEST).index_add_(
        1, hashed(0, 2, place) % _WIDEST, signed
    )


def most_samples(features: int, allowed: int) -> int:
    """Return how many samples to keep, within a limit that includes the covariance.

    Args:
        features: Number of features per sample.
        allowed: Bytes.
    """
    width = min(features, _WIDEST)
    left = min(allowed, _BYTES) - width**2 * torch.float64.itemsize
    return max(_FEWEST, min(_MOST, left // (width * torch.float32.itemsize)))


class FeatureBank:
    """The training features that later ones are compared with.

    Args:
        classes: Number of classes; 1 if a sample has no single class.
        most: Samples to keep: a random subset that depends on the samples alone.
    """

    def __init__(self, classes: int, most: int) -> None:
        self.most = most
        self._moments = Moments(classes)
        self._samples: list[Tensor] = []  # of unit norm, (b, m) in float32
        self._keys: list[Tensor] = []
        self._prepared: dict[str, Tensor] | None = None  # cache for distances

    def add(
        self, features: Tensor, labels: Tensor, keys: Tensor, precision: float = 0.0
    ) -> None:
        """Add the features of a batch.

        Args:
            features: ``(B, m)`` in float64, finite.
            labels: The predicted classes, ``(B,)``.
            keys: Random numbers that depend on the samples alone, ``(B,)`` in int64.
            precision: Relative rounding error of the features.

        Raises:
            BatchError: If there are more or fewer features than before.
        """
        features, width = narrowed(features), self._moments.means.shape[1]
        if width not in (0, features.shape[1]):
            raise BatchError(
                f"expected {width} features per sample, as there were before, got "
                f"{features.shape[1]}; let all samples have one size, or name a layer behind "
                "the pooling: Fused(..., layer='...')"
            )
        self._moments.add(features, labels, precision)
        self._keep(normalize(features).float(), keys)

    def merge(self, other: FeatureBank) -> None:
        """Add the features of another bank, which is not modified."""
        self._moments.merge(other._moments)
        self._keep(other.samples, other.keys)

    def _keep(self, samples: Tensor, keys: Tensor) -> None:
        self._samples.append(samples)
        self._keys.append(keys.to(samples.device))
        self._prepared = None
        if sum(map(len, self._keys)) > 2 * self.most:
            self._choose()

    def _choose(self) -> None:
        """Keep the samples with the smallest keys, independent of their order."""
        keys, samples = torch.cat(self._keys), torch.cat(self._samples)
        order = keys.argsort(stable=True)[: self.most]
        self._keys, self._samples = [keys[order]], [samples[order]]

    @property
    def samples(self) -> Tensor:
        """The kept features, scaled to unit norm, ``(n, m)`` in float32."""
        if len(self._keys) > 1 or len(self._keys[0]) > self.most:
            self._choose()
        return self._samples[0]

    @property
    def keys(self) -> Tensor:
        """Their keys, ``(n,)``."""
        assert self.samples is not None  # the access selects samples and keys
        return self._keys[0]

    def distance_to_neighbours(self, features: Tensor) -> Tensor:
        """Return the log of the distance to the k-th nearest neighbour, ``(B,)`` in float64.

        Features are scaled to unit norm. ``k`` is 50, or the square root of the number of
        samples if there are fewer than 2,500.

        Args:
            features: ``(B, m)`` in float64.
        """
        bank, count = self.samples, len(self.samples)
        neighbour = min(_NEIGHBOUR, max(1, round(count**0.5)))
        found = [
            (batch @ bank.T).topk(neighbour, dim=1, sorted=False).values.amin(1)
            for batch in torch.split(
                normalize(narrowed(features)).float(), max(1, _AT_ONCE // (4 * count))
            )
        ]
        # of unit vectors: the cosine is 1 - d^2 / 2
        return (2 - 2 * torch.cat(found).double()).clamp_min(_SAME).log() / 2

    def distance_to_classes(self, features: Tensor) -> Tensor:
        """Return the log of the squared Mahalanobis distance to the nearest class.

        Args:
            features: ``(B, m)`` in float64.

        Returns:
            ``(B,)`` in float64.
        """
        state = self._ready()
        white = (narrowed(features) - state["centre"]) @ state["whitener"]
        nearest = torch.cdist(
            white, state["means"], compute_mode="donot_use_mm_for_euclid_dist"
        ).amin(1)
        return 2 * nearest.clamp_min(1e-12).log()

    def _ready(self) -> dict[str, Tensor]:
        if self._prepared is None:
            self._prepared = whitening(self._moments)
        return self._prepared

    def on(self, device: torch.device) -> FeatureBank:
        """Return the bank on a device: itself if it is already there."""
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
        """Return the bank from the tensors of `pack`.

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
        """Return a bank with the features of several, which are not modified."""
        first, *others = banks
        whole = FeatureBank.unpack({n: t.clone() for n, t in first.pack().items()}, first.most)
        for other in others:
            whole.merge(other)
        return whole
