"""Samples, training and trained networks that are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from scodbench.domain import Domain, SketchSize, Splits
from scodbench.samples import Loader, TensorSamples
from scodbench.trained import trained
from scodbench.training import Recipe, loss, mean_loss, train
from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.errors import NonFiniteError, OptionError
from scodkit.likelihoods import HeteroscedasticGaussian, MonteCarlo
from scodkit.model.parameters import LastLayers


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def line(count: int, seed: int) -> TensorSamples:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorSamples(x, x.sum(1, keepdim=True))


def build() -> nn.Module:
    return nn.Linear(3, 1)


def deep(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), kind(), nn.Linear(4, 1))


def times(samples: TensorSamples, factor: float) -> TensorSamples:
    return replace(samples, transform=lambda x: factor * x)


SGD = Recipe(torch.optim.SGD, rate=0.05, batch=8, epochs=15, momentum=0.5)


def domain(recipe: Recipe = SGD) -> Domain:
    return Domain(
        name="line",
        title="Line",
        likelihood=Gaussian(),
        build=build,
        splits=lambda folder: Splits(line(64, 0), line(32, 1), line(32, 2), {}),
        recipe=recipe,
        all_layers=SketchSize(8, 4),
        last_layers=LastLayers(count=1),
        last=SketchSize(8, 4),
        local_rank=2,
    )


class TestSamples:
    def test_batches_are_all_of_it_in_order(self) -> None:
        samples = TensorSamples(torch.arange(10.0), torch.arange(10), doubled)
        for size in (1, 3, 10, 99):
            parts = list(samples.batches(size))
            assert torch.equal(torch.cat([x for x, _ in parts]), 2 * torch.arange(10.0))
            assert torch.equal(torch.cat([y for _, y in parts]), torch.arange(10))
            assert len(parts) == len(Loader(samples, size)) == len(list(Loader(samples, size)))

    def test_a_loader_can_be_read_again(self) -> None:
        loader = Loader(line(5, 0), 2)
        first, second = ([x.tolist() for x, _ in loader] for _ in range(2))
        assert first == second

    def test_shuffling_keeps_pairs_together_and_depends_on_the_seed(self) -> None:
        samples = TensorSamples(torch.arange(50.0), torch.arange(50))
        x, y = samples.shuffled(1).read()
        assert torch.equal(x.long(), y)
        assert sorted(y.tolist()) == list(range(50))
        assert not torch.equal(y, samples.shuffled(2).read()[1])
        assert torch.equal(y, samples.shuffled(1).read()[1])

    def test_digest_sees_inputs_targets_and_transform(self) -> None:
        x, y = torch.arange(4.0), torch.arange(4)
        all_four = [
            TensorSamples(x, y),
            TensorSamples(x + 1, y),
            TensorSamples(x, y + 1),
            TensorSamples(x, y, doubled),
        ]
        assert len({samples.digest() for samples in all_four}) == 4
        assert TensorSamples(x.clone(), y).digest() == all_four[0].digest()

    def test_a_probe_sees_what_is_read(self) -> None:
        samples = line(5, 0)
        two, three = times(samples, 2.0), times(samples, 3.0)
        assert two.digest() == three.digest()  # it goes by the name
        assert len({each.probe for each in (samples, two, three, line(5, 1))}) == 4
        assert times(samples, 2.0).probe == two.probe

    def test_uneven_lengths_are_refused(self) -> None:
        with pytest.raises(OptionError, match="as many targets"):
            TensorSamples(torch.zeros(3), torch.zeros(2))


class TestTraining:
    def test_it_learns_the_line(self) -> None:
        found = train(build, Gaussian(), SGD, (line(64, 0), line(32, 1)), 0, progress=False)
        assert found.loss < 1e-3
        assert not found.model.training
        torch.testing.assert_close(found.model.weight, torch.ones(1, 3), atol=0.05, rtol=0)

    def test_a_seed_decides_everything_and_touches_nothing(self) -> None:
        data = (line(64, 0), line(32, 1))
        torch.manual_seed(5)
        before = torch.get_rng_state()
        first = train(build, Gaussian(), SGD, data, 3, progress=False).model.weight
        assert torch.equal(before, torch.get_rng_state())
        torch.manual_seed(6)
        assert torch.equal(
            first, train(build, Gaussian(), SGD, data, 3, progress=False).model.weight
        )
        assert not torch.equal(
            first, train(build, Gaussian(), SGD, data, 4, progress=False).model.weight
        )

    def test_the_best_epoch_is_kept(self) -> None:
        """A rate that blows up: the first epoch is the best, and its weights come back."""
        wild = replace(SGD, rate=0.9, epochs=5)
        data = (line(64, 0), line(32, 1))
        found = train(build, Gaussian(), wild, data, 0, progress=False)
        once = train(
            build, Gaussian(), replace(wild, epochs=found.epoch), data, 0, progress=False
        )
        assert found.loss == pytest.approx(mean_loss(found.model, Gaussian(), data[1], "cpu"))
        assert found.loss <= found.last_loss
        assert torch.equal(found.model.weight, once.model.weight)

    def test_a_network_that_blows_up_is_not_kept(self) -> None:
        mad = replace(SGD, rate=1e30)
        with pytest.raises(NonFiniteError, match="lower the rate"):
            train(build, Gaussian(), mad, (line(64, 0), line(32, 1)), 0, progress=False)

    def test_losses_are_torchs(self) -> None:
        output = torch.randn(6, 3)
        real = torch.rand(6, 3)
        classes = torch.tensor([0, 1, 2, 0, 1, 2])
        pairs = [
            (Gaussian(), real, nn.MSELoss()),
            (Bernoulli(), real.round(), nn.BCEWithLogitsLoss()),
            (Categorical(), classes, nn.CrossEntropyLoss()),
        ]
        for likelihood, targets, wanted in pairs:
            assert torch.equal(loss(likelihood, output, targets), wanted(output, targets))
        means, logs = output[:, :2], real[:, :2]
        found = loss(HeteroscedasticGaussian(), torch.cat([means, logs], dim=1), real[:, 1:])
        assert torch.equal(found, nn.GaussianNLLLoss()(means, real[:, 1:], logs.exp()))
        maps, places = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
        found = loss(Categorical(class_dim=1), maps, places)
        torch.testing.assert_close(found, nn.CrossEntropyLoss()(maps, places))
        with pytest.raises(OptionError, match="expected Gaussian"):
            loss(MonteCarlo(torch.distributions.Poisson), output, real)

    def test_mean_loss_weighs_uneven_batches_and_restores_the_mode(self, monkeypatch) -> None:
        from scodbench import training

        model, samples = build().train(), line(10, 0)
        whole = loss(Gaussian(), model(samples.inputs), samples.targets).item()
        monkeypatch.setattr(training, "_EVALUATE", 4)
        assert mean_loss(model, Gaussian(), samples, "cpu") == pytest.approx(whole, rel=1e-6)
        assert model.training


class TestTrained:
    def test_a_network_is_trained_once(self, tmp_path: Path) -> None:
        own = domain()
        first = trained(own, own.splits(None), 0, cache=tmp_path, progress=False)
        (path,) = tmp_path.iterdir()
        written = path.stat().st_mtime_ns
        second = trained(own, own.splits(None), 0, cache=tmp_path, progress=False)
        assert torch.equal(first.weight, second.weight)
        assert not second.training
        assert path.stat().st_mtime_ns == written

    @pytest.mark.parametrize(
        "other",
        [
            domain(replace(SGD, epochs=14)),
            replace(domain(), likelihood=Gaussian(variance=2.0)),
            replace(domain(), build=lambda: nn.Sequential(nn.Linear(3, 1), nn.ReLU())),
            replace(domain(), name="other"),
        ],
    )
    def test_another_domain_has_another_network(self, tmp_path: Path, other: Domain) -> None:
        splits = domain().splits(None)
        for own in (domain(), other):
            trained(own, splits, 0, cache=tmp_path, progress=False)
        assert len(list(tmp_path.iterdir())) == 2

    def test_activations_count_though_they_have_no_weights(self, tmp_path: Path) -> None:
        for kind in (nn.ReLU, nn.Tanh):
            own = replace(domain(), build=partial(deep, kind))
            trained(own, own.splits(None), 0, cache=tmp_path, progress=False)
        assert len(list(tmp_path.iterdir())) == 2

    @pytest.mark.parametrize("part", ["train", "selection"])
    def test_other_data_makes_another_network(self, tmp_path: Path, part: str) -> None:
        """Other samples, or the same read by another function of the same name."""
        own = domain()
        splits = own.splits(None)
        some = line(64, 9)
        sets = [getattr(splits, part), some, times(some, 2.0), times(some, 3.0)]
        for each in (*sets, times(some, 3.0)):
            changed = replace(splits, **{part: each})
            trained(own, changed, 0, cache=tmp_path, progress=False)
        assert len(list(tmp_path.iterdir())) == len(sets)

    def test_another_seed_makes_another_network(self, tmp_path: Path) -> None:
        own = domain()
        for seed in (0, 1):
            trained(own, own.splits(None), seed, cache=tmp_path, progress=False)
        assert len(list(tmp_path.iterdir())) == 2

    def test_a_damaged_file_is_replaced(self, tmp_path: Path) -> None:
        own = domain()
        wanted = trained(own, own.splits(None), 0, cache=tmp_path, progress=False).weight
        (path,) = tmp_path.iterdir()
        whole = path.read_bytes()
        path.write_bytes(whole[:-5])
        found = trained(own, own.splits(None), 0, cache=tmp_path, progress=False).weight
        assert torch.equal(found, wanted)
        assert len(path.read_bytes()) == len(whole)
