"""``scodbench speed``, ``sketch``, ``alarms``, ``layers``, ``prior``: beside the domains."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from scodkit.errors import OptionError

RESULTS = Path("benchmarks/results")

TablesOption = Annotated[
    bool, typer.Option("--tables", help="Only table and figure, from the rows that are there.")
]


class Suite(str, Enum):
    """What is measured."""

    NETS = "nets"
    LARGE_MODELS = "large-models"
    LARGE_OUTPUTS = "large-outputs"
    MANY_CLASSES = "many-classes"
    DIRECTIONS = "directions"
    SCALING = "scaling"
    CHECKS = "checks"
    FUSED = "fused"
    TRANSFORMERS = "transformers"
    PROJECTED = "projected"


class Device(str, Enum):
    """Where it is measured."""

    CPU = "cpu"
    CUDA = "cuda"


_ONLY_ON = {
    Suite.LARGE_MODELS: Device.CUDA,
    Suite.LARGE_OUTPUTS: Device.CPU,
    Suite.MANY_CLASSES: Device.CPU,
    Suite.DIRECTIONS: Device.CPU,
    Suite.CHECKS: Device.CPU,
}


def speed(
    suite: Annotated[
        Suite,
        typer.Argument(
            help="The paper's networks; networks of millions of weights (on a GPU); thousands "
            "of outputs; classes and vocabularies; fewer directions; many processes; checks "
            "for trust; fused scores; transformers and recurrent networks; projected weights "
            "of large ones."
        ),
    ] = Suite.NETS,
    device: Annotated[Device, typer.Option(help="Where to measure.")] = Device.CPU,
    output: Annotated[Path, typer.Option(help="Folder for rows and tables.")] = RESULTS,
    tables: Annotated[
        bool,
        typer.Option("--tables", help="Only tables, from the rows of nets or projected."),
    ] = False,
) -> None:
    """Time scored predictions and fits against the forward pass, floors, loops and peers.

    Example: scodbench speed large-models --device cuda
    """
    from scodbench.identity import check_device
    from scodbench.speed import (
        checks,
        directions,
        fused,
        large_models,
        large_outputs,
        many_classes,
        projected,
        projected_table,
        scaling,
        transformers,
    )
    from scodbench.speed import speed as nets
    from scodbench.speed.speed_table import print_table

    if tables and suite is Suite.PROJECTED:
        print(projected_table.write(output / "projected_cuda.jsonl"))
        return
    if tables:
        print_table(output)
        return
    only = _ONLY_ON.get(suite, device)
    if device is not only:
        raise OptionError(
            f"expected the device {only.value} for {suite.value}, got {device.value}; type "
            f"--device {only.value}"
        )
    check_device(device.value)
    output.mkdir(parents=True, exist_ok=True)
    measures = {
        Suite.NETS: nets.measure,
        Suite.LARGE_MODELS: large_models.measure,
        Suite.LARGE_OUTPUTS: large_outputs.measure,
        Suite.MANY_CLASSES: many_classes.measure,
        Suite.DIRECTIONS: directions.measure,
        Suite.SCALING: scaling.measure,
        Suite.CHECKS: checks.measure,
        Suite.FUSED: fused.measure,
        Suite.TRANSFORMERS: transformers.measure,
        Suite.PROJECTED: projected.measure,
    }
    measures[suite](device.value, output)


def sketch(tables: TablesOption = False) -> None:
    """Measure how close each sketch comes to the exact Fisher information of real networks.

    Example: scodbench sketch
    """
    from scodbench import sketch_accuracy

    sketch_accuracy.main(tables=tables)


def alarms(tables: TablesOption = False) -> None:
    """Count false alarms over many splits of real digits, and delays of the drift alarm.

    Example: scodbench alarms
    """
    from scodbench import alarms as measured

    measured.main(tables=tables)


def layers(tables: TablesOption = False) -> None:
    """Measure whether more layers serve a regressor's Fused better than more directions.

    Example: scodbench layers
    """
    from scodbench import layers as measured

    measured.main(tables=tables)


def prior(tables: TablesOption = False) -> None:
    """Measure how far alarms depend on the prior and on the noise variance.

    Example: scodbench prior
    """
    from scodbench import prior as measured

    measured.main(tables=tables)
