"""Arguments and flags that several verbs share, and the words that some take."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

MonitorArgument = Annotated[
    Path, typer.Argument(metavar="MONITOR", help="A saved monitor.", show_default=False)
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Your model: package.module:callable or file.py:callable, without arguments, "
        "which returns an nn.Module.",
        show_default=False,
    ),
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(help="Weights of the model: .safetensors, or a state dict of torch.save."),
]
DeviceOption = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps.")]
BatchSizeOption = Annotated[
    int, typer.Option(min=1, help="Samples at a time, of data that is not in batches yet.")
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="JSON for machines, on stdout.", rich_help_panel="Other"),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Replace what is there, even if it is no earlier result; never an input.",
        rich_help_panel="Other",
    ),
]
DATA_FORMS = (
    "a file of arrays (.npy, .npz, .csv), a folder of images, or package.module:callable or "
    "file.py:callable, which returns a tensor, a Dataset or batches"
)


class LikelihoodName(str, Enum):
    """What the output parametrises."""

    CATEGORICAL = "categorical"
    GAUSSIAN = "gaussian"
    BERNOULLI = "bernoulli"
    HETEROSCEDASTIC = "heteroscedastic"


class SketchName(str, Enum):
    """How the curvature is summarised."""

    NYSTROM = "nystrom"
    TWO_SIDED = "two-sided"
    FREQUENT_DIRECTIONS = "frequent-directions"
    EXACT = "exact"


class PrecisionName(str, Enum):
    """What a fit runs the model in."""

    BFLOAT16 = "bfloat16"


class FitBad(str, Enum):
    """What a sample with a NaN does to a fit."""

    RAISE = "raise"
    SKIP = "skip"


class ScoreBad(str, Enum):
    """What an input with a NaN does to scoring."""

    RAISE = "raise"
    ALARM = "alarm"
