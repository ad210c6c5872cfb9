"""A monitor as a file: what is in it, and what must agree when it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scodkit import artifact
from scodkit.calibration import Calibration
from scodkit.distributed import files_of_all
from scodkit.eigenbasis import Eigenbasis
from scodkit.errors import MismatchError
from scodkit.fitted import Fingerprints, Fitted
from scodkit.likelihoods import Likelihood
from scodkit.parameters import ParameterSet, select_names
from scodkit.parts import Part
from scodkit.sketch import Sketch
from scodkit.version import __version__

_KIND = "monitor"
_STATE = "sketch."


@dataclass(frozen=True)
class Stored:
    """Everything a monitor is, but for the model and the user's own functions.

    Args:
        likelihood: What distribution the output parametrises.
        rank: ``k``.
        sketch: How the curvature is summarised.
        prior_scale: ``eps``.
        functions: Which of the user's functions it had, by name.
        fitted: The fit.
        calibration: Held-out scores, if there are any.
        notes: What else is to be in the file; anything JSON can hold.
    """

    likelihood: Likelihood
    rank: int
    sketch: Sketch
    prior_scale: float
    functions: Mapping[str, bool]
    fitted: Fitted
    calibration: Calibration | None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """What a monitor is made with again, but for the user's own functions."""
        return {
            "likelihood": self.likelihood,
            "rank": self.rank,
            "sketch": self.sketch,
            "parameters": self.fitted.parameters,
            "prior_scale": self.prior_scale,
        }


def save(
    path: str | Path, stored: Stored, with_sketch: bool, shard: Shard | None = None
) -> None:
    """Write a monitor to one file, atomically.

    Args:
        path: Where to.
        stored: What to write.
        with_sketch: Keep the sketch, for updates and merges.
        shard: Which part of the weights its basis and sketch are of; None for all.
    """
    fitted, basis = stored.fitted, stored.fitted.basis
    numbers = {k: v for k, v in vars(basis).items() if not isinstance(v, Tensor)}
    del numbers["offloaded"]  # of this process, not of the fit
    if basis.residual_norm == float("inf"):  # JSON has no infinity
        numbers["residual_norm"] = None
    header: dict[str, Any] = {
        "scodkit_version": __version__,
        "torch_version": torch.__version__,
        "likelihood": artifact.describe(stored.likelihood),
        "sketch": artifact.describe(stored.sketch),
        "rank": stored.rank,
        "prior_scale": stored.prior_scale,
        "functions": dict(stored.functions),
        "parameters": {b.name: list(b.shape) for b in fitted.parameters.blocks},
        "fingerprints": vars(fitted.fingerprints),
        "output_shape": list(fitted.shape),
        "skipped": fitted.skipped,
        "engine": fitted.engine,
        "parts": [part.document() for part in fitted.parts],
        "basis": numbers,
        "notes": dict(stored.notes),
    }
    if fitted.input_range is not None:
        header["input_range"] = fitted.input_range
    if shard is not None:
        header["shard"] = asdict(shard)
    tensors = {"values": basis.values, "vectors": basis.vectors}
    if with_sketch and fitted.state is not None:
        header["state"], state_tensors = artifact.pack_state(fitted.state, _STATE)
        tensors |= state_tensors
    if stored.calibration is not None:
        tensors["calibration"] = stored.calibration.scores
        if stored.calibration.groups is not None:
            tensors["calibration_groups"] = stored.calibration.groups
    artifact.write(path, _KIND, header, tensors)
    if shard is None:
        for file in files_of_all(Path(path)):  # of what this replaces
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Shard:
    """Which part of a monitor's weights a file has.

    Args:
        index: Which of the files, from 0.
        count: How many files there are.
        start: Its first weight.
        stop: One past its last.
    """

    index: int
    count: int
    start: int
    stop: int


def read(
    path: str | Path, rows: range | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a monitor, of one file or of all its shards.

    Args:
        path: Where it was saved.
        rows: Of which weights basis and sketch are wanted; all by default.

    Raises:
        MismatchError: If the file is one of several shards, or shards are missing or others.
    """
    path = Path(path)
    files = files_of_all(path)
    if path.exists() and files:
        raise MismatchError(
            f"expected one monitor at {path}, found a whole one and {len(files)} parts of one "
            f"({files[0].name} ...); delete the older"
        )
    if not files:
        header, tensors = artifact.read(path, _KIND)
        if "shard" in header:
            raise MismatchError(
                f"expected a whole monitor at {path}, got a part of its weights; type the name "
                "it was saved under, without the numbers at its end"
            )
        if rows is None:
            return header, tensors
        # copies, or all of it would stay in memory
        return header, {n: _rows_of(n, t, rows, 0).clone() for n, t in tensors.items()}
    parts = [artifact.read(file, _KIND) for file in files]
    shards = [Shard(**header.pop("shard")) for header, _ in parts]
    order = sorted(range(len(parts)), key=lambda i: shards[i].index)
    alike = {shard.count for shard in shards} == {len(files)}
    if not alike or [shards[i].index for i in order] != list(range(len(files))):
        raise MismatchError(
            f"expected {shards[0].count} files {path.name}.0-of-{shards[0].count} and so on, "
            f"got {', '.join(file.name for file in files)}; bring all of them, and no others"
        )
    header = parts[order[0]][0]
    if any(other != header for other, _ in parts):
        raise MismatchError(f"expected parts of one monitor at {path}, got parts of several")
    joined: dict[str, Tensor] = {}
    for name, small in parts[order[0]][1].items():
        own = [_rows_of(name, parts[i][1][name], rows, shards[i].start) for i in order]
        joined[name] = torch.cat(own) if _is_tall(name) else small
    return header, joined


def _is_tall(name: str) -> bool:
    """Return whether a tensor of a file has a row for each weight."""
    return name == "vectors" or (name.startswith(_STATE) and not name.endswith("squared_norm"))


def _rows_of(name: str, tensor: Tensor, rows: range | None, first: int) -> Tensor:
    """Return those rows of a tall tensor that are wanted; ``first`` is which it begins with."""
    if rows is None or not _is_tall(name):
        return tensor
    start = max(rows.start - first, 0)
    return tensor[start : max(rows.stop - first, start)]


def load(
    path: str | Path,
    model: nn.Module,
    likelihood: Likelihood | None,
    sketch: Sketch | None,
    functions: Mapping[str, bool],
    part: tuple[int, int] | None = None,
) -> Stored:
    """Read a monitor and check that it belongs to a model.

    Args:
        path: Where from.
        model: The model, without wrappers.
        likelihood: The likelihood, where a file cannot describe it.
        sketch: The sketch, likewise.
        functions: Which of the user's functions are given now, by name.
        part: Which part of the weights basis and sketch are wanted of, from 0, and of how many
            parts; None for all.

    Returns:
        The monitor's parts, on the model's device.

    Raises:
        MismatchError: If weights, functions or likelihood differ from those of the fit.
    """
    rows = None
    if part is not None:
        header, _ = read(path, range(0))
        _, rows = _parameters_in(model, header["parameters"]).divided(*part)
    header, tensors = read(path, rows)
    if dict(functions) != header["functions"]:
        raise MismatchError(
            f"expected functions as at the fit ({header['functions']}), got {dict(functions)}; "
            "pass the same inputs=, outputs=, task= and by= to Monitor.load"
        )
    own_likelihood = _chosen("likelihood", header, likelihood)
    own_sketch = _chosen("sketch", header, sketch)
    return Stored(
        likelihood=own_likelihood,
        rank=header["rank"],
        sketch=own_sketch,
        prior_scale=header["prior_scale"],
        functions=functions,
        fitted=_fitted(header, tensors, model, (own_likelihood, own_sketch), rows),
        calibration=_calibration(tensors),
        notes=header.get("notes", {}),
    )


def _calibration(tensors: Mapping[str, Tensor]) -> Calibration | None:
    if "calibration" not in tensors:
        return None
    return Calibration(tensors["calibration"], tensors.get("calibration_groups"))


def _chosen(what: str, header: Mapping[str, Any], given: Any) -> Any:
    """Return the likelihood or sketch of a file, or the one given if it agrees.

    Raises:
        MismatchError: If it does not.
    """
    described = header[what]
    chosen = artifact.build(described) if given is None else given
    if artifact.describe(chosen) != described:
        raise MismatchError(f"expected the {what} of the fit, {described}, got {chosen!r}")
    return chosen


def _fitted(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    options: tuple[Likelihood, Sketch],
    rows: range | None,
) -> Fitted:
    likelihood, sketch = options
    parameters = _parameters_in(model, header["parameters"])
    fingerprints = Fingerprints(**header["fingerprints"])
    numbers = dict(header["basis"])
    if numbers["residual_norm"] is None:
        numbers["residual_norm"] = float("inf")
    state = None
    if "state" in header and (rows is None or sketch.takes_products):  # others hold whole rows
        state = artifact.unpack_state(header["state"], tensors, _STATE, sketch)
        state.held = rows
    basis = Eigenbasis(tensors["values"], tensors["vectors"], **numbers)
    shape, skipped = tuple(header["output_shape"]), header["skipped"]
    parts = tuple(Part(**part) for part in header.get("parts", ()))
    ranges = header.get("input_range")  # files of earlier versions have none
    if ranges is not None:
        ranges = {name: (low, high) for name, (low, high) in ranges.items()}
    about = (fingerprints, shape, skipped, parts, header.get("engine"), ranges)
    fitted = Fitted(likelihood, parameters, basis, state, *about)
    fitted.check_weights(model, "loading")
    return fitted.to(next(model.parameters()).device)


def _parameters_in(model: nn.Module, shapes: Mapping[str, list[int]]) -> ParameterSet:
    named = dict(model.named_parameters())
    differing = [
        f"{name}: {tuple(shape)} in the file, "
        + (f"{tuple(named[name].shape)} in the model" if name in named else "not in the model")
        for name, shape in shapes.items()
        if name not in named or list(named[name].shape) != shape
    ]
    if differing:
        raise MismatchError(
            "expected the model this monitor was fitted on, but parameters differ ("
            + "; ".join(differing[:5])
            + "); build the model as it was then"
        )
    return select_names(model, list(shapes))
