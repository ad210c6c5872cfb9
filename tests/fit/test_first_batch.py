"""What cannot be right is refused on the first batch, with what to type."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from draws import noise
from engines import close
from scodkit import Bernoulli, Categorical, Gaussian, Monitor
from scodkit.errors import (
    BatchError,
    EngineFallbackWarning,
    LikelihoodWarning,
    ModelCallError,
    NondeterministicError,
)
from scodkit.likelihoods import Likelihood
from scodkit.sharded import ShardedMonitor

X = noise(32, 4, seed=1).float()
LABELS = torch.arange(32) % 3
IMAGES = noise(16, 1, 8, 8, seed=2).float()


def net(outputs: int = 3, *end: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs), *end)
    return nn.Sequential(*layers)


def cnn(*end: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3), *end)


def fit(
    model: nn.Module, first: object, likelihood: Likelihood | None = None, **options
) -> Monitor:
    monitor = Monitor(model, likelihood or Categorical(), rank=5, **options)
    return monitor.fit([first], progress=False)


# -- outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_probabilities_are_not_logits(size: int, dtype: torch.dtype) -> None:
    model, x = net(3, nn.Softmax(1)).to(dtype), X[:size].to(dtype)
    with pytest.raises(
        BatchError, match=r"got probabilities: .*remove the Softmax.*p\.log\(\)"
    ):
        fit(model, x)
    with pytest.raises(BatchError, match="got probabilities"):
        Monitor(model, Categorical(), rank=5).plan(x)
    with pytest.raises(BatchError, match="got probabilities"):
        ShardedMonitor(model, Categorical(), rank=5).fit([x], progress=False)


def test_what_the_refusal_says_to_type_gives_the_scores_of_logits() -> None:
    model = net(3, nn.Softmax(1)).double()
    by_logits = fit(model[:3], X.double())
    by_log = fit(model, X.double(), outputs=lambda p: p.log())
    close(by_log.score(X.double()), by_logits.score(X.double()))


def test_maps_of_probabilities_are_not_logits() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Softmax(1))
    with pytest.raises(BatchError, match="got probabilities"):
        fit(model, IMAGES, Categorical(class_dim=1, directions=1))


def nearly_constant(size: float) -> nn.Module:
    """Logits (0, 1) that hardly depend on the input."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(size * torch.tensor([[1.0] * 4, [2.0] * 4]))
        model.bias.copy_(torch.tensor([0.0, 1.0]))
    return model


def test_logits_are_not_taken_for_probabilities() -> None:
    fit(net(3, nn.LogSoftmax(1)), X)
    fit(net(3, nn.Sigmoid()), X)  # in [0, 1], but they do not sum to one
    fit(net(3, nn.Softmax(1)), X, Gaussian())
    fit(net(3, nn.Softmax(1)), X[:1])  # one row may by chance
    fit(nearly_constant(0.0), X)  # and many that are all the same
    fit(nearly_constant(1e-2), X.abs() / 10)


def test_samples_that_are_not_finite_do_not_hide_probabilities() -> None:
    x = X.clone()
    x[0, 0] = float("nan")
    monitor = Monitor(net(3, nn.Softmax(1)), Categorical(), rank=5)
    with pytest.raises(BatchError, match="got probabilities"):
        monitor.fit([x], progress=False, on_bad="skip", check_deterministic=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_data_sets_are_read_twice_in_any_precision(dtype: torch.dtype) -> None:
    few = X[:64].to(dtype)
    few[0, 0] = float("nan")
    monitor = Monitor(net(3).to(dtype), Categorical(), rank=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineFallbackWarning)
        monitor.fit(few, progress=False, on_bad="skip")
    noisy = Drawn(few)
    with pytest.raises(NondeterministicError, match="item 0"):
        Monitor(net(3).to(dtype), Categorical()).fit(DataLoader(noisy), progress=False)


class Drawn(Dataset[Tensor]):
    """Samples with new noise whenever they are read."""

    def __init__(self, samples: Tensor) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: int) -> Tensor:
        return torch.rand_like(self._samples[place])


def test_probabilities_for_bernoulli_are_warned_of_and_can_be_silenced() -> None:
    model = net(2, nn.Sigmoid())
    with pytest.warns(LikelihoodWarning, match=r"outputs=torch\.logit.*filterwarnings"):
        fit(model, X, Bernoulli())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=LikelihoodWarning)
        fit(model, X, Bernoulli())
    fit(model, X, Bernoulli(), outputs=torch.logit)
    fit(net(2), X, Bernoulli())
    fit(model, X[:4], Bernoulli())  # so few may all be by chance


def test_one_class_is_refused() -> None:
    with pytest.raises(BatchError, match=r"got a single output.*Bernoulli\(\).*Gaussian\(\)"):
        fit(net(1), X)
    with pytest.raises(BatchError, match="got a single output"):
        fit(nn.Conv2d(1, 1, 3), IMAGES, Categorical(class_dim=1))
    fit(net(1), X, Bernoulli())
    fit(net(1), X, Gaussian())


# -- models ----------------------------------------------------------------------------------


def quantised(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that it will move
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


class Added(nn.Module):
    """As torchvision's models that are ready for quantisation, but not quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.add = torch.ao.nn.quantized.FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        return self.add.add(self.first(x), self.second(x))


def test_quantised_models_are_refused_as_such() -> None:
    for model in (quantised(net()), nn.Sequential(nn.Linear(4, 4), quantised(net()))):
        with pytest.raises(BatchError, match=r"got a quantised model .*in floating point"):
            fit(model, X)
    fit(Added(), X)


class AsLongAsTheBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.each = nn.Embedding(9, 3), nn.Parameter(torch.ones(32, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).sum(1) * self.each


def test_a_weight_as_long_as_the_batch_is_refused() -> None:
    tokens = torch.arange(160).reshape(32, 5) % 9
    with pytest.raises(BatchError, match="takes 32 samples at a time and not fewer"):
        fit(AsLongAsTheBatch(), tokens)


# -- inputs ----------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, z: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x + scale * z)


def test_labels_first() -> None:
    for first in ((LABELS, X), [LABELS.float(), X], (LABELS[:, None], LABELS, X)):
        place = len(first) - 1
        said = rf"inputs=lambda batch: batch\[{place}\]"
        with pytest.raises(BatchError, match=said):
            fit(net(), first)
        fit(net(), first, inputs=lambda batch, place=place: batch[place])


def test_several_inputs() -> None:
    first = (X, 2 * X, LABELS)
    with pytest.raises(
        BatchError, match=r"takes the inputs .*inputs=lambda batch: \(batch\[0\], batch\[1\]\)"
    ):
        fit(TwoInputs(), first)
    fit(TwoInputs(), first, inputs=lambda batch: (batch[0], batch[1]))
    with pytest.raises(BatchError, match=r"got 1 of a batch of one; type .*inputs=lambda"):
        fit(TwoInputs(), X)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_integers_where_numbers_belong(dtype: torch.dtype) -> None:
    whole = (100 * IMAGES.abs()).to(dtype)
    said = rf"got {dtype}, .*x / 255 for bytes .*x\.to\(torch\.float32\)"
    with pytest.raises(BatchError, match=said):
        fit(cnn(), whole)
    with pytest.raises(BatchError, match=said):
        fit(cnn(), (whole, LABELS[:16]))
    monitor = fit(cnn(), IMAGES)
    with pytest.raises(BatchError, match=said):
        monitor.score(whole)
    fit(cnn(), whole.float() / 255)


def test_tokens_are_integers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))
    tokens = torch.arange(160).reshape(32, 5) % 9
    monitor = fit(model, tokens)
    with pytest.raises(BatchError, match=r"IndexError: index .*inputs=lambda batch") as raised:
        fit(model, tokens + 1)
    assert "255" not in str(raised.value)
    with pytest.raises(ModelCallError, match="shapes cannot be multiplied"):
        monitor.score(tokens[:, :4])  # which is not about integers


@pytest.mark.parametrize(
    ("model", "x"),
    [(net, X), (cnn, IMAGES), (lambda: nn.LSTM(4, 3, batch_first=True), X.view(8, 4, 4))],
    ids=["vector", "image", "sequence"],
)
def test_a_single_sample(model: Callable[[], nn.Module], x: Tensor) -> None:
    first = (lambda out: out[0][:, -1]) if isinstance(model(), nn.LSTM) else None
    monitor = Monitor(model(), Gaussian(), rank=5, outputs=first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor.fit([x], progress=False)
        assert monitor.score(x[0][None]).shape == (1,)
    ways = (monitor.score, monitor, monitor.certify, monitor.features, monitor.explain)
    for use in (*ways, lambda one: monitor.calibrate([one], progress=False)):
        with pytest.raises(BatchError, match=r"type x\[None\]"):
            use(x[0])
    if first is None:
        with pytest.raises(BatchError, match=r"x\[None\]"):
            fit(model(), x[0])


# -- several batches in place of one ---------------------------------------------------------


def test_a_list_of_batches_is_not_a_batch(path: Path) -> None:
    monitor = fit(net(), X)
    for several in ([X[:8], X[8:16]], (X[:8], X[8:]), [X[:8], X[:8], X[:3]]):
        with pytest.raises(BatchError, match=r"one batch, got \d .*score\(iter\(batches"):
            monitor.score(several)
    monitor.save(path)
    loaded = Monitor.load(path, monitor.model)
    with pytest.raises(BatchError, match="expected one batch"):
        loaded.score([X[:8], X[8:16]])
    assert torch.equal(monitor.score([X, LABELS]), monitor.score(X))
    assert torch.equal(monitor.score([X]), monitor.score(X))


def test_two_batches_are_not_inputs_and_labels(path: Path) -> None:
    labelled = DataLoader(TensorDataset(X, LABELS), batch_size=8)
    monitor = Monitor(net(), Categorical(), rank=5).fit(labelled, progress=False)
    monitor.save(path)
    for each in (monitor, Monitor.load(path, monitor.model)):
        with pytest.raises(BatchError, match=r"one batch, got 2 .*score\(iter\(batches"):
            each.score([X[:8], X[8:16]])
        assert torch.equal(each.score([X, LABELS]), each.score(X))


def test_targets_like_the_inputs_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    loader = DataLoader(TensorDataset(X, 2 * X), batch_size=8)
    monitor = Monitor(model, Gaussian(), rank=5).fit(loader, progress=False)
    assert torch.equal(monitor.score((X, 2 * X)), monitor.score(X))
    with pytest.raises(BatchError, match="expected one batch"):
        monitor.score([X, X[:5]])
    with pytest.raises(BatchError, match=r"expected one batch.*batch\[0\]"):
        fit(model, X, Gaussian()).score((X, 2 * X))
    # of a loader's batches nobody thinks that they are several
    other = DataLoader(TensorDataset(X + 1, X), batch_size=8)
    fit(model, X, Gaussian()).calibrate(other, progress=False)
