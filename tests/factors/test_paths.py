"""Models that take other paths for other batches: each is as right as the first, or is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from draws import noise
from engines import Uses
from scodkit import Gaussian, Monitor
from scodkit.errors import EngineFallbackWarning

SHORT, LONG = 8, 10  # lengths of the fit, and of a batch that takes another path


class Rounded(torch.autograd.Function):
    """A straight-through estimator, as of quantised training."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return (4 * w).round() / 4

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        return delta


def padded(m: Any, x: Tensor) -> Tensor:
    """Fill windows of four with a learned token."""
    if x.shape[1] % 4:
        length = x.shape[1]
        x = F.pad(x, (0, 0, 0, 4 - length % 4))
        x[:, length:] = m.p
    return m.o(torch.tanh(m.i(x)).mean(1))


def in_place_on_a_view_of_an_output(m: Any, x: Tensor) -> Tensor:
    y = m.i(x)
    if x.shape[1] > SHORT:
        y[:, :SHORT].add_(m.p)
    else:
        y = y + m.p
    return m.o(torch.tanh(y).mean(1))


def in_place_on_a_view_of_the_input(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] > SHORT:
        x = x.clone()
        x[:, SHORT:].add_(m.p)
    return m.o(torch.tanh(m.i(x)).mean(1))


def rounded_weights(m: Any, x: Tensor) -> Tensor:
    weight = Rounded.apply(m.i.weight) if x.shape[1] > SHORT else m.i.weight
    return m.o(torch.tanh(F.linear(x, weight, m.i.bias) + m.p).mean(1))


def by_fourier_transform(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    kernel = torch.exp(-m.p.abs()[:, None] * torch.arange(length, dtype=x.dtype))
    u = m.i(x).mT
    if length <= SHORT:
        y = F.conv1d(F.pad(u, (length - 1, 0)), kernel.flip(-1)[:, None], groups=u.shape[1])
    else:
        spectra = torch.fft.rfft(u, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        y = torch.fft.irfft(spectra, 2 * length)[..., :length]
    return m.o(torch.relu(y).mean(2))


def distances_to_centres(m: Any, x: Tensor) -> Tensor:
    """torch's batching rule of cdist is wrong for fewer points than 26."""
    x = x.repeat(1, 3 if x.shape[1] > SHORT else 1, 1)  # 8 or 30
    return m.o(torch.exp(-torch.cdist(m.i(x), m.c)).mean(1))


PATHS = [
    padded,
    in_place_on_a_view_of_an_output,
    in_place_on_a_view_of_the_input,
    rounded_weights,
    by_fourier_transform,
]


def model_of(forward: Callable[..., Tensor], width: int = 8) -> nn.Module:
    model = Uses(forward, p=(8,), c=(5, 8), i=nn.Linear(8, 8), o=nn.Linear(width, 2))
    return drawn(model)


def drawn(model: nn.Module) -> nn.Module:
    """The model with its own parameters drawn, in float64."""
    model = model.double()
    with torch.no_grad():
        for seed, own in enumerate(model.parameters(recurse=False)):
            own.copy_(noise(*own.shape, seed=seed))
    return model


def alone(monitor: Monitor, *tensors: Tensor) -> Tensor:
    size = len(tensors[0])
    samples = [tuple(t[i : i + 1] for t in tensors) for i in range(size)]
    return torch.cat([monitor.score(s if len(s) > 1 else s[0]) for s in samples])


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize("forward", PATHS, ids=lambda f: f.__name__)
def test_another_path_is_checked_when_it_is_first_taken(forward) -> None:
    model = model_of(forward)
    monitor = Monitor(model, Gaussian(), rank=5)
    monitor.fit([noise(6, SHORT, 8, seed=i) for i in range(3)], progress=False)
    for seed, length in enumerate((SHORT, LONG, LONG - 1, SHORT)):
        x = noise(6, length, 8, seed=9 + seed)
        torch.testing.assert_close(monitor.score(x), alone(monitor, x), rtol=1e-9, atol=0)


def test_a_transform_that_is_wrong_for_some_shapes_is_left_at_these() -> None:
    monitor = Monitor(model_of(distances_to_centres, 5), Gaussian(), rank=5)
    with pytest.warns(EngineFallbackWarning, match="left to FunctionalEngine"):
        monitor.fit([noise(6, LONG, 8, seed=i) for i in range(3)], progress=False)
    short, long = noise(6, SHORT, 8, seed=9), noise(6, LONG, 8, seed=10)
    with pytest.warns(EngineFallbackWarning, match="these shapes are left to LoopEngine"):
        found = monitor.score(short)
    torch.testing.assert_close(found, alone(monitor, short), rtol=1e-9, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told once
        torch.testing.assert_close(monitor.score(short), found)
        torch.testing.assert_close(monitor.score(long), alone(monitor, long), rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize(
    "part",
    [
        lambda p, d, x: p[d[0] : d[0] + x.shape[1]],
        lambda p, d, x: p[d.min() : d.min() + 1],
        lambda p, d, x: (2 * p)[d[0] : d[0] + 1],
        lambda p, d, x: p[None][:, d[0] : d[0] + x.shape[1]],
    ],
    ids=["window", "one", "derived", "second axis"],
)
def test_slices_whose_bounds_are_tensors_are_those_of_the_batch(part) -> None:
    def forward(m: Any, x: Tensor, d: Tensor) -> Tensor:
        return m.o(torch.tanh(m.i(x) + part(m.p, d, x)).mean(1))

    model = drawn(Uses(forward, p=(20, 8), i=nn.Linear(8, 8), o=nn.Linear(8, 2)))
    batches = [(noise(4, 5, 8, seed=i), torch.full((4,), i)) for i in (0, 3, 7, 12)]
    monitor = Monitor(model, Gaussian(), rank=5, inputs=lambda batch: batch)
    monitor.fit(batches, progress=False)
    for batch in batches:
        torch.testing.assert_close(
            monitor.score(batch), alone(monitor, *batch), rtol=1e-9, atol=0
        )
