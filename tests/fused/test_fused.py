"""`Fused`: parts against slow oracles, rates, merging, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scodkit import (
    Bernoulli,
    Budget,
    Categorical,
    Fused,
    Gaussian,
    HeteroscedasticGaussian,
    LastLayers,
    Monitor,
    MonteCarlo,
    predicted_class,
)
from scodkit.errors import (
    BatchError,
    CalibrationError,
    CalibrationWarning,
    MergeError,
    NotFittedError,
    OptionError,
    StaleMonitorError,
    SuspiciousInputWarning,
)
from scodkit.fused.features import FeatureBank, most_samples, narrowed
from scodkit.likelihoods import Likelihood
from scodkit.scoring.evidence import OutputVariance

WIDTH = 4


def network(outputs: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, outputs)).double()


def samples(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def made(model: nn.Module, likelihood: Likelihood, **options: Any) -> Fused:
    fused = Fused(model, likelihood, **options)
    fused.fit([samples(100, 1), samples(60, 2)], progress=False)
    return fused.calibrate([samples(200, 3)], progress=False)


class Tokens(nn.Module):
    """Logits ``(B, 5, 3)`` of five tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, 5 * 8).double()
        self.head = nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).view(len(x), 5, 8).tanh())


class Map(nn.Module):
    """Logits ``(B, 2, 3, 3)`` of nine pixels, without a Linear layer at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, 36).double()
        self.head = nn.Conv2d(4, 2, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).view(len(x), 4, 3, 3).tanh())


class Scaled(nn.Module):
    """A classifier whose outputs are not those of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) / 2


class Tied(nn.Module):
    """A classifier whose last weight is used a second time, outside of its layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 3).double()
        self.last = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.linear(self.first(x).tanh(), self.last.weight))


class First(nn.Module):
    """The first outputs of a larger network."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = network(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)[:, :3]


KINDS: dict[str, tuple[Any, Likelihood, int]] = {
    "classes": (network, Categorical(), 5),
    "scaled logits": (Scaled, Categorical(), 5),
    "first outputs": (First, Categorical(), 5),
    "tied weight": (Tied, Categorical(), 5),
    "one label": (lambda: network(1), Bernoulli(), 5),
    "labels": (lambda: network(6), Bernoulli(), 5),
    "tokens": (Tokens, Categorical(class_dim=-1), 5),
    "map": (Map, Categorical(class_dim=1), 5),
    "number": (lambda: network(1), Gaussian(0.5), 3),
    "numbers": (network, Gaussian(), 3),
    "mean and variance": (lambda: network(2), HeteroscedasticGaussian(), 3),
    "poisson": (
        lambda: network(2),
        MonteCarlo(lambda out: torch.distributions.Poisson(out.exp()), samples=3),
        3,
    ),
}


def jacobian(model: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
    """Return the Jacobian of one sample's outputs, ``(d, N)``, by plain autograd."""
    weights = [dict(model.named_parameters())[name] for name in names]
    rows = []
    for output in model(x[None]).flatten():
        found = torch.autograd.grad(output, weights, retain_graph=True, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    torch.zeros(w.numel()).double() if g is None else g.flatten()
                    for g, w in zip(found, weights, strict=True)
                ]
            )
        )
        model(x[None])
    return torch.stack(rows)


def covariance(monitor: Monitor, x: Tensor) -> Tensor:
    """Return ``V`` of one sample, ``(d, d)``, from the dense posterior of the weights."""
    basis, eps = monitor.basis, monitor.prior_scale
    c = 1 / (2 * basis.num_data * eps**2)
    j = jacobian(monitor.model, monitor.fitted.parameters.names, x)
    fisher = basis.vectors @ torch.diag(basis.values) @ basis.vectors.T
    inverse = torch.linalg.inv(fisher / c + torch.eye(len(fisher), dtype=torch.float64))
    return eps**2 * j @ inverse @ j.T


@pytest.mark.parametrize("kind", KINDS)
def test_scores_flags_and_explains_every_kind_of_output(kind: str) -> None:
    build, likelihood, count = KINDS[kind]
    fused = made(build(), likelihood)
    x = samples(9, 7)
    found = fused(x)
    assert len(fused.names) == count
    assert torch.equal(found.output, fused.model(x).detach().reshape(found.output.shape))
    assert torch.equal(found.score, fused.score(x))
    assert torch.equal(found.p_value, fused.p_value(x))
    assert torch.equal(fused.flag(x, 0.1), found.p_value <= 0.1)
    explained = fused.explain(x)
    torch.testing.assert_close(explained.contributions.sum(1), found.score)
    assert all(name in explained.words(0) for name in fused.names)
    assert "features" in fused.summary() or count == 3
    with pytest.warns(SuspiciousInputWarning):
        assert bool(fused.flag(40 * samples(50, 8)).double().mean() > 0.5)


@pytest.mark.parametrize("kind", [kind for kind, (_, _, count) in KINDS.items() if count == 5])
def test_standardised_logit_is_that_of_the_dense_posterior(kind: str) -> None:
    build, likelihood, _ = KINDS[kind]
    fused = made(build(), likelihood)
    x = samples(3, 5)
    found = fused.parts(x)["standardised logit"]
    for i, one in enumerate(x):
        v, z = covariance(fused.monitor, one), fused.model(one[None]).detach()
        if isinstance(likelihood, Bernoulli):
            expected = -z.abs().mean() / (v.trace() / z.numel()).sqrt()
        else:
            logits = likelihood.logits(z)[0]
            margin = (logits.max(1).values - logits.mean(1)).mean()
            expected = -margin / (v.trace() / len(logits)).sqrt()
        torch.testing.assert_close(found[i], expected.double(), rtol=1e-6, atol=1e-9)


def test_closed_form_is_taken_where_one_layer_makes_the_logits() -> None:
    taken = {kind: made(KINDS[kind][0](), KINDS[kind][1])._ready().closed for kind in KINDS}
    assert {kind for kind, closed in taken.items() if closed} == {
        "classes",
        "first outputs",
        "one label",
        "labels",
    }


def test_energy_and_distances_are_those_of_their_definitions() -> None:
    model, train = network(), torch.cat([samples(100, 1), samples(60, 2)])
    fused, x = made(model, Categorical()), samples(4, 6)
    parts, features = fused.parts(x), model[:2](train).detach()
    mine = model[:2](x).detach()
    torch.testing.assert_close(parts["energy"], -model(x).detach().logsumexp(1))
    unit, own = nn.functional.normalize(features), nn.functional.normalize(mine)
    k = round(160**0.5)
    distance = torch.cdist(own, unit).sort(1).values[:, k - 1]
    torch.testing.assert_close(parts["neighbours"], distance.log(), rtol=1e-4, atol=1e-4)
    labels = model(train).argmax(1)
    means = torch.stack([features[labels == c].mean(0) for c in labels.unique()])
    centred = features - torch.stack([features[labels == c].mean(0) for c in labels])
    inverse = torch.linalg.pinv(centred.T @ centred / len(train), rtol=1e-12)
    difference = mine[:, None] - means
    squared = torch.einsum("bci,ij,bcj->bc", difference, inverse, difference).amin(1)
    torch.testing.assert_close(parts["class distance"], squared.log())


def test_regression_parts_are_score_and_share() -> None:
    fused, x = made(network(), Gaussian(0.5), prior_scale=0.3), samples(4, 6)
    parts, score = fused.parts(x), fused.monitor.score(x)
    torch.testing.assert_close(parts["scod"], score.double().log())
    for i, one in enumerate(x):
        names = fused.monitor.fitted.parameters.names
        share = (
            covariance(fused.monitor, one).trace()
            / jacobian(fused.model, names, one).norm() ** 2
        )
        torch.testing.assert_close(parts["unexplained share"][i].exp(), share / 0.3**2)


def test_monitors_tell_the_same_evidence() -> None:
    monitor = Monitor(network(), Categorical(), rank=20).fit([samples(100, 1)], progress=False)
    x = samples(3, 5)
    found = monitor.evidence(x)
    assert torch.equal(found.score, monitor.score(x))
    assert found.standardised_logit is not None
    for i, one in enumerate(x):
        v, z = covariance(monitor, one), monitor.model(one[None]).detach()[0]
        q = z.softmax(0)
        fisher = torch.diag(q) - q[:, None] * q
        torch.testing.assert_close(found.score[i], (fisher @ v).trace())
        expected = -(z.max() - z.mean()) / v.trace().sqrt()
        torch.testing.assert_close(found.standardised_logit[i], expected)
    assert monitor.evidence(x[:0]).unexplained_share.shape == (0,)


def test_the_trace_of_many_outputs_is_right_on_average() -> None:
    # each entry of V comes with the mean of products of two signs: 1 on the diagonal, and off
    # it a number of variance 1/8
    rows = OutputVariance().factor(torch.zeros(1, 500, dtype=torch.float64))[0]
    gram = rows.T @ rows
    torch.testing.assert_close(gram.diagonal(), torch.ones(500, dtype=torch.float64))
    off = gram[~torch.eye(500, dtype=torch.bool)]
    assert abs(float(off.mean())) < 4 * (1 / 8 / (500 * 499 / 2)) ** 0.5
    assert abs(float(off.var()) - 1 / 8) < 0.01
    assert OutputVariance().num_directions((500,)) == len(rows)


def test_a_part_accuses_without_limit_and_acquits_within_one() -> None:
    model = network()
    model[1] = nn.ReLU()  # whose features grow with the input
    fused = made(model, Categorical())
    found = fused.explain(samples(400, 9)).contributions
    assert float(found.min()) >= -2.0
    with pytest.warns(SuspiciousInputWarning):
        far = fused.explain(1e4 * samples(20, 9))
    assert float(far.contributions.min()) >= -2.0
    assert float(far.contributions.max()) > 10.0


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()])
@pytest.mark.parametrize("count", [50, 400])
def test_false_alarms_are_as_many_as_stated(likelihood: Likelihood, count: int) -> None:
    # over draws of the held-out data the p-value of a new sample is uniform on its steps
    fused = Fused(network(), likelihood).fit([samples(160, 1)], progress=False)
    alarms, draws = 0.0, 60
    new = samples(500, 99)
    for seed in range(draws):
        fused.calibrate([samples(count, 1000 + seed)], progress=False)
        assert fused.calibration is not None
        assert fused.calibration.num_data == count - count // 4
        steps = fused.calibration.num_data + 1
        alarms += float(fused.flag(new, 0.1).double().mean())
    expected = int(0.1 * steps) / steps
    # a threshold's rate is Beta distributed, of this variance
    spread = (expected * (1 - expected) * (1 / (steps + 1) + 1 / 500) / draws) ** 0.5
    assert abs(alarms / draws - expected) < 4 * spread


def test_confidence_and_groups_are_those_of_the_calibration() -> None:
    fused = made(network(), Categorical())
    x = samples(50, 4)
    assert fused.calibration is not None
    limit = fused.calibration.threshold(0.1, confidence=0.9)
    assert torch.equal(fused.flag(x, 0.1, confidence=0.9), fused.score(x) > limit)
    fused.calibrate([samples(600, 3)], by=predicted_class, progress=False)
    groups = predicted_class(fused.model(x))
    p_values = fused.calibration.p_value(fused.score(x), groups)
    assert torch.equal(fused(x).p_value, p_values)


def test_order_and_batches_do_not_matter() -> None:
    model, train, held = network(), samples(160, 1), samples(200, 3)
    one = Fused(model, Categorical()).fit([train], progress=False)
    one.calibrate([held], progress=False)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(0))
    other = Fused(model, Categorical()).fit(list(train[order].split(33)), progress=False)
    other.calibrate(list(held.flip(0).split(70)), progress=False)
    torch.testing.assert_close(one.score(samples(9, 4)), other.score(samples(9, 4)))


def test_merge_and_update_are_one_fit_on_both_parts() -> None:
    model, a, b = network(), samples(100, 1), samples(60, 2)
    held, x = [samples(200, 3)], samples(9, 4)
    whole = Fused(model, Categorical()).fit([a, b], progress=False)
    merged = Fused(model, Categorical()).fit([a], progress=False)
    other = Fused(model, Categorical()).fit([b], progress=False)
    updated = copy.deepcopy(merged).update([b], progress=False)
    merged.merge(other)
    expected = whole.calibrate(held, progress=False).score(x)
    for fused in (merged, updated):
        assert fused.calibration is None
        torch.testing.assert_close(fused.calibrate(held, progress=False).score(x), expected)
    with pytest.raises(MergeError):
        merged.merge(other)


def test_features_are_kept_in_a_bounded_number() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1000, 3, generator=generator, dtype=torch.float64)
    keys = torch.randint(2**40, (1000,), generator=generator)
    labels = torch.zeros(1000, dtype=torch.int64)
    bank, parts = FeatureBank(1, 64), [FeatureBank(1, 64) for _ in range(2)]
    for i in range(0, 1000, 50):
        bank.add(features[i : i + 50], labels[:50], keys[i : i + 50])
        parts[i // 50 % 2].add(features[i : i + 50], labels[:50], keys[i : i + 50])
    chosen = keys.argsort()[:64]
    expected = nn.functional.normalize(features[chosen]).float()
    assert torch.equal(bank.samples, expected)
    merged = FeatureBank.merged(parts)
    assert torch.equal(merged.samples, expected)
    for one, other in zip(bank.pack().values(), merged.pack().values(), strict=True):
        torch.testing.assert_close(one, other)


def test_memory_is_within_the_budget() -> None:
    budget = Budget(bytes=400_000)
    fused = Fused(network(), Categorical(), budget=budget)
    memory = fused.fit([samples(5000, 1)], progress=False).memory()
    assert memory["features"] <= budget.bytes / 4 + 8 * 2100  # and a key for each sample
    assert memory["basis"] <= budget.bytes
    assert most_samples(512, 2**28) == 10_000
    for width in (1024, 2048, 100_000):
        kept = most_samples(width, 2**28)
        assert kept >= 1000
        assert 4 * kept * min(width, 2048) + 8 * min(width, 2048) ** 2 <= 2**26


def test_very_many_features_keep_their_distances() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(40, 5000, generator=generator, dtype=torch.float64)
    small = narrowed(features)
    assert small.shape == (40, 2048)
    # relative variance of a squared distance: 2 / 2048
    ratio = torch.pdist(small).square() / torch.pdist(features).square()
    assert float((ratio - 1).abs().max()) < 5 * (2 / 2048) ** 0.5
    assert torch.equal(narrowed(features[:, :2048]), features[:, :2048])


def test_a_budget_of_time_takes_fewer_layers() -> None:
    x = [samples(100, 1)]
    slow = Fused(network(), Gaussian(), budget=Budget(milliseconds=1e-6)).fit(x, progress=False)
    assert slow.monitor.fitted.parameters.names == ("2.weight", "2.bias")
    assert "took" in slow.summary()
    quick = Fused(network(), Gaussian(), budget=Budget(milliseconds=1e9)).fit(x, progress=False)
    assert len(quick.monitor.fitted.parameters.names) == 4


@pytest.mark.parametrize(
    ("numbers", "layers", "rank"),
    [(2 * 20 * 299, 2, 20), (2 * 20 * 299 - 1, 1, 20), (2 * 7 * 20, 1, 7)],
)
def test_a_budget_of_memory_takes_fewer_layers_rather_than_directions(
    numbers: int, layers: int, rank: int
) -> None:
    middle, last = nn.Linear(30, 9), nn.Linear(9, 2)  # 279 weights and 20
    net = nn.Sequential(nn.Linear(WIDTH, 30), nn.Tanh(), middle, nn.Tanh(), last)
    fused = Fused(net, Gaussian(), budget=Budget(bytes=4 * numbers))
    monitor = fused.fit([samples(100, 1).float()], progress=False).monitor
    assert monitor.fitted.parameters.names == (
        *(("2.weight", "2.bias") if layers == 2 else ()),
        *("4.weight", "4.bias"),
    )
    assert monitor.rank == rank
    assert ("fewer than 20" in fused.summary()) == (layers == 1)


def test_samples_that_are_not_finite_score_infinity() -> None:
    for likelihood in (Categorical(), Gaussian()):
        fused, x = made(network(), likelihood), samples(6, 4)
        x[2, 0], x[4, 1] = torch.nan, torch.inf
        found = fused(x)
        assert found.score.isinf().tolist() == [False, False, True, False, True, False]
        assert float(found.p_value[2]) == 1 / (fused.calibration.num_data + 1)
        assert "NaN" in fused.explain(x).words(2)


def test_empty_batches_have_no_scores() -> None:
    for likelihood in (Categorical(), Gaussian()):
        found = made(network(), likelihood)(samples(0, 1))
        assert found.score.shape == found.p_value.shape == (0,)


def test_bad_training_samples_are_skipped_or_refused() -> None:
    x = samples(100, 1)
    x[3] = torch.nan
    with pytest.raises(Exception, match="NaN or an infinity"):
        Fused(network(), Categorical()).fit([x], progress=False)
    fused = Fused(network(), Categorical()).fit([x], progress=False, on_bad="skip")
    assert fused.monitor.skipped == 1
    bank = fused._ready().bank
    assert bank is not None
    assert len(bank.samples) == 99


def test_a_fit_that_fails_leaves_all_as_it_was() -> None:
    fused, x = made(network(), Categorical()), samples(9, 4)
    before = fused.score(x)
    bad = samples(50, 5)
    bad[0] = torch.nan
    for act in (fused.fit, fused.update):
        with pytest.raises(Exception, match="NaN or an infinity"):
            act([bad], progress=False)
        assert torch.equal(fused.score(x), before)
    with pytest.raises(CalibrationError, match="finite held-out data"):
        fused.calibrate([bad], progress=False)
    with pytest.raises(CalibrationError, match="at least 8"):
        fused.calibrate([bad[1:5]], progress=False)
    assert torch.equal(fused.score(x), before)


def test_what_is_missing_is_said() -> None:
    fused = Fused(network(), Categorical())
    with pytest.raises(NotFittedError, match=r"fused\.fit"):
        fused.score(samples(2, 1))
    fused.fit([samples(100, 1)], progress=False)
    with pytest.raises(NotFittedError, match=r"fused\.calibrate"):
        fused.score(samples(2, 1))
    with pytest.warns(CalibrationWarning, match="were fitted"):
        fused.calibrate([samples(100, 1)], progress=False)
    with pytest.raises(OptionError, match="layer='nowhere'"):
        Fused(network(), Categorical(), layer="nowhere")
    with pytest.raises(OptionError, match="milliseconds"):
        Budget(milliseconds=0.0)
    with pytest.raises(BatchError, match="layer"):
        Fused(nn.Flatten(), Categorical()).fit([samples(9, 1)], progress=False)


def test_a_changed_model_is_noticed() -> None:
    model = network()
    fused = made(model, Categorical())
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(StaleMonitorError):
        fused.score(samples(2, 1))


def test_weights_and_layer_can_be_chosen() -> None:
    fused = made(network(), Categorical(), parameters=LastLayers(count=2), layer="0")
    assert fused.layer_name == "0"
    assert not fused._ready().closed
    assert len(fused.monitor.fitted.parameters.names) == 4


def test_data_is_read_once_and_labels_are_not_needed() -> None:
    batches = ((samples(50, seed), torch.zeros(50)) for seed in range(3))
    fused = Fused(network(), Categorical()).fit(batches, progress=False)
    assert fused.monitor.basis.num_data == 150
