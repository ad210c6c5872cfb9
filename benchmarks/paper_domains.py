"""Four of the SCOD paper's domains on real data, with networks trained by its recipes.

Data comes from the folder named by SCODKIT_DATA (see `real_nets`), with ``fashion_mnist/``
beside ``mnist/`` and ``wine/``. Trained networks are kept as safetensors in a cache, by seed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample

import paper_nets
from real_nets import data_folder, idx_images, idx_labels, wine_table
from scodkit.likelihoods import Likelihood

CACHE = Path(__file__).parent / ".cache"
FIT_ON = 5000
TEST_ON = 2000

Split = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Splits:
    """Data of a domain: what the network is trained on, and what methods are judged on."""

    train: Split
    known: Tensor
    novel: dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: loss, optimiser, epochs, batch size, first weights."""

    loss: nn.Module
    optimiser: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    epochs: int
    batch: int
    start: Callable[[nn.Module], None] = lambda module: None


@dataclass(frozen=True)
class PaperDomain:
    """A domain: its network with sketch size and rank, its data, its recipe."""

    net: paper_nets.Domain
    splits: Callable[[], Splits]
    recipe: Recipe
    # eigenvectors of the Hessian that Local Ensembles keep in the paper
    local_rank: int

    @property
    def name(self) -> str:
        """Its name."""
        return self.net.name

    @property
    def likelihood(self) -> Likelihood:
        """What distribution the output parametrises."""
        return self.net.likelihood

    def model(self, seed: int) -> nn.Module:
        """Return the network trained from a seed, from the cache where it is there."""
        torch.manual_seed(seed)
        model = self.net.build()
        path = CACHE / f"{self.name.replace(' ', '_')}_{seed}.safetensors"
        if path.exists():
            model.load_state_dict(load_file(path))
            return model.eval()
        model.apply(self.recipe.start)
        _train(model, self.splits().train, self.recipe)
        CACHE.mkdir(exist_ok=True)
        save_file(model.state_dict(), path)
        return model.eval()


def _train(model: nn.Module, data: Split, recipe: Recipe) -> None:
    optimiser = recipe.optimiser(list(model.parameters()))
    x, y = data
    for _ in range(recipe.epochs):
        for chosen in torch.randperm(len(x)).split(recipe.batch):
            optimiser.zero_grad()
            recipe.loss(model(x[chosen]), y[chosen]).backward()
            optimiser.step()


def _momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def _xavier(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight, gain=5 / 3)


@functools.cache
def _digits(split: str, folder: str = "mnist") -> Split:
    where = data_folder() / folder
    return idx_images(where, split), idx_labels(where, split)


def _some(x: Tensor, count: int = TEST_ON) -> Tensor:
    """Return some samples, the same every time."""
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:count]]


@functools.cache
def wine() -> Splits:
    """Return red wine to learn, white wine and noise in its ranges to tell from it."""
    generator = torch.Generator().manual_seed(0)
    red, white = wine_table("red"), wine_table("white")
    red = red[torch.randperm(len(red), generator=generator)]
    low, high = white[:, :11].amin(0), white[:, :11].amax(0)
    noise = low + (high - low) * torch.rand(TEST_ON, 11, generator=generator)
    novel = {"white wine": _some(white[:, :11]), "noise": noise}
    return Splits((red[:1000, :11], red[:1000, 11:]), red[1000:, :11], novel)


def _rotated(digit: int, split: str, around: float, seed: int) -> Split:
    """Return a digit turned by angles around one, with the angles in radians ``(n, 1)``."""
    x, y = _digits(split)
    x = x[y == digit]
    generator = torch.Generator().manual_seed(seed)
    angle = around + math.pi / 4 * torch.randn(len(x), generator=generator)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros(len(x))
    turn = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3)
    grid = affine_grid(turn, list(x.shape), align_corners=False)
    background = x.amin()
    turned = grid_sample(x - background, grid, align_corners=False) + background
    return turned, angle[:, None]


@functools.cache
def rotated_mnist() -> Splits:
    """Return the digit 2 with its angle; the digit 5 and angles around pi as unknown."""
    novel = {
        "digit 5": _some(_rotated(5, "t10k", 0.0, 2)[0]),
        "turned by pi": _some(_rotated(2, "t10k", math.pi, 3)[0]),
    }
    return Splits(_rotated(2, "train", 0.0, 0), _rotated(2, "t10k", 0.0, 1)[0], novel)


def _classes(count: int) -> Splits:
    x, y = _digits("train")
    test_x, test_y = _digits("t10k")
    novel = {
        f"digits {count}-9": _some(test_x[test_y >= count]),
        "fashion": _some(_digits("t10k", "fashion_mnist")[0]),
    }
    known = _some(test_x[test_y < count])
    return Splits((x[y < count], y[y < count]), known, novel)


@functools.cache
def binary_mnist() -> Splits:
    """Return the digits 0 and 1 with a number in [0, 1]; other digits and clothes."""
    found = _classes(2)
    x, y = found.train
    return Splits((x, y.float()[:, None]), found.known, found.novel)


@functools.cache
def mnist() -> Splits:
    """Return the digits 0-4 with their class; other digits and clothes."""
    return _classes(5)


DOMAINS = {
    "wine": PaperDomain(
        paper_nets.WINE, wine, Recipe(nn.MSELoss(), _adam, 20, 5, _xavier), local_rank=20
    ),
    "rotated mnist": PaperDomain(
        paper_nets.ROTATED,
        rotated_mnist,
        Recipe(nn.MSELoss(), _momentum, 50, 16),
        local_rank=50,
    ),
    "binary mnist": PaperDomain(
        paper_nets.BINARY,
        binary_mnist,
        Recipe(nn.BCEWithLogitsLoss(), _momentum, 5, 16),
        local_rank=50,
    ),
    "mnist 0-4": PaperDomain(
        paper_nets.MNIST,
        mnist,
        Recipe(nn.CrossEntropyLoss(), _momentum, 20, 16),
        local_rank=100,
    ),
}
