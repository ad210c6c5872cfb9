"""Learning projections from the first samples of a fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles import dense_factors
from scodkit import Categorical, Gaussian, Monitor, Projected
from scodkit.errors import EngineFallbackWarning, NonFiniteError, ParameterSelectionError
from scodkit.fit import learn as learning
from scodkit.model.inputs import Inputs
from scodkit.model.projected import Projections

LIKELIHOOD = Categorical()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 12, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(72, 20),
        nn.Tanh(),
        nn.Linear(20, 4),
    ).double()


def data(size: int = 60, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 2, 8, generator=generator, dtype=torch.float64)


def fitted(x: Any, **options: Any) -> Monitor:
    monitor = Monitor(network(), LIKELIHOOD, rank=6, parameters=Projected(**options))
    return monitor.fit(x, progress=False)


def test_batches_without_samples_teach_nothing() -> None:
    x = data()
    whole = fitted([x[:30], x[30:]], rank=3)
    assert fitted([x[:30], x[:0], x[30:]], rank=3).projections == whole.projections


def gradients(x: Tensor, name: str) -> Tensor:
    """Of a weight, ``(n, o, i)``."""
    model = network()
    shape = dict(model.named_parameters())[name].shape
    rows = dense_factors(model, Inputs((x,), {}), LIKELIHOOD, [name])
    return rows.flatten(0, 1).view(-1, shape[0], shape[1:].numel())


def kept(moment: Tensor, count: int) -> float:
    """Sum of the leading eigenvalues."""
    return float(torch.linalg.eigvalsh(moment)[-count:].sum())


def leading(moment: Tensor, rank: int) -> Tensor:
    """Projector on the leading eigenvectors."""
    vectors = torch.linalg.eigh(moment)[1][:, -rank:]
    return vectors @ vectors.T


def assert_leading(found: Tensor | None, moment: Tensor) -> None:
    """That columns span the leading eigenvectors of a moment."""
    assert found is not None
    count = found.shape[1]
    torch.testing.assert_close(found.T @ found, torch.eye(count).double())
    torch.testing.assert_close(found @ found.T, leading(moment, count), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["3.weight", "0.weight"])
@pytest.mark.parametrize("short", [512, 4])
def test_columns_are_leading_eigenvectors(
    name: str, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "_SHORT", short)
    monkeypatch.setattr(learning, "_ROUNDS", 40)  # subspace iteration converges
    pair = fitted([data()], rank=3).projections.pairs[name]
    g = gradients(data(), name)
    of_in, of_out = (g.mT @ g).sum(0), (g @ g.mT).sum(0)
    assert_leading(pair.into, of_in)
    assert_leading(pair.out, of_out)


def test_entries_are_those_with_the_largest_products_of_all_weights() -> None:
    pairs = fitted([data()], rank=3).projections.pairs
    squares, taken = [], []
    for name in ("0.weight", "3.weight", "5.weight"):
        g = gradients(data(), name)
        of_out, of_in = (
            torch.linalg.eigvalsh(moment).flip(0)[:12]
            for moment in ((g @ g.mT).sum(0), (g.mT @ g).sum(0))
        )
        squares.append(of_out[:, None] * of_in / g.square().sum())
        squares[-1][0, 0] = torch.inf  # every weight has one
        pair = pairs[name]
        mask = torch.zeros(pair.shape, dtype=torch.bool).flatten()
        mask[slice(None) if pair.kept is None else pair.kept] = True
        full = torch.zeros(squares[-1].shape, dtype=torch.bool)
        full[: pair.shape[0], : pair.shape[1]] = mask.view(pair.shape)
        taken.append(full)
    flat, mask = (torch.cat([each.flatten() for each in both]) for both in (squares, taken))
    assert int(mask.sum()) == 3 * 3**2
    assert set(flat.topk(27).indices.tolist()) == set(mask.nonzero()[:, 0].tolist())


def test_a_few_rounds_find_what_a_few_columns_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_SHORT", 4)
    few = data(3)  # gradients of the linear layer have three inputs, less than 4 x rank
    g = gradients(few, "3.weight")
    pair = fitted([few], rank=3).projections.pairs["3.weight"]
    assert pair.into is not None
    within = pair.into @ pair.into.T
    assert torch.linalg.matrix_rank(g.flatten(0, 1)) == 3
    if pair.shape[1] >= 3:
        torch.testing.assert_close(g @ within, g)
    else:
        assert_leading(pair.into, (g.mT @ g).sum(0))


def test_kfac_takes_activations_and_gradients_at_outputs_apart() -> None:
    x = data()
    pair = fitted([x], rank=3, moments="kfac").projections.pairs["3.weight"]
    model = network()
    with torch.no_grad():
        a = model[:3](x)
    assert_leading(pair.into, a.T @ a)
    head = dense_factors(model, Inputs((x,), {}), LIKELIHOOD, ["3.bias"]).flatten(0, 1)
    assert_leading(pair.out, head.T @ head)


def test_kfac_of_a_convolution_is_of_its_patches() -> None:
    x = data()
    pair = fitted([x], rank=3, moments="kfac").projections.pairs["0.weight"]
    patches = x.unfold(2, 3, 1).transpose(1, 2).flatten(0, 1).flatten(1)
    assert_leading(pair.into, patches.T @ patches)


def test_samples_are_read_ahead_of_a_stream_that_is_read_once() -> None:
    x = data()

    def stream() -> Iterator[Tensor]:
        yield from x.split(10)

    one, other = fitted(stream(), rank=3, samples=25), fitted([x], rank=3, samples=25)
    assert one.basis.num_data == len(x)
    g = gradients(x[:25], "3.weight")
    for own in (one, other):
        assert_leading(own.projections.pairs["3.weight"].into, (g.mT @ g).sum(0))
    assert other.projections == fitted([x[:25], x[25:]], rank=3, samples=25).projections
    assert other.projections != fitted([x], rank=3, samples=26).projections
    torch.testing.assert_close(one.score(data(seed=1)), other.score(data(seed=1)))


def test_bad_samples_are_left_out() -> None:
    x = data()
    x[4, 0, 2] = torch.nan
    monitor = Monitor(network(), LIKELIHOOD, rank=6, parameters=Projected(rank=3))
    monitor.fit([x], progress=False, on_bad="skip")
    assert monitor.skipped == 1
    good = torch.cat([x[:4], x[5:]])
    g = gradients(good, "3.weight")
    assert_leading(monitor.projections.pairs["3.weight"].into, (g.mT @ g).sum(0))


def test_gradients_that_overflow_are_refused() -> None:
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    monitor = Monitor(model, Gaussian(), rank=2, parameters=Projected(rank=2))
    with pytest.raises(NonFiniteError, match="given"):
        monitor.fit([torch.full((5, 9), 1e38)], progress=False, on_bad="skip")


def test_a_model_without_rules_is_learnt_from_by_plain_autograd() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(9).double())

        def forward(self, x: Tensor) -> Tensor:
            mixed = torch.linalg.matrix_exp(0.1 * self.weight).mul(x[:, None]).sum(2)
            return mixed * torch.arange(1, 10)

    x = torch.randn(20, 9, generator=torch.Generator().manual_seed(0)).double()
    monitor = Monitor(Odd(), Gaussian(), rank=4, parameters=Projected(rank=2))
    monitor.fit([x], progress=False)
    g = dense_factors(Odd(), Inputs((x,), {}), Gaussian()).view(-1, 9, 9)
    pair = monitor.projections.pairs["weight"]
    assert_leading(pair.into, (g.mT @ g).sum(0))
    assert_leading(pair.out, (g @ g.mT).sum(0))


def test_random_ones_need_no_data_and_depend_on_the_seed() -> None:
    one = fitted([data()], rank=3, moments="random").projections
    assert one == fitted([data(seed=1)], rank=3, moments="random").projections
    assert one != fitted([data()], rank=3, moments="random", seed=1).projections


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank as a whole number"),
        ({"samples": 2.5}, "samples as a whole number"),
        ({"moments": "kron"}, "moments='gradient'"),
        ({"layers": Projected()}, "layers to project"),
        ({"given": "file"}, "given=monitor.projections"),
        ({"seed": "one"}, "seed as a whole number"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterSelectionError, match=words):
        Projected(**options)


def test_given_projections_must_be_those_of_the_weights() -> None:
    given: Projections = fitted([data()], rank=3).projections
    other = nn.Sequential(nn.Linear(30, 30)).double()
    monitor = Monitor(other, LIKELIHOOD, parameters=Projected(given=given))
    with pytest.raises(ParameterSelectionError):
        monitor.fit([torch.randn(20, 30).double()], progress=False)


class InChunks(nn.Module):
    """Runs large batches a few samples at a time, which no fast engine can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(few) for few in x.split(4)])


def test_batches_that_cannot_be_followed_are_learnt_from_too() -> None:
    in_chunks = Monitor(InChunks(), LIKELIHOOD, rank=6, parameters=Projected(rank=3))
    with pytest.warns(EngineFallbackWarning):
        in_chunks.fit([data()], progress=False)
    direct = fitted([data()], rank=3)
    torch.testing.assert_close(in_chunks.score(data(7, 1)), direct.score(data(7, 1)))


def test_given_projections_say_of_which_layers_they_are() -> None:
    given = fitted([data()], rank=3).projections
    with pytest.raises(ParameterSelectionError, match="given="):
        Projected(layers=["0.*"], given=given)


def test_small_weights_stay_whole_and_the_size_is_known_ahead() -> None:
    monitor = fitted([data()], rank=3)
    shapes = {block.name: block.shape for block in monitor.fitted.parameters.blocks}
    assert sum(math.prod(shapes[f"{layer}.weight"]) for layer in (0, 3, 5)) == 3 * 9
    assert shapes["3.bias"] == (20,)
    whole, size = monitor.fitted.parameters.in_full(), monitor.fitted.parameters.num_parameters
    most = Projected(rank=3).most(whole)
    assert size == most == monitor.plan(data()).num_parameters
