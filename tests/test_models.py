"""Models of unusual kinds: those that work, and those that must be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from oracles import dense_factors, dense_fisher, dense_score
from scodkit import Categorical, Gaussian, LastLayers, Monitor
from scodkit.errors import BatchError, OptionError
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import select
from scodkit.sharded import ShardedMonitor
from scodkit.sketch import Exact, Nystrom


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


class Standardised(nn.Module):
    """Looks at the whole batch: a sample alone is another sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


class SequenceFirst(nn.Module):
    """Takes the time steps of an LSTM for its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Standardised(), data(8, 3)),
        (SequenceFirst(), data(7, 5, 3)),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False)),
            data(6, 1, 5, 5),
        ),
        (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)),
            data(6, 3),
        ),
    ],
    ids=["centred", "sequence first", "batch statistics", "batch statistics, one refused"],
)
def test_models_that_mix_samples_are_refused(model: nn.Module, x: Tensor) -> None:
    with pytest.raises(BatchError, match=r"batch_first=True.*running statistics"):
        Monitor(model.double(), Gaussian(), rank=3).fit([x], progress=False)


class Counting(nn.Module):
    """Counts its calls in one buffer, and replaces another."""

    calls: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.layer(x)
        self.last = self.last + 1.0
        return out


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
def test_buffers_are_left_as_found(path) -> None:
    model = Counting().double()
    monitor = Monitor(model, Gaussian(), rank=3).fit([data(8, 3)], progress=False)
    monitor.score(data(2, 3))
    monitor.score(data(2, 3))
    assert int(model.calls) == 0
    assert model.last.tolist() == [0.0, 0.0]
    monitor.save(path)  # the weights are still those of the fit
    model(data(1, 3))
    assert int(model.calls) == 1


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
def test_sparse_embeddings_work() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 3, sparse=True)
            self.head = nn.Linear(3, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).mean(1))

    torch.manual_seed(0)
    model = Bag().double()
    tokens, test = torch.randint(0, 6, (12, 4)), torch.randint(0, 6, (3, 4))
    monitor = Monitor(model, Gaussian(), rank=99, sketch=Exact()).fit([tokens], progress=False)
    dense = Bag().double()
    dense.embed = nn.Embedding(6, 3).double()
    dense.load_state_dict(model.state_dict())
    rows = dense_factors(dense, Inputs((tokens,), {}), Gaussian())
    own = dense_factors(dense, Inputs((test,), {}), Gaussian())
    expected = dense_score(dense_fisher(rows), 12, own, 1.0)
    torch.testing.assert_close(monitor.score(test), expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (
            LastLayers(count=1),
            {"2.bias", *(f"2.parametrizations.weight.original{i}" for i in (0, 1))},
        ),
        (LastLayers(fraction=0.1), None),
    ],
    ids=["count", "fraction"],
)
def test_parametrized_layers_are_one_layer(choice: LastLayers, names: set[str] | None) -> None:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Conv1d(2, 3, 3, bias=False)),
        nn.Flatten(),
        parametrizations.weight_norm(nn.Linear(9, 2)),
    )
    call = Inputs((torch.randn(2, 2, 5),), {})
    chosen = set(select(choice, Network(model), call).names)
    # a fraction goes back to the last convolution, which here is the first layer
    assert chosen == (names or {name for name, _ in model.named_parameters()})


def test_transformer_encoders_match_the_oracle() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    model = nn.Sequential(
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten()
    )
    model = nn.Sequential(model, nn.Linear(12, 3)).double().eval()
    x, test = data(10, 3, 4), data(3, 3, 4, seed=1)
    monitor = Monitor(model, Categorical(), rank=999, sketch=Exact()).fit([x], progress=False)
    rows = dense_factors(model, Inputs((x,), {}), Categorical())
    own = dense_factors(model, Inputs((test,), {}), Categorical())
    expected = dense_score(dense_fisher(rows), 10, own, 1.0)
    torch.testing.assert_close(monitor.score(test), expected, rtol=1e-8, atol=0)


def test_confident_predictions_keep_their_largest_direction() -> None:
    logits = torch.tensor([[0.0, -16.3, -16.6]])
    exact = Categorical().factor(logits.double())[0]
    top = torch.linalg.eigvalsh(exact.mT @ exact)[-1]
    found = Categorical(directions=1).factor(logits)[0].double().square().sum()
    assert float(found) == pytest.approx(float(top), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sketch": Nystrom}, "with brackets"),
        ({"sketch": "nystrom"}, "with brackets"),
        ({"rank": 2.5}, "integer rank"),
        ({"prior_scale": 1e-200}, "prior_scale"),
        ({"model": print}, "nn.Module"),
        ({"model": torch.jit.ScriptModule()}, "not scripted"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_options_of_the_wrong_kind_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Monitor(**{"model": nn.Linear(3, 2), "likelihood": Gaussian(), **options})


@pytest.mark.parametrize("kind", [Monitor, ShardedMonitor])
def test_a_model_without_weights_is_refused_before_it_is_run(kind: Any) -> None:
    monitor = kind(nn.Linear(3, 2, device="meta"), Gaussian(), 2)
    with pytest.raises(OptionError, match="a model with weights, got one on meta"):
        monitor.fit([torch.ones(4, 3)], progress=False)
    if kind is Monitor:
        with pytest.raises(OptionError, match="a model with weights, got one on meta"):
            monitor.plan(torch.ones(4, 3))


def test_maps_and_seeds_are_checked() -> None:
    with pytest.raises(OptionError, match=r"map=SparseSign\(\)"):
        Nystrom(map=Gaussian())
    with pytest.raises(OptionError, match="integer seed"):
        Nystrom(seed=0.5)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (lambda x: {"depth": x}, r"outputs=lambda out: out\['depth'\]"),
        (lambda x: (x, x), r"outputs=lambda out: out\[0\]"),
        (lambda x: x.sum(), r"x\[None\]"),
    ],
    ids=["dict", "tuple", "scalar"],
)
def test_advice_about_outputs_can_be_followed(output, said: str) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return output(super().forward(x))

    with pytest.raises(BatchError, match=said):
        Monitor(Model(3, 2), Gaussian(), rank=2).fit([torch.randn(4, 3)], progress=False)


def test_nested_inputs_are_refused_by_name() -> None:
    monitor = Monitor(nn.Linear(3, 2), Gaussian(), rank=2, inputs=lambda b: (b,))
    with pytest.raises(BatchError, match="got a dict of them"):
        monitor.fit([{"x": torch.randn(4, 3)}], progress=False)


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
def test_a_part_of_the_output_can_be_the_prediction() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(3, 4, batch_first=True)
    monitor = Monitor(model, Gaussian(), rank=5, outputs=lambda out: out[0][:, -1])
    monitor.fit([torch.randn(6, 5, 3)], progress=False)
    assert monitor(torch.randn(2, 5, 3)).output.shape == (2, 4)


def test_a_model_that_begins_in_place_can_be_fitted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = nn.Sequential(nn.ReLU(), *model[1:])
    x, test = torch.randn(20, 4).double(), torch.randn(5, 4).double()
    expected, found = (
        Monitor(net.double().eval(), Gaussian(), rank=10)
        .fit([x.clone()], progress=False)
        .score(test.clone())
        for net in (plain, model)
    )
    torch.testing.assert_close(found, expected)
