"""Each likelihood against the Hessian of a KL divergence, which is the output Fisher."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliFamily
from torch.distributions import Categorical as CategoricalFamily
from torch.distributions import Distribution, Normal, Poisson, kl_divergence

from draws import noise
from scodkit.errors import BatchError, OptionError
from scodkit.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    MonteCarlo,
)
from scodkit.numerics.hashing import shares

Family = Callable[[Tensor], Distribution]


def dense_fisher_of(family: Family, output: Tensor) -> Tensor:
    """Hessian in theta of KL(p(theta_0) || p(theta)) at theta_0, per sample: (B, d, d).

    It is the Hessian of the expected negative log-likelihood: the entropy does not move.
    """
    fishers = []
    for theta in output:
        fixed = family(theta[None])

        def divergence(flat: Tensor, shape=theta.shape, fixed=fixed) -> Tensor:
            return kl_divergence(fixed, family(flat.reshape(1, *shape))).sum()

        fishers.append(torch.autograd.functional.hessian(divergence, theta.flatten()))
    return torch.stack(fishers)


def outer(rows: Tensor) -> Tensor:
    return rows.mT @ rows


def normal_with(variance: float | list[float], *shape: int) -> Family:
    root = torch.tensor(variance, dtype=torch.float64).sqrt()
    return lambda out: Normal(out, root.reshape(shape) if shape else root)


def mean_and_log_variance(out: Tensor) -> Distribution:
    mean, log_variance = out.chunk(2, dim=1)
    return Normal(mean, (0.5 * log_variance).exp())


def categorical_along(axis: int) -> Family:
    return lambda out: CategoricalFamily(logits=out.movedim(axis, -1))


def logit_bernoulli(out: Tensor) -> Distribution:
    return BernoulliFamily(logits=out)


def log_rate_poisson(out: Tensor) -> Distribution:
    return Poisson(out.exp())


EXACT = [
    pytest.param(Gaussian(), normal_with(1.0), (3,), id="gaussian-unit"),
    pytest.param(Gaussian(0.3), normal_with(0.3), (3,), id="gaussian-scalar"),
    pytest.param(Gaussian((0.3, 2.0)), normal_with([0.3, 2.0]), (2,), id="gaussian-tuple"),
    pytest.param(Gaussian([0.3, 2.0]), normal_with([0.3, 2.0]), (2,), id="gaussian-list"),
    pytest.param(
        Gaussian(torch.tensor([0.25, 2.0])),
        normal_with([0.25, 2.0]),
        (2,),
        id="gaussian-tensor",
    ),
    pytest.param(
        Gaussian(torch.tensor(0.25)), normal_with(0.25), (3,), id="gaussian-scalar-tensor"
    ),
    pytest.param(
        Gaussian([1.0, 2.0, 3.0, 4.0]),
        normal_with([1.0, 2.0, 3.0, 4.0], 2, 2),
        (2, 2),
        id="gaussian-map",
    ),
    pytest.param(HeteroscedasticGaussian(), mean_and_log_variance, (2,), id="hetero-one"),
    pytest.param(HeteroscedasticGaussian(), mean_and_log_variance, (6,), id="hetero-many"),
    pytest.param(HeteroscedasticGaussian(), mean_and_log_variance, (2, 3), id="hetero-map"),
    pytest.param(Bernoulli(), logit_bernoulli, (1,), id="bernoulli-one"),
    pytest.param(Bernoulli(), logit_bernoulli, (4,), id="bernoulli-many"),
    pytest.param(Bernoulli(), logit_bernoulli, (2, 3), id="bernoulli-map"),
    pytest.param(Categorical(), categorical_along(1), (2,), id="categorical-two"),
    pytest.param(Categorical(), categorical_along(1), (5,), id="categorical-five"),
    pytest.param(
        Categorical(directions=9), categorical_along(1), (5,), id="directions>classes"
    ),
    pytest.param(Categorical(class_dim=1), categorical_along(1), (3, 2, 4), id="segmentation"),
    pytest.param(Categorical(class_dim=-1), categorical_along(-1), (4, 3), id="sequence"),
    pytest.param(Categorical(class_dim=2), categorical_along(2), (2, 3, 2), id="middle-axis"),
]


@pytest.mark.parametrize(("likelihood", "family", "shape"), EXACT)
def test_factor_is_a_root_of_the_dense_fisher(
    likelihood: Likelihood, family: Family, shape: tuple[int, ...]
) -> None:
    output = noise(3, *shape)
    rows = likelihood.factor(output)
    torch.testing.assert_close(
        outer(rows), dense_fisher_of(family, output), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("likelihood", "family", "shape"), EXACT)
def test_rows_keep_the_dtype(
    likelihood: Likelihood, family: Family, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert likelihood.factor(noise(2, *shape, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(("likelihood", "family", "shape"), EXACT)
def test_rows_can_be_differentiated(
    likelihood: Likelihood, family: Family, shape: tuple[int, ...]
) -> None:
    if isinstance(likelihood, Gaussian):  # constant: there is nothing to differentiate
        assert not likelihood.factor(noise(2, *shape).requires_grad_()).requires_grad
        return
    assert torch.autograd.gradcheck(likelihood.factor, noise(2, *shape).requires_grad_())


def test_confident_predictions_have_finite_slopes() -> None:
    output = torch.tensor([[200.0, 0.0, -200.0]]).requires_grad_()
    for likelihood in (Categorical(), Bernoulli()):
        (slope,) = torch.autograd.grad(likelihood.factor(output).sum(), output)
        assert slope.isfinite().all()


def best_of_rank(fisher: Tensor, rank: int) -> Tensor:
    left, values, right = torch.linalg.svd(fisher)
    return (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]


@pytest.mark.parametrize("directions", [1, 2, 4])
def test_truncated_categorical_is_the_best_of_its_rank(directions: int) -> None:
    output = noise(3, 5)
    rows = Categorical(directions=directions).factor(output)
    assert rows.shape == (3, directions, 5)
    expected = best_of_rank(dense_fisher_of(categorical_along(1), output), directions)
    torch.testing.assert_close(outer(rows), expected, rtol=1e-10, atol=1e-10)


def test_truncation_is_per_position() -> None:
    output = noise(2, 4, 3)  # classes first, three positions
    rows = Categorical(directions=2, class_dim=1).factor(output)
    blocks = outer(rows).reshape(2, 4, 3, 4, 3)
    for s in range(3):
        exact = dense_fisher_of(categorical_along(1), output[:, :, s])
        actual = blocks[:, :, s, :, s]
        torch.testing.assert_close(actual, best_of_rank(exact, 2), rtol=1e-10, atol=1e-10)
        others = [t for t in range(3) if t != s]
        assert not blocks[:, :, s][..., others].any()


@st.composite
def likelihoods_with_shapes(draw: st.DrawFn) -> tuple[Likelihood, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axis = draw(st.integers(1, len(shape)))
    class_dim = draw(st.sampled_from([axis, axis - len(shape) - 1]))
    directions = draw(st.none() | st.integers(1, 5))
    numel = math.prod(shape)
    return draw(
        st.sampled_from(
            [
                (Gaussian(2.0), shape),
                (Gaussian(tuple(float(i + 1) for i in range(numel))), shape),
                (HeteroscedasticGaussian(), (2 * shape[0], *shape[1:])),
                (Bernoulli(), shape),
                (Categorical(directions), (shape[0],)),
                (Categorical(directions, class_dim), shape),
                (MonteCarlo(logit_bernoulli, samples=directions or 1), shape),
            ]
        )
    )


@settings(deadline=None, max_examples=150)
@given(likelihoods_with_shapes(), st.integers(1, 3))
def test_num_directions_is_the_number_of_rows(
    drawn: tuple[Likelihood, tuple[int, ...]], batch: int
) -> None:
    likelihood, shape = drawn
    rows = likelihood.factor(noise(batch, *shape))
    assert rows.shape == (batch, likelihood.num_directions(shape), math.prod(shape))


@pytest.mark.parametrize("size", [100.0, 1e4])
@pytest.mark.parametrize(
    "likelihood", [Bernoulli(), Categorical(), Categorical(directions=1)], ids=str
)
def test_extreme_logits_give_finite_rows(likelihood: Likelihood, size: float) -> None:
    output = torch.tensor([[size, -size, 0.0], [-size, -size, size], [size, size, size]])
    rows = likelihood.factor(output)
    assert rows.dtype == torch.float32
    assert rows.isfinite().all()


def test_bernoulli_keeps_relative_precision_in_the_tails() -> None:
    logits = torch.tensor([[-100.0, 100.0]])
    actual = Bernoulli().factor(logits).diagonal(dim1=1, dim2=2)
    expected = torch.full((1, 2), math.exp(-50.0))  # sqrt(q (1 - q)) -> exp(-|theta| / 2)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0.0)


# --- Monte Carlo ---------------------------------------------------------------------------

FAMILIES = [
    pytest.param(normal_with(0.5), [[0.3, -1.0]], id="normal"),
    pytest.param(categorical_along(1), [[0.5, -0.5, 1.0]], id="categorical"),
    pytest.param(log_rate_poisson, [[0.2, -0.4]], id="poisson"),
]


@pytest.mark.parametrize(("family", "theta"), FAMILIES)
@pytest.mark.parametrize("samples", [1, 4])
def test_monte_carlo_is_unbiased(
    family: Family, theta: list[list[float]], samples: int
) -> None:
    output = torch.tensor(theta, dtype=torch.float64)
    exact = dense_fisher_of(family, output)[0]
    keys = torch.arange(500)
    repeated = output.expand(500, -1)
    estimates = torch.cat(
        [
            outer(MonteCarlo(family, samples=samples, seed=seed).factor(repeated, keys))
            for seed in range(10)
        ]
    )
    standard_error = estimates.std(0) / math.sqrt(len(estimates))
    assert standard_error.max() < 0.1 * exact.abs().max()  # else the next line proves nothing
    assert ((estimates.mean(0) - exact).abs() <= 5 * standard_error).all()


@pytest.fixture
def poisson() -> MonteCarlo:
    return MonteCarlo(log_rate_poisson, samples=3, seed=7)


def test_same_seed_and_key_draw_the_same(poisson: MonteCarlo) -> None:
    output, keys = noise(4, 2), torch.tensor([3, -1, 2**62, 0])
    first = poisson.factor(output, keys)
    assert torch.equal(first, poisson.factor(output, keys))
    other_seed = MonteCarlo(log_rate_poisson, samples=3, seed=8)
    assert not torch.equal(first, other_seed.factor(output, keys))
    assert not torch.equal(first, poisson.factor(output, keys + 1))


def test_keys_default_to_the_position(poisson: MonteCarlo) -> None:
    output = noise(4, 2)
    assert torch.equal(poisson.factor(output), poisson.factor(output, torch.arange(4)))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_draws_do_not_depend_on_the_rest_of_the_batch(picked: list[int]) -> None:
    likelihood = MonteCarlo(log_rate_poisson, samples=2)
    output, keys = noise(6, 2), torch.arange(10, 16)
    whole = likelihood.factor(output, keys)
    assert torch.equal(likelihood.factor(output[picked], keys[picked]), whole[picked])


def test_global_generator_is_left_alone(poisson: MonteCarlo) -> None:
    before = torch.get_rng_state()
    poisson.factor(noise(3, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_global_generator_is_restored_when_the_family_raises() -> None:
    def family(out: Tensor) -> Distribution:
        torch.rand(1)
        raise RuntimeError("not a family")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="not a family"):
        MonteCarlo(family).factor(noise(3, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_draw_what_one_thread_draws(poisson: MonteCarlo) -> None:
    output = noise(16, 2)
    expected = poisson.factor(output)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: poisson.factor(output), range(32)))
    assert all(torch.equal(rows, expected) for rows in drawn)
    assert torch.equal(torch.get_rng_state(), before)


def drawn_classes(logits: Tensor, samples: int, seed: int) -> Tensor:
    """One at a time: the first class whose running sum is above a share of the whole."""
    found = torch.empty(samples, *logits.shape[:-1], dtype=torch.int64)
    for i, sums in enumerate(logits.softmax(-1).cumsum(-1)):
        places = torch.arange(samples * sums[..., 0].numel())
        each = shares((seed * 0x9E3779B97F4A7C15 + i) % 2**63, 0, places)
        for n, share in enumerate(each.tolist()):
            own = sums.reshape(-1, sums.shape[-1])[n % (len(each) // samples)].tolist()
            first = next(c for c, value in enumerate(own) if value > share * own[-1])
            found[:, i].view(samples, -1)[divmod(n, len(each) // samples)] = first
    return found


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 3), (2, 2, 3, 4)])
def test_classes_are_drawn_by_their_shares(shape: tuple[int, ...]) -> None:
    logits = 3 * noise(*shape)
    logits[..., -1] = -torch.inf  # a class that is never drawn
    likelihood = MonteCarlo(lambda out: CategoricalFamily(logits=out), samples=6, seed=5)
    drawn = drawn_classes(logits, 6, 5)
    assert int(drawn.max()) < shape[-1] - 1
    expected = torch.nn.functional.one_hot(drawn, shape[-1]) - logits.softmax(-1)
    expected = expected.flatten(2).transpose(0, 1) / math.sqrt(6)
    torch.testing.assert_close(likelihood.factor(logits), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("family", "theta"), FAMILIES)
def test_monte_carlo_works_whatever_the_grad_mode(
    mode: Callable[[], torch.no_grad | torch.inference_mode],
    family: Family,
    theta: list[list[float]],
) -> None:
    expected = MonteCarlo(family).factor(torch.tensor(theta))
    with mode():
        actual = MonteCarlo(family).factor(torch.tensor(theta))
    assert torch.equal(actual, expected)


def test_only_monte_carlo_draws(poisson: MonteCarlo) -> None:
    exact = [Gaussian(), HeteroscedasticGaussian(), Bernoulli(), Categorical()]
    assert poisson.draws
    assert not any(likelihood.draws for likelihood in exact)


# --- Errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Gaussian(0.0), r"got 0\.0.*HeteroscedasticGaussian\(\)"),
        (lambda: Gaussian(-1.0), r"got -1\.0.*HeteroscedasticGaussian\(\)"),
        (lambda: Gaussian(math.inf), r"got inf.*HeteroscedasticGaussian\(\)"),
        (lambda: Gaussian(math.nan), r"got nan.*HeteroscedasticGaussian\(\)"),
        (lambda: Gaussian((1.0, 0.0)), r"got \(1\.0, 0\.0\).*HeteroscedasticGaussian\(\)"),
        (lambda: Gaussian(()), r"got \(\).*HeteroscedasticGaussian\(\)"),
        (lambda: Categorical(directions=0), r"directions >= 1 or None.*got 0"),
        (lambda: Categorical(class_dim=0), r"class_dim other than 0.*batch"),
        (lambda: MonteCarlo(log_rate_poisson, samples=0), r"samples >= 1.*got 0"),
    ],
)
def test_options_out_of_range_are_refused(build: Callable[[], Likelihood], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        build()


@pytest.mark.parametrize(
    ("likelihood", "shape", "says"),
    [
        (Gaussian((1.0, 2.0)), (3,), r"expected 2 outputs.*got 3; pass one variance or 3"),
        (HeteroscedasticGaussian(), (3,), r"even number.*got 3.*Gaussian\(variance="),
        (Categorical(), (3, 2), r"\(B, classes\).*got 3 axes.*Categorical\(class_dim=1\)"),
        (Categorical(class_dim=2), (3,), r"axis 2.*got 2 axes; pass the right class_dim"),
        (Categorical(class_dim=-2), (3,), r"axis -2.*got 2 axes; pass the right class_dim"),
    ],
)
def test_outputs_of_the_wrong_form_are_refused(
    likelihood: Likelihood, shape: tuple[int, ...], says: str
) -> None:
    with pytest.raises(BatchError, match=says):
        likelihood.factor(noise(2, *shape))


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 4)])
def test_num_directions_refuses_what_factor_refuses(shape: tuple[int, ...]) -> None:
    with pytest.raises(BatchError, match="class_dim=1"):
        Categorical().num_directions(shape)
