"""Several positions, each with classes: their groups, how they are pooled, classes by draws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from draws import noise
from oracles import dense_factors, dense_fisher, dense_score
from scodkit import Categorical, Gaussian, Monitor, MonteCarlo, Task
from scodkit.errors import BatchError, CorruptArtifactError, OptionError
from scodkit.factors.pieces import sample_keys
from scodkit.likelihoods import categorical
from scodkit.likelihoods.likelihood import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.numerics.hashing import hashed, shares
from scodkit.sketch import Exact, documents

POOLS = ("sum", "mean", "last")


def fisher_by_position(output: Tensor, class_dim: int, pool: str) -> Tensor:
    """One entry at a time, ``(B, d, d)``."""
    where = torch.arange(output[0].numel()).view(output.shape[1:]).movedim(class_dim - 1, -1)
    where = where.reshape(-1, where.shape[-1])
    fisher = output.new_zeros(len(output), where.numel(), where.numel())
    for i, flat in enumerate(output.flatten(1)):
        for place, entries in enumerate(where):
            if pool == "last" and place < len(where) - 1:
                continue
            q = flat[entries].softmax(0)
            share = 1 / len(where) if pool == "mean" else 1.0
            fisher[i, entries[:, None], entries] = share * (q.diag() - q.outer(q))
    return fisher


@pytest.mark.parametrize("directions", [None, 3, 1])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("class_dim", [1, 2])
def test_rows_products_and_trace_are_of_the_pooled_fisher(
    class_dim: int, pool: str, directions: int | None
) -> None:
    output = noise(3, 4, 4)  # with all three directions, all there is
    likelihood = Categorical(directions, class_dim, pool=pool)
    expected = fisher_by_position(output, class_dim, pool)
    rows = likelihood.factor(output)
    assert rows.shape[1:] == (likelihood.num_directions((4, 4)), 16)
    if directions != 1:
        torch.testing.assert_close(rows.mT @ rows, expected, rtol=0, atol=1e-14)
    vectors = torch.randn(3, 2, 16, dtype=torch.float64)
    times = likelihood.curvature_times(output, vectors)
    torch.testing.assert_close(times, vectors @ rows.mT @ rows, rtol=0, atol=1e-14)
    trace = likelihood.curvature_trace(output)
    torch.testing.assert_close(trace, rows.square().sum((1, 2)), rtol=0, atol=1e-14)


@pytest.mark.parametrize("pool", POOLS)
def test_rows_by_class_are_of_the_same_fisher(pool: str) -> None:
    output = noise(3, 5, 4)
    named = Categorical(class_dim=-1, pool=pool).named()
    rows = named.factor(output)
    assert rows.shape[1] == named.num_directions((5, 4)) == (4 if pool == "last" else 20)
    expected = fisher_by_position(output, 2, pool)
    torch.testing.assert_close(rows.mT @ rows, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("pool", POOLS)
def test_a_single_position_is_what_it_is_without_pooling(pool: str) -> None:
    output = noise(3, 4)
    rows = Categorical(pool=pool).factor(output)
    torch.testing.assert_close(rows, Categorical().factor(output))


@pytest.mark.parametrize("directions", [None, 2])
@pytest.mark.parametrize("class_dim", [1, 2, 3])
def test_groups_are_the_positions_of_rows(class_dim: int, directions: int | None) -> None:
    output = noise(2, 4, 5, 6)
    likelihood = Categorical(directions, class_dim)
    rows, groups = likelihood.factor(output), likelihood.groups((4, 5, 6))
    assert groups.shape == (rows.shape[1],)
    by_position = likelihood.logits(torch.arange(120).view(1, 4, 5, 6))[0]
    for group, entries in enumerate(by_position):
        assert not rows[:, groups == group].index_fill(2, entries, 0.0).any()
    assert groups.unique().tolist() == list(range(len(by_position)))


def test_groups_of_what_has_no_positions() -> None:
    assert Gaussian().groups((3,)).tolist() == [0, 0, 0]
    assert Categorical(class_dim=-1, pool="last").groups((5, 4)).tolist() == [0, 0, 0]
    with pytest.raises(OptionError, match=r"got 4 draws over all.*directions=1"):
        Categorical(class_dim=-1, samples=4).groups((5, 4))


# --- draws ---------------------------------------------------------------------------------


def one_at_a_time(logits: Tensor, samples: int, seed: int) -> Tensor:
    """``(e_y - q) / sqrt(samples)``, ``(B, samples, P, C)``: a class, a draw, a position."""
    rows = -logits.softmax(-1)[:, None].repeat(1, samples, 1, 1)
    for i, sequence in enumerate(logits.softmax(-1)):
        own = (seed * 0x9E3779B97F4A7C15 + i) % 2**63
        for place, q in enumerate(sequence):
            counter = torch.tensor([place])
            first = float(shares(own, 0, counter)) + float(shares(own, 1, counter)) / 2**23
            counters = torch.arange(place * samples, (place + 1) * samples)
            order = hashed(own, 2, counters).argsort().tolist()
            for draw, stratum in enumerate(order):
                left = (first + stratum / samples) % 1 * float(q.sum())
                label = next(c for c, s in enumerate(q.cumsum(0).tolist()) if s > left)
                rows[i, draw, place, label] += 1
    return rows / math.sqrt(samples)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 3), (2, 2, 3, 4)])
def test_rows_are_those_of_classes_drawn_one_at_a_time(
    shape: tuple[int, ...], samples: int
) -> None:
    logits = 3 * noise(*shape)
    logits[..., -1] = -torch.inf  # a class that is never drawn
    likelihood = Categorical(class_dim=-1, samples=samples, seed=5)
    expected = one_at_a_time(logits.reshape(shape[0], -1, shape[-1]), samples, 5).flatten(2)
    rows = likelihood.factor(logits)
    assert rows.shape[1] == likelihood.num_directions(shape[1:]) == samples
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-14)


def test_one_draw_is_that_of_monte_carlo() -> None:
    logits = 2 * noise(4, 6, 5)
    drawn = MonteCarlo(lambda out: torch.distributions.Categorical(logits=out), seed=3)
    rows = Categorical(class_dim=-1, samples=1, seed=3).factor(logits)
    torch.testing.assert_close(rows, drawn.factor(logits), rtol=0, atol=1e-14)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("samples", [1, 4])
def test_draws_are_without_bias(samples: int, pool: str) -> None:
    output = 0.5 * noise(1, 3, 4)  # no class is so rare that its variance is not seen
    exact = fisher_by_position(output, 2, pool)[0]
    likelihood = Categorical(class_dim=-1, samples=samples, pool=pool)
    rows = likelihood.factor(output.expand(2000, -1, -1), torch.arange(2000))
    estimates = rows.mT @ rows
    standard_error = estimates.std(0) / math.sqrt(len(estimates))
    assert standard_error.max() < 0.05 * exact.abs().max()  # else the next line proves nothing
    assert ((estimates.mean(0) - exact).abs() <= 5 * standard_error + 1e-12).all()


def test_the_draws_of_a_position_vary_less_than_independent_ones() -> None:
    output = noise(1, 1, 6).expand(1000, -1, -1)
    family = MonteCarlo(lambda out: torch.distributions.Categorical(logits=out), samples=4)
    spread = [
        likelihood.factor(output, torch.arange(1000)).square().sum((1, 2)).var()
        for likelihood in (Categorical(class_dim=-1, samples=4), family)
    ]
    assert spread[0] < 0.5 * spread[1]


def test_many_draws_come_close_to_the_fisher_information_of_all_positions() -> None:
    """With the order of draws alike at all positions, two positions would move together."""
    output = noise(1, 6, 4)
    exact = fisher_by_position(output, 2, "sum")[0]
    rows = Categorical(class_dim=-1, samples=4096).factor(output)[0]
    assert float((rows.T @ rows - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize("class_dim", [1, -1])
@pytest.mark.parametrize("pool", POOLS)
def test_draws_do_not_depend_on_the_batch(
    class_dim: int, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, keys = noise(5, 6, 4), torch.tensor([3, -1, 2**62, 0, 7])
    likelihood = Categorical(class_dim=class_dim, samples=3, pool=pool)
    rows = likelihood.factor(output, keys)
    order = torch.tensor([4, 2, 0])
    assert torch.equal(likelihood.factor(output[order], keys[order]), rows[order])
    monkeypatch.setattr(categorical, "_AT_ONCE", 1)  # a position at a time
    assert torch.equal(likelihood.factor(output, keys), rows)
    other = replace(likelihood, seed=1)
    assert not torch.equal(other.factor(output, keys), rows)


def test_many_classes_are_all_drawn_in_half_precision() -> None:
    # sums of bfloat16 would stand still after a few hundred classes
    logits = torch.zeros(1, 64, 50_000, dtype=torch.bfloat16)
    rows = Categorical(class_dim=-1, samples=8).factor(logits)
    assert rows.dtype == torch.bfloat16
    drawn = rows.view(8, 64, -1).argmax(-1)
    for octant in range(8):  # one draw of each position in each eighth
        inside = (drawn >= octant * 6250) & (drawn < (octant + 1) * 6250)
        assert (inside.sum(0) == 1).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_drawn_without_a_crash(bad: float) -> None:
    output = noise(2, 3, 4)
    output[0, 1, 2] = bad
    clean = Categorical(class_dim=-1, samples=2).factor(output)[1]
    expected = Categorical(class_dim=-1, samples=2).factor(noise(2, 3, 4))[1]
    assert torch.equal(clean, expected)


# --- monitors ------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Tokens ``(B, S)`` to next-token logits ``(B, S, V)``, each of what came before."""

    def __init__(self, vocabulary: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        past = self.embedding(tokens).cumsum(1)
        logits: Tensor = self.head(torch.tanh(self.mix(past)))
        return logits


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().double()


def tokens(count: int, seed: int, length: int = 5) -> Tensor:
    return torch.randint(7, (count, length), generator=torch.Generator().manual_seed(seed))


LIKELIHOODS = [
    *(Categorical(class_dim=-1, pool=pool) for pool in POOLS),
    *(Categorical(class_dim=-1, samples=4, seed=2, pool=pool) for pool in POOLS),
    Categorical(2, -1, pool="last"),
]


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_scores_are_those_of_dense_factors(likelihood: Likelihood, path) -> None:
    train, test = tokens(20, 1), tokens(6, 2)
    model = decoder()
    monitor = Monitor(model, likelihood, rank=150, sketch=Exact(), prior_scale=0.7)
    monitor.fit([train], progress=False)
    fit_on, asked = (Inputs((x,), {}) for x in (train, test))
    factors = [
        dense_factors(model, call, likelihood, keys=sample_keys(call))
        for call in (fit_on, asked)
    ]
    expected = dense_score(dense_fisher(factors[0]), 20, factors[1], 0.7)
    score = monitor.score(test)
    torch.testing.assert_close(score.double(), expected.double(), rtol=1e-6, atol=1e-9)
    # whatever the batch
    torch.testing.assert_close(monitor.score(test[2:4]), score[2:4], rtol=1e-9, atol=1e-12)
    monitor.save(path)
    loaded = Monitor.load(path, decoder())
    assert loaded.likelihood == likelihood
    assert torch.equal(loaded.score(test), score)


def test_a_score_of_the_last_position_is_its_own() -> None:
    last = Monitor(decoder(), Categorical(class_dim=-1, pool="last"), rank=20)
    last.fit([tokens(30, 1)], progress=False)
    alone = Monitor(decoder(), Categorical(), rank=20, outputs=lambda out: out[:, -1])
    alone.fit([tokens(30, 1)], progress=False)
    score = last.score(tokens(8, 3))
    torch.testing.assert_close(score, alone.score(tokens(8, 3)), rtol=1e-8, atol=1e-12)


def test_a_fit_on_all_positions_is_asked_about_the_last() -> None:
    monitor = Monitor(decoder(), Categorical(class_dim=-1, samples=4), rank=20)
    monitor.fit([tokens(30, 1)], progress=False)
    monitor.task = Task(lambda output: output[:, -1], Categorical(directions=1))
    ask = Task(lambda output: output, Categorical(1, -1, pool="last"))
    score = monitor.score(tokens(6, 2))
    monitor.task = ask
    torch.testing.assert_close(monitor.score(tokens(6, 2)), score, rtol=1e-9, atol=1e-12)
    assert (score > 0).all()


def test_means_compare_sequences_of_different_lengths() -> None:
    """Repeating a position changes a sum, and not a mean."""
    output = noise(2, 1, 4)
    longer = output.expand(-1, 9, -1)
    for pool, times in (("sum", 9.0), ("mean", 1.0)):
        likelihood = Categorical(class_dim=-1, pool=pool)
        torch.testing.assert_close(
            likelihood.curvature_trace(longer), times * likelihood.curvature_trace(output)
        )


@pytest.mark.parametrize("samples", [None, 2])
def test_explanations_have_names_for_what_is_pooled(samples: int | None) -> None:
    likelihood = Categorical(class_dim=-1, samples=samples, pool="last")
    monitor = Monitor(decoder(), likelihood, rank=10).fit([tokens(30, 1)], progress=False)
    shares_of = monitor.explain(tokens(3, 2)).directions
    assert shares_of is not None
    expected = ["draw 0", "draw 1"] if samples else [f"class {c}" for c in range(7)]
    assert list(shares_of.names) == expected


# --- files and errors ----------------------------------------------------------------------


def test_files_are_as_before_unless_a_new_option_is_typed() -> None:
    plain = documents.describe(Categorical(2, -1))
    assert plain == {"type": "Categorical", "directions": 2, "class_dim": -1}
    likelihood = Categorical(class_dim=-1, samples=3, pool="mean")
    described = documents.describe(likelihood)
    assert described["samples"] == 3
    assert described["pool"] == "mean"
    assert "seed" not in described
    assert documents.build(described, Likelihood) == likelihood
    with pytest.raises(CorruptArtifactError, match="median"):
        documents.build({**described, "pool": "median"}, Likelihood)
    with pytest.raises(CorruptArtifactError, match="whole number"):
        documents.build({**described, "samples": "two"}, Likelihood)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"samples": 0}, r"samples >= 1 or None.*got 0"),
        ({"samples": 2, "directions": 1}, r"directions or samples.*Categorical\(samples=2\)"),
        ({"pool": "median"}, r"'mean', 'max', 'last', got 'median'.*pool=\"mean\""),
        ({"pool": "max", "samples": 2}, r"got 2 draws.*directions=1, pool=\"max\""),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Categorical(**options)  # type: ignore[arg-type]


def test_maps_have_no_last_position() -> None:
    with pytest.raises(BatchError, match=r"\(B, S, C\).*got 4 axes.*pool=\"mean\""):
        Categorical(class_dim=1, pool="last").factor(noise(2, 3, 4, 4))
