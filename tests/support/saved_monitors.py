"""Monitors as they were saved by an earlier version, and the scores they gave then.

``tests/saved/`` holds, for each case, two monitors fitted on different halves of the data
(``NAME.scod``, ``NAME.other.scod``) and ``NAME.safetensors``: the network's weights, all
inputs, and the scores of fixed queries. Files are never written again when the code changes:
they say what users have on their disks. ``python tests/support/saved_monitors.py NAME`` adds
a case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scodkit import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LastLayers,
    Likelihood,
    Monitor,
    MonteCarlo,
    Task,
    predicted_class,
)
from scodkit.sketch import Exact, FrequentDirections, Nystrom, Sketch, TwoSided

FOLDER = Path(__file__).parents[1] / "saved"
VIEWS = ("fitted", "compiled", "loaded", "merged", "updated")
RANK = 5


def _classes(output: Tensor) -> torch.distributions.Distribution:
    return torch.distributions.Categorical(logits=output)


def _mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def _maps() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1))


@dataclass(frozen=True)
class Case:
    """One kind of monitor.

    Args:
        likelihood: Of the outputs.
        sketch: Of the curvature; the default one where None.
        model: Makes the network; its weights are overwritten by the saved ones.
        shape: Of one input.
        dtype: Of weights and inputs.
        options: Of the monitor.
        given: What a file cannot describe, as `Monitor.load` wants it.
        by: Groups of the calibration.
    """

    likelihood: Likelihood
    sketch: Sketch | None = None
    model: Callable[[], nn.Module] = lambda: _mlp(3)
    shape: tuple[int, ...] = (4,)
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    by: Callable[[Tensor], Tensor] | None = None

    @property
    def views(self) -> tuple[str, ...]:
        """Under which names scores are on file: draws cannot be compiled."""
        return tuple(v for v in VIEWS if v != "compiled" or not self.likelihood.draws)

    def fresh(self, network: nn.Module) -> Monitor:
        """Return a monitor without a fit."""
        return Monitor(
            network, self.likelihood, RANK, sketch=self.sketch, **self.options, **self._task
        )

    def load(self, path: Path, network: nn.Module) -> Monitor:
        """Return a monitor from its file."""
        return Monitor.load(path, network, by=self.by, **self.given)

    @property
    def _task(self) -> dict[str, Any]:
        return {"task": self.given["task"]} if "task" in self.given else {}


_STEERING = Task(lambda output: output[:, :1] * 3, Gaussian(0.25))
_DRAWS = MonteCarlo(_classes, samples=3, seed=5)

CASES: dict[str, Case] = {
    "nystrom": Case(Categorical()),
    "two_sided": Case(Categorical(), TwoSided(seed=2)),
    "frequent_directions": Case(Categorical(), FrequentDirections()),
    "exact": Case(Categorical(), Exact()),
    "directions": Case(Categorical(directions=1), Nystrom(size=12, seed=3)),
    "maps": Case(Categorical(class_dim=1), model=_maps, shape=(1, 4, 4)),
    "gaussian": Case(Gaussian((0.5, 2.0)), model=lambda: _mlp(2)),
    "heteroscedastic": Case(HeteroscedasticGaussian(), model=lambda: _mlp(2)),
    "bernoulli": Case(Bernoulli(), model=lambda: _mlp(2)),
    "monte_carlo": Case(_DRAWS, given={"likelihood": _DRAWS}),
    "task": Case(Gaussian(0.5), model=lambda: _mlp(2), given={"task": _STEERING}),
    "last_layers": Case(Categorical(), options={"parameters": LastLayers(count=1)}),
    "float32": Case(Categorical(), dtype=torch.float32, options={"prior_scale": 0.5}),
    "groups": Case(Categorical(), by=predicted_class),
}


@dataclass
class Saved:
    """A case with its network and what is on disk.

    Args:
        name: Of the case.
    """

    name: str

    def __post_init__(self) -> None:
        self.case = CASES[self.name]
        self.values = load_file(FOLDER / f"{self.name}.safetensors")
        network = self.case.model().to(self.case.dtype)
        weights = {
            k.removeprefix("weights."): v
            for k, v in self.values.items()
            if k.startswith("weights.")
        }
        network.load_state_dict(weights)
        self.network = network.eval()

    def inputs(self, name: str) -> list[Tensor]:
        """Return inputs by name, in two batches: first, second, heldout or query."""
        return list(self.values[name].tensor_split(2))

    def fitted(self, part: str = "first") -> Monitor:
        """Return a monitor fitted anew."""
        monitor = self.case.fresh(self.network)
        return monitor.fit(self.inputs(part), progress=False)

    def loaded(self, other: bool = False) -> Monitor:
        """Return a monitor from its file: of the first half of the data, or of the second."""
        path = FOLDER / f"{self.name}{'.other' if other else ''}.scod"
        return self.case.load(path, self.network)

    def view(self, how: str) -> Monitor:
        """Return a monitor whose scores are on file under this name."""
        if how == "fitted":
            return self.fitted()
        monitor = self.loaded()
        if how == "compiled":
            return monitor.compile(self.values["query"])
        if how == "merged":
            return monitor.merge(self.loaded(other=True))
        if how == "updated":
            return monitor.update(self.inputs("second"), progress=False)
        return monitor


def _write(name: str) -> None:
    """Make the files of a case that has none."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(11)

    def draw(count: int, scale: float = 1.0) -> Tensor:
        shape = (count, *case.shape)
        return (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) * scale
        )

    torch.manual_seed(3)
    network = case.model().to(case.dtype)
    values = {f"weights.{k}": v.clone() for k, v in network.state_dict().items()}
    values |= {"first": draw(24), "second": draw(20), "heldout": draw(30), "query": draw(8, 2)}
    FOLDER.mkdir(exist_ok=True)
    save_file(values, FOLDER / f"{name}.safetensors")
    saved = Saved(name)
    first, second = saved.fitted(), saved.fitted("second")
    first.calibrate(saved.inputs("heldout"), by=case.by, progress=False)
    first.notes["made"] = "for tests"
    first.save(FOLDER / f"{name}.scod")
    second.calibrate(saved.inputs("heldout"), by=case.by, progress=False)
    second.save(FOLDER / f"{name}.other.scod")
    query = values["query"]
    for view in case.views:
        values[f"scores.{view}"] = saved.view(view).score(query)
    scored = first(query)
    values["p_value"], values["output"] = scored.p_value, scored.output.detach()
    if first.basis.certified:
        certificate = first.certify(query)
        values["lower"], values["upper"] = certificate.lower, certificate.upper
    values = {k: v.contiguous().clone() for k, v in values.items()}
    save_file(values, FOLDER / f"{name}.safetensors")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CASES:
        if (FOLDER / f"{chosen}.scod").exists():
            sys.exit(f"{chosen} is there; files of earlier versions are not written again")
        _write(chosen)
