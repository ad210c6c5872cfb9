"""Memory that is counted on a few samples, against what larger batches take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cases import CASES, Case
from peaks import peak_of
from scodkit import Categorical
from scodkit.factors.choose import choose_engine, choose_jacobian
from scodkit.factors.live_bytes import LiveBytes, Memory
from scodkit.factors.pieces import FactorSource
from scodkit.factors.products import Curvature, Jacobian, ProductSource
from scodkit.model.network import Network
from scodkit.model.parameters import select

# --- Counting ------------------------------------------------------------------------------


def test_what_is_alive_is_counted_and_views_are_not() -> None:
    given = torch.zeros(1000)
    live = LiveBytes()
    with live:
        a = given[:10]  # of memory that was there
        b = torch.ones(100)
        c = b.view(10, 10).T
        b += 1
        assert live.now == 400
        d = [b + 1, c.contiguous()]
        assert live.now == 1200
        del d
        assert live.now == 400
        del b
        assert live.now == 400  # its memory is that of c, too
        del c
    assert (live.now, live.most) == (0, 1200)
    assert len(a) == 10


def test_backward_passes_are_counted() -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    x = torch.randn(20, 50)
    live = LiveBytes()
    with live:
        output = model(x)
        held = live.now
        output.sum().backward()
    # activations before and after tanh, of which one is kept, and the output
    assert 20 * 51 * 4 <= held <= 20 * 101 * 4
    assert live.most >= held + 50 * 50 * 4


# --- Extending -----------------------------------------------------------------------------


def toy(b: int, q: int) -> None:
    first = torch.ones(7, q)
    rows = torch.ones(b, q, 30)
    del first
    wide = torch.ones(b, 100)
    del rows
    (wide * 2).sum()
    torch.ones(500)


def counted(run: Callable[[int, int], object]) -> Memory:
    memory = Memory.counted(run)
    assert memory is not None
    return memory


@pytest.mark.parametrize(("b", "q"), [(1, 1), (2, 3), (40, 1), (1, 90), (30, 20)])
def test_small_runs_tell_of_large_ones(b: int, q: int) -> None:
    memory = counted(toy)
    assert memory.at(b, q) == peak_of(lambda: toy(b, q))


def repeated(b: int, q: int) -> None:
    kept = [torch.ones(b, 10) for _ in range(q)]
    torch.stack(kept).exp_()


@pytest.mark.parametrize(("b", "q"), [(2, 3), (40, 2), (30, 20)])
def test_operations_that_are_repeated_do_not_matter(b: int, q: int) -> None:
    assert counted(repeated).at(b, q) == peak_of(lambda: repeated(b, q))


def test_the_most_that_fits_fits_and_more_does_not() -> None:
    memory = counted(toy)
    for budget in (5_000, 50_000, 10**6):
        samples = memory.most_samples(budget, 4)
        assert memory.at(samples, 4) <= budget < memory.at(samples + 1, 4)
        vectors = memory.most_vectors(budget, 4)
        assert memory.at(4, vectors) <= budget < memory.at(4, vectors + 1)
    assert memory.most_samples(1, 4) == memory.most_vectors(1, 4) == 1


# --- Rows and products ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("hold", [True, False])
def test_rows_take_what_was_counted(case: Case, hold: bool) -> None:
    network, call = Network(case.model(5)), case.inputs(12, 5)
    with network.evaluating():
        parameters = select("all", network, call)
        engine = choose_engine(network, parameters, call)
        source = FactorSource(engine, Categorical(), (5,), 2**30)
        matrix = torch.zeros(parameters.num_parameters, 1, dtype=torch.float64)

        whole = None if hold else source.whole(call)
        copies = 1 if whole is None else whole.copies  # of each sample, one for each direction
        used = (engine if whole is None else whole.engine).unchecked()

        def run() -> object:
            linear = used.linearize(call.repeated(copies) if copies > 1 else call)
            factors = linear.pull_back(torch.ones(12 * copies, 4 // copies, 5).double())
            return factors.hold() if hold else factors.project(matrix)

        counted = source.counted(call, hold=hold)
        assert counted == pytest.approx(peak_of(run), rel=0.15)
        if hold and engine.memory is not None:  # a bound, from the trial of the engine
            assert engine.memory.at(12, 4) >= 0.85 * counted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products_take_what_was_counted(case: Case) -> None:
    network, call = Network(case.model(5)), case.inputs(12, 5)
    with network.evaluating():
        parameters = select("all", network, call)
        together, _ = choose_jacobian(network, parameters, call)
        if together is None:  # torch's recurrent layers have no forward mode
            assert case.name in ("lstm", "gru")
            return
        source = ProductSource(network, parameters, together, Categorical(), 10, 2**30)
        size = parameters.num_parameters
        total = torch.zeros(size, 10, dtype=torch.float64)

        def run() -> None:
            jacobian = Jacobian(network, parameters, call, together)
            curvature = Curvature(jacobian, Categorical(), 10)
            curvature.add_times(total.new_ones(10, size), total)

        memory = source.counted(call)
        assert memory is not None
        assert memory.at(12, 10) == pytest.approx(peak_of(run), rel=0.05)
