"""Sweeps over other things than the monitor: the network's errors, its size, its inputs."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from torch import nn

from scodbench.domain import Domain, SketchSize, Splits
from scodbench.measure import Setup
from scodbench.methods import PAPER
from scodbench.rows import select
from scodbench.samples import Loader, TensorSamples
from scodbench.sweeps import SWEEPS
from scodbench.sweeps import size as size_sweep
from scodbench.sweeps.errors import distances, roc
from scodkit import Categorical, Gaussian, LastLayers, Monitor
from scodkit.baselines import DeepEnsemble
from scodkit.errors import OptionError
from scodkit.metrics import bootstrapped
from scodkit.sketch import Nystrom

CPU = torch.device("cpu")


def targets(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.sum(1), x[:, 0] ** 2], dim=1)


def normal(count: int, seed: int, spread: float = 1.0) -> TensorSamples:
    x = spread * torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorSamples(x, targets(x))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 2))


@pytest.fixture(scope="module")
def setup() -> Setup:
    splits = Splits(
        normal(300, 0),
        normal(200, 1),
        normal(100, 2),
        {"far": normal(100, 3, 3.0)},
        mixed=normal(400, 4, 2.0),
    )
    domain = Domain(
        name="normal",
        title="Normal",
        likelihood=Gaussian(),
        build=build,
        splits=lambda folder: splits,
        all_layers=SketchSize(40, 20),
        last_layers=LastLayers(count=1),
        last=SketchSize(24, 6),
        local_rank=5,
    )
    networks = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(200):
            optimizer.zero_grad()
            (model(splits.train.inputs) - splits.train.targets).square().mean().backward()
            optimizer.step()
        networks.append(model.eval().requires_grad_(True))
    return Setup(domain, splits, 5, networks, CPU)


def test_distances_are_those_of_mahalanobis() -> None:
    generator = np.random.default_rng(0)
    held_out = generator.normal(size=(500, 2)) @ np.array([[2.0, 0.5], [0.0, 0.1]])
    residuals = generator.normal(size=(20, 2))
    inverse = np.linalg.inv(np.cov(held_out.T))
    wanted = [np.sqrt(r @ inverse @ r) for r in residuals]
    found = distances(torch.tensor(residuals), torch.tensor(held_out))
    np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_scores_are_judged_by_large_errors(setup: Setup) -> None:
    rows = {row["method"]: row for row in SWEEPS["errors"](setup)}
    model, mixed = setup.networks[0], setup.splits.mixed
    assert isinstance(mixed, TensorSamples)
    with torch.no_grad():
        held_out, wrong = (
            (model(s.read()[0]) - s.read()[1]).double().numpy()
            for s in (setup.splits.selection, mixed)
        )
    inverse = np.linalg.inv(np.cov(held_out.T))
    known, errors = (
        np.sqrt(np.einsum("ni,ij,nj->n", r, inverse, r)) for r in (held_out, wrong)
    )
    large = errors > np.quantile(known, 0.99)
    assert 0.1 < large.mean() < 0.9
    monitor = Monitor(model, Gaussian(), 20, sketch=Nystrom(size=40))
    ensemble = DeepEnsemble(setup.networks, Gaussian())
    for method, detector in (("scod", monitor), ("deep_ensemble", ensemble)):
        detector.fit(Loader(setup.fit_on, 128), progress=False)
        wanted = roc_auc_score(large, detector.score(mixed.inputs).numpy())
        assert rows[method]["auroc"] == pytest.approx(wanted, abs=1e-6)
        assert rows[method]["threshold"] == pytest.approx(np.quantile(known, 0.99), rel=1e-6)
        assert rows[method]["threshold_share"] == pytest.approx(large.mean())
    assert rows["scod"]["auroc"] > 0.8  # it does tell
    assert rows["naive"]["auroc"] == 0.5


def test_rows_of_errors_have_a_curve_with_their_area(setup: Setup) -> None:
    rows = list(SWEEPS["errors"](setup))
    assert len({row["id"] for row in rows}) == len(rows) == len(PAPER) + 1
    for row in rows:
        false, true = row["roc"]
        assert len(false) == len(true) <= 101
        assert np.trapezoid(true, false) == pytest.approx(row["auroc"], abs=5e-3)
        assert row["auroc_low"] <= row["auroc"] <= row["auroc_high"]
        assert row["ood"] == "mixed"


def test_a_method_that_fails_says_why(setup: Setup) -> None:
    alone = replace(setup, networks=setup.networks[:1])
    rows = {row["method"]: row for row in SWEEPS["errors"](alone)}
    assert rows["deep_ensemble"]["auroc"] is None
    assert "networks" in rows["deep_ensemble"]["why"]
    assert rows["scod"]["auroc"] is not None


def test_errors_need_a_mixed_set_and_a_regression(setup: Setup) -> None:
    without = replace(setup, splits=replace(setup.splits, mixed=None))
    classes = replace(setup, domain=replace(setup.domain, likelihood=Categorical()))
    for wrong in (without, classes):
        with pytest.raises(OptionError, match="mixed set"):
            list(SWEEPS["errors"](wrong))


def pictures(count: int, shape: tuple[int, ...], seed: int = 0) -> TensorSamples:
    generator = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)
    bytes_[:, :, 0, 0], bytes_[:, :, 0, 1] = 0, 255
    return TensorSamples(bytes_, torch.zeros(count), lambda x: x.float() / 255 * 3 - 0.4)


def digits(setup: Setup) -> Setup:
    """Pictures of MNIST's shape, for what needs no sense."""
    sets = [pictures(8, (1, 28, 28), seed) for seed in range(4)]
    splits = Splits(pictures(96, (1, 28, 28)), *sets[:2], {"other": sets[2]})
    domain = replace(setup.domain, name="mnist", likelihood=Categorical())
    return replace(setup, domain=domain, splits=splits, seed=0)


def test_sizes_grow_and_are_timed(setup: Setup, monkeypatch) -> None:
    monkeypatch.setattr(size_sweep, "WIDTHS", (0.25, 1.0))
    rows = list(SWEEPS["size"](digits(setup)))
    counts = []
    for width in (0.25, 1.0):
        net = size_sweep.wide_net(width)
        counts.append(sum(p.numel() for p in net.parameters()))
    assert [row["weights"] for row in rows] == counts
    assert counts[1] == 15493  # the domain's own
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        for key in ("fit_s", "ms_b1", "ms_b64", "forward_ms_b1", "forward_ms_b64"):
            assert row[key] > 0


def test_wide_nets_have_the_weights_of_their_seed() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (size_sweep.wide_net(0.5, seed) for seed in (0, 0, 1))
    assert torch.equal(one[0].weight, same[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)], ids=str)
def test_examples_are_the_pictures(shape: tuple[int, ...], setup: Setup) -> None:
    test, novel = pictures(20, shape), pictures(4, shape, 1)
    splits = Splits(pictures(8, shape), pictures(8, shape), test, {"other": novel})
    rows = list(SWEEPS["examples"](replace(setup, splits=splits, seed=0)))
    assert [row["ood"] for row in rows] == ["known", "other"]
    for row, samples in zip(rows, (test, novel), strict=True):
        assert len(row["pictures"]) == min(6, len(samples))
        for text in row["pictures"]:
            pixels = np.array(Image.open(io.BytesIO(base64.b64decode(text))))
            found = torch.from_numpy(pixels).reshape(*shape[1:], -1).permute(2, 0, 1)
            gap = (samples.inputs.int() - found.int()).abs().flatten(1).amax(1)
            assert int((gap <= 1).sum()) == 1  # one of the set, and the whole of it


def test_wide_examples_are_shrunk_to_means(setup: Setup) -> None:
    test = pictures(3, (3, 52, 128))
    splits = Splits(test, test, test, {})
    (row,) = SWEEPS["examples"](replace(setup, splits=splits, seed=0))
    size = {Image.open(io.BytesIO(base64.b64decode(t))).size for t in row["pictures"]}
    assert size == {(64, 26)}


def test_examples_are_there_once(setup: Setup) -> None:
    assert list(SWEEPS["examples"](replace(digits(setup), seed=1))) == []
    rows = list(select(SWEEPS["examples"](digits(setup)), ood="known"))
    assert [row["id"] for row in rows] == ["examples/mnist/known/0"]


def test_the_thinned_curve_is_the_whole_one_along_its_way() -> None:
    generator = torch.Generator().manual_seed(0)
    known, unknown = (torch.randn(n, generator=generator).round(decimals=1) for n in (30, 25))
    (whole,) = bootstrapped(known, unknown, 0, 0)
    xs, ys = roc(known, unknown, points=41)
    assert (xs[0], ys[0], xs[-1], ys[-1], len(xs)) == (0, 0, 1, 1, 41)
    steps = np.add(xs, ys)
    np.testing.assert_allclose(steps, np.linspace(0, 2, 41), atol=2e-5)
    wanted = np.interp(steps, whole.false + whole.true, whole.true)
    np.testing.assert_allclose(ys, wanted, atol=4e-5)
