"""Names that people know: of layers, directions and predictions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from scodkit import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LastLayers,
    Monitor,
    MonteCarlo,
    Task,
)
from scodkit.errors import OptionError
from scodkit.explain.words import direction_names, in_words, layer_names, shortened


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.words = nn.Embedding(50, 6)
        self.blocks = nn.ModuleList([nn.LSTM(6, 8), nn.LayerNorm(8)])
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 2))


def test_layers_have_their_kind_and_shape() -> None:
    paths = ["scale", "words", "blocks.0", "blocks.1", "head"]
    assert layer_names(Named(), paths) == (
        "scale",
        "words: Embedding (50->6)",
        "blocks.0: LSTM (6->8)",
        "blocks.1: LayerNorm (8)",
        "head: Linear (8->2)",
    )


def test_numbered_layers_are_counted_by_kind() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), inner, nn.Linear(3, 3))
    assert layer_names(model, ["0", "1", "2.1", "3"]) == (
        "Linear 1 (2->4)",
        "BatchNorm1d 1 (4)",
        "Linear 3 (4->3)",
        "Linear 4 (3->3)",
    )
    x = torch.randn(20, 2)
    fitted = Monitor(model.eval(), Gaussian(), rank=3, parameters=LastLayers(count=1))
    told = fitted.fit([x], progress=False).explain(x[:2])
    assert told.layers.names == ("Linear 4 (3->3)",)


@pytest.mark.parametrize(
    ("likelihood", "shape", "names"),
    [
        (Categorical(), (2,), ("class 0", "class 1")),
        (Categorical(directions=2), (5,), ("axis 0", "axis 1")),
        (Categorical(class_dim=1), (2, 1, 2),
         ("class 0 at 0", "class 1 at 0", "class 0 at 1", "class 1 at 1")),
        (Gaussian(), (2,), ("output 0", "output 1")),
        (Bernoulli(), (1,), ("output 0",)),
        (HeteroscedasticGaussian(), (2,), ("output 0", "log-variance of output 0")),
        (MonteCarlo(lambda out: torch.distributions.Normal(out, 1.0), samples=2), (1,),
         ("draw 0", "draw 1")),
        (Task(lambda out: out[:, :1]), (2,), ("outcome 0",)),
    ],
)  # fmt: skip
def test_directions_are_named_after_what_they_are(likelihood, shape, names) -> None:
    assert direction_names(likelihood, shape) == names
    assert len(names) == likelihood.named().num_directions(shape)


def test_classes_name_directions_and_predictions() -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 4)
    fitted = Monitor(nn.Linear(4, 3), Categorical(), rank=4).fit([x], progress=False)
    animals = ["cat", "dog", "cow"]
    told = fitted.explain(x[:5], classes=animals)
    assert told.directions.names == tuple(animals)
    best = fitted.model(x[:5]).argmax(1).tolist()
    assert [words.split()[0] for words in told.predictions] == [animals[i] for i in best]
    assert f"predicted {told.predictions[1]}" in told.words(1)
    fitted.notes["classes"] = animals
    assert fitted.explain(x[:5]).directions.names == tuple(animals)
    with pytest.raises(OptionError, match="3 different names, one for each class, got 2"):
        fitted.explain(x, classes=["cat", "dog"])


def test_classes_at_positions_are_where_their_logits_are() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 1, 1, 2)
    fitted = Monitor(nn.Conv2d(1, 3, 1), Categorical(class_dim=1), rank=3)
    told = fitted.fit([x], progress=False).explain(x[:4])
    assert told.directions.names[3] == "class 0 at 1"
    swapped = fitted.explain(x[:4].flip(3)).directions.values
    both = [*range(3, 6), *range(3)]
    torch.testing.assert_close(swapped[:, both], told.directions.values, rtol=1e-5, atol=1e-12)


def test_predictions_in_words() -> None:
    assert in_words(Bernoulli(), torch.tensor([0.0, 2.0])) == "50 %, 88 %"
    assert in_words(Gaussian(), torch.tensor([1.0, float("nan")])) == "not finite"
    assert in_words(Gaussian(), torch.arange(9.0)) == "0, 1, 2, 3, ... (9 numbers)"
    assert in_words(Categorical(), torch.tensor([0.0, 9.0]), ["one name"]) == "class 1 (100 %)"


def test_long_names_keep_their_end() -> None:
    assert shortened("short") == "short"
    assert shortened("encoder.layer.11.attention.query", 20) == "...1.attention.query"


WINDOW = """
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

class FigureCanvas(FigureCanvasAgg):
    required_interactive_framework = "headless"  # as of a toolkit with windows

FigureManager = FigureManagerBase
"""

SHOWS = """
import torch
from scodkit.explain import Shares
shares = Shares(("a", "b"), torch.tensor([[1.0, 2.0]]))
assert shares.plot().axes  # pyplot is not imported: a figure of nobody
import matplotlib.pyplot as plt
mine = plt.figure()
shares.plot()
print(len(plt.get_fignums()))
"""


@pytest.mark.parametrize(("backend", "figures"), [("Agg", 1), ("module://window", 2)])
def test_figures_belong_to_pyplot_where_it_has_windows(
    backend: str, figures: int, tmp_path: Path
) -> None:
    (tmp_path / "window.py").write_text(WINDOW)
    without = ("DISPLAY", "WAYLAND_DISPLAY")
    env = {name: value for name, value in os.environ.items() if name not in without}
    env |= {"MPLBACKEND": backend, "PYTHONPATH": f"{tmp_path}:{env.get('PYTHONPATH', '')}"}
    run = subprocess.run(
        [sys.executable, "-c", SHOWS], env=env, capture_output=True, text=True, check=False
    )
    assert (run.stdout.strip(), run.returncode) == (str(figures), 0), run.stderr
