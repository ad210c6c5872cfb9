"""Trains a domain's network by its recipe, and keeps the epoch that was best held out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm.auto import tqdm

from scodbench.samples import Samples
from scodkit.errors import NonFiniteError, OptionError
from scodkit.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)

_EVALUATE = 1000  # samples at a time without gradients


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Args:
        optimiser: ``torch.optim.SGD`` or ``torch.optim.Adam``.
        rate: Its learning rate.
        batch: Samples a step.
        epochs: Passes over the data.
        momentum: Of SGD.
        start: Changes the first weights of each module, after torch's own.
        anneal: Let the rate go to zero along a cosine.
        mixed_precision: Compute layers in bfloat16, where torch's autocast holds it to be safe;
            weights, loss and held-out loss stay float32.

    The same recipe and seed give the same weights on one kind of CPU; on a GPU others, which
    differ by rounding from run to run. Trained networks are kept by recipe, not by device.
    """

    optimiser: type[torch.optim.Optimizer]
    rate: float
    batch: int
    epochs: int
    momentum: float | None = None
    start: Callable[[nn.Module], None] | None = None
    anneal: bool = False
    mixed_precision: bool = False

    def make_optimiser(
        self, parameters: Iterable[nn.Parameter], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return the optimiser of some weights, which are on a device."""
        more: Any = {} if self.momentum is None else {"momentum": self.momentum}
        if device.type == "cuda":
            more["fused"] = True  # one kernel for all weights
        return self.optimiser(parameters, lr=self.rate, **more)  # type: ignore[call-arg]

    def describe(self) -> dict[str, object]:
        """Return what the trained weights depend on, as plain data."""
        start = None if self.start is None else self.start.__name__
        own = {k: v for k, v in vars(self).items() if k not in ("optimiser", "start")}
        return {**own, "optimiser": self.optimiser.__name__, "start": start}


@dataclass(frozen=True)
class Trained:
    """What training came to.

    Args:
        model: The network at its best epoch, in eval mode.
        loss: Mean loss held out, at that epoch.
        epoch: Which it was, from 1.
        last_loss: Mean loss held out after the last epoch.
    """

    model: nn.Module
    loss: float
    epoch: int
    last_loss: float


def train(
    build: Callable[[], nn.Module],
    likelihood: Likelihood,
    recipe: Recipe,
    data: tuple[Samples, Samples],
    seed: int,
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> Trained:
    """Train a network from a seed.

    Args:
        build: Makes it.
        likelihood: Whose negative logarithm is the loss.
        recipe: How.
        data: What to train on, and what to choose the epoch with.
        seed: Of first weights and of the order; torch's own generators are left alone.
        device: Where.
        progress: Show a progress bar.

    Returns:
        The network at the epoch with the least loss held out.

    Raises:
        NonFiniteError: If the loss was finite after no epoch.
    """
    device = torch.device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        if recipe.start is not None:
            model.apply(recipe.start)
    # small convolutions are twice as fast on a CPU with the channels last
    _lay_out(model.to(device), torch.channels_last).train()
    optimiser = recipe.make_optimiser(model.parameters(), device)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, recipe.epochs)
    best: Trained | None = None
    bar = tqdm(range(1, recipe.epochs + 1), "training", unit="epoch", disable=not progress)
    for epoch in bar:
        order = data[0].shuffled(seed * 1_000_003 + epoch)
        for x, y in order.batches(recipe.batch, device):
            optimiser.zero_grad()
            output = _output(model, x, recipe)
            loss(likelihood, output, y).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        if recipe.anneal:
            schedule.step()
        found = mean_loss(model, likelihood, data[1], device)
        bar.set_postfix(loss=found)
        if math.isfinite(found) and (best is None or found < best.loss):
            best = Trained(copy.deepcopy(model).eval(), found, epoch, found)
    if best is None:
        raise NonFiniteError(
            f"expected an epoch with a finite loss held out, got {found} after the last of "
            f"{recipe.epochs}; lower the rate"
        )
    model = _lay_out(best.model, torch.contiguous_format)
    return Trained(model, best.loss, best.epoch, found)


def _output(model: nn.Module, x: Tensor, recipe: Recipe) -> Tensor:
    if recipe.mixed_precision and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)  # as the weights are
    with torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.mixed_precision):
        output: Tensor = model(x)
    return output.float()


def _lay_out(model: nn.Module, memory_format: torch.memory_format) -> nn.Module:
    return model.to(memory_format=memory_format)  # type: ignore[call-overload,no-any-return]


def mean_loss(
    model: nn.Module, likelihood: Likelihood, samples: Samples, device: torch.device | str
) -> float:
    """Return the mean loss over samples in eval mode; the mode is put back."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        sums = [
            float(loss(likelihood, model(x), y)) * len(x)
            for x, y in samples.batches(_EVALUATE, device)
        ]
    model.train(was_training)
    return sum(sums) / len(samples)


def loss(likelihood: Likelihood, output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss a likelihood asks for, up to constants.

    Args:
        likelihood: `Gaussian` (mean squared error), `HeteroscedasticGaussian`, `Bernoulli` or
            `Categorical`.
        output: Of the network, ``(B, d)``, or with the axes of the likelihood.
        targets: ``(B, d)`` numbers, or classes ``(B,)``, of maps and sequences ``(B, ...)``.

    Raises:
        OptionError: If the likelihood is another.
    """
    if isinstance(likelihood, Gaussian):
        return functional.mse_loss(output, targets)
    if isinstance(likelihood, Bernoulli):
        return functional.binary_cross_entropy_with_logits(output, targets)
    if isinstance(likelihood, HeteroscedasticGaussian):
        mean, log_variance = likelihood.halves(output)
        return functional.gaussian_nll_loss(mean, targets, log_variance.exp())
    if isinstance(likelihood, Categorical):
        logits = likelihood.logits(output)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    raise OptionError(
        "expected Gaussian, HeteroscedasticGaussian, Bernoulli or Categorical, got "
        f"{likelihood!r}"
    )
