"""A monitor as a file: what is in it, and what must agree when it comes back."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scodkit import __version__
from scodkit.calibration import Calibration
from scodkit.errors import MismatchError, OptionError
from scodkit.factors.choose import is_engine
from scodkit.fit.fitted import Fitted, Recipe
from scodkit.fit.probes import Probes
from scodkit.fit.processes import files_of_all
from scodkit.likelihoods import Heads, Likelihood
from scodkit.model.input_range import InputRange
from scodkit.model.inputs import FORM, Form
from scodkit.model.parameters import Fingerprints, ParameterSet, select_names
from scodkit.model.projected import PROJECTED, ProjectedSet, Projections
from scodkit.numerics import artifact
from scodkit.numerics.files import file_errors
from scodkit.numerics.matmul import sum_dtype, tall_chunks
from scodkit.sketch import Sketch, SketchState, documents
from scodkit.sketch.eigenbasis import Eigenbasis

_KIND = "monitor"

# which of the user's own functions a monitor may have been made with
_FUNCTIONS = ("inputs", "outputs", "task", "by")

# prefixes of the names of tensors: of the sketch's state, of answers to probes, and of what is
# known of the columns of tables
_STATE = "sketch."
_NUMBERS_OF_STATE = ("squared_norm", "outside")
_PROBE = "probe."
_COLUMNS = "columns."
_PROJECTION = "projection."

# random directions along which vectors are checked to be orthonormal
_TRIED = 4

# --- what a file holds ---


# which part of the weights a file has (its ``index`` and the ``count`` of all, the first weight
# at ``start`` and one past the last at ``stop``), and the tensors in it
_Shard = tuple[dict[str, int], dict[str, Tensor]]


def given(**functions: object) -> set[str]:
    """Return the names of the functions that are given, that is, not None."""
    return {name for name, function in functions.items() if function is not None}


_COUNT, _NUMBER = artifact.whole(), artifact.number()

# the one precision besides the model's own that scores are computed in
_HALF = "bfloat16"

# attributes of an eigenbasis that are plain numbers
_BASIS_NUMBERS = {
    "num_data": artifact.whole(1),
    "trace": _NUMBER,
    "certified": artifact.FLAG,
    "residual_norm": artifact.maybe(_NUMBER),
    "residual_rank": _COUNT,
    "slack": _NUMBER,
    "clamped": _COUNT,
}

# fields of every header, and fields that files of earlier versions may lack
_HEADER = artifact.fields(
    {
        "scodkit_version": artifact.TEXT,
        "torch_version": artifact.TEXT,
        "likelihood": documents.DESCRIPTION,
        "sketch": documents.DESCRIPTION,
        "rank": artifact.whole(1),
        "prior_scale": artifact.number("a number > 0", lambda value: value > 0),
        "functions": artifact.fields(dict.fromkeys(_FUNCTIONS, artifact.FLAG)),
        "parameters": artifact.table(artifact.each(_COUNT)),
        "fingerprints": artifact.fields({"parameters": artifact.TEXT, "model": artifact.TEXT}),
        "output_shape": artifact.each(_COUNT),
        "skipped": _COUNT,
        "basis": artifact.fields(_BASIS_NUMBERS, {"outside": _NUMBER}),
    },
    {
        "exempt": artifact.each(artifact.TEXT),
        "engine": artifact.maybe(artifact.that("the name of an engine", is_engine)),
        "form": artifact.maybe(FORM),
        "input_range": artifact.maybe(artifact.RANGES),
        "notes": artifact.OBJECT,
        # of some monitors only
        "shard": artifact.fields(dict.fromkeys(("index", "count", "start", "stop"), _COUNT)),
        "state": documents.STATE,
        "probes": artifact.OBJECT,
        "heads": artifact.table(artifact.each(_COUNT)),
        "precision": artifact.that("'bfloat16'", lambda value: value == _HALF),
        "projected": PROJECTED,
    },
    others=True,
)

# tensors that must be there, and that may be, besides those of sketch and probes
_BASIS_TENSORS = {
    "values": artifact.tensor(
        (None,), artifact.WIDE, artifact.falling, "finite numbers >= 0, descending,"
    ),
    "vectors": artifact.ANY_TENSOR,
}
_OTHER_TENSORS = {
    "calibration": artifact.SCORES,
    "calibration_groups": artifact.ANY_TENSOR,
    "calibration_boxes": artifact.SCORES,
    "samples": artifact.DIGESTS,
}


# --- saving ---


def save(  # noqa: PLR0913 (each a part of a monitor)
    path: str | Path,
    fitted: Fitted,
    recipe: Recipe,
    *,
    prior_scale: float,
    functions: Collection[str],
    calibration: Calibration | None = None,
    notes: Mapping[str, Any] = {},
    with_sketch: bool = True,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Write a monitor to one file, atomically.

    Args:
        path: Where to.
        fitted: The fit.
        recipe: What was fitted.
        prior_scale: ``eps``.
        functions: Names of the user's own functions it was made with, see `given`.
        calibration: Held-out scores, if there are any.
        notes: What else is to be in the file; anything JSON can hold.
        with_sketch: Keep the sketch, for updates and merges.
        part: Which part of the weights its basis and sketch cover, from 0, of how many.
    """
    basis = fitted.basis
    header: dict[str, Any] = {
        "scodkit_version": __version__,
        "torch_version": torch.__version__,
        "likelihood": documents.describe(fitted.likelihood),
        "sketch": documents.describe(recipe.sketch),
        "rank": recipe.rank,
        "prior_scale": prior_scale,
        "functions": {name: name in functions for name in _FUNCTIONS},
        "parameters": {b.name: list(b.shape) for b in fitted.parameters.in_full().blocks},
        "fingerprints": fitted.fingerprints.document(),
        "output_shape": list(fitted.shape),
        "skipped": fitted.skipped,
        "basis": _numbers_of(basis),
        "exempt": list(fitted.fingerprints.exempt),
        "engine": fitted.engine,
        "form": fitted.form and fitted.form.document(),
        "input_range": fitted.input_range,
        "notes": dict(notes),
    }
    if isinstance(fitted.likelihood, Heads):
        header["heads"] = fitted.likelihood.shapes
    if fitted.precision is not None:
        header["precision"] = _HALF
    tensors = {"values": basis.values, "vectors": basis.vectors}
    if isinstance(fitted.parameters, ProjectedSet):
        header["projected"], matrices = fitted.parameters.projections.pack(_PROJECTION)
        tensors |= matrices
    tensors |= {_COLUMNS + name: own for name, own in fitted.columns.pack().items()}
    index, count = part
    if count > 1:
        _, weights = fitted.parameters.divided(index, count)
        ends = {"start": weights.start, "stop": weights.stop}
        header["shard"] = {"index": index, "count": count, **ends}
    if with_sketch and fitted.state is not None:
        header["state"], state_tensors = documents.pack_state(fitted.state, _STATE)
        tensors |= state_tensors
        if fitted.samples is not None:
            tensors["samples"] = fitted.samples
    if fitted.probes is not None:
        header["probes"], answers = fitted.probes.pack(_PROBE)
        tensors |= answers
    tensors |= {} if calibration is None else calibration.tensors()
    artifact.write(path, _KIND, header, tensors)
    if count == 1:
        remove_replaced(Path(path), files_of_all(Path(path)))


def _numbers_of(basis: Eigenbasis) -> dict[str, Any]:
    """Return the plain numbers of a basis."""
    numbers = {name: getattr(basis, name) for name in _BASIS_NUMBERS}
    if basis.residual_norm == math.inf:  # JSON has no infinity
        numbers["residual_norm"] = None
    if basis.outside:  # of projected weights only
        numbers["outside"] = basis.outside
    return numbers


def remove_replaced(path: Path, files: Iterable[Path]) -> None:
    """Remove the files of the monitor that was there before; files of others stay.

    Args:
        path: The name of the monitor, which may have been one file.
        files: Candidates: that one, and files with the names of its shards.
    """
    for file in files:
        header = artifact.header_of(file)
        if header.get("kind") == _KIND and (file == path or "shard" in header):
            with file_errors(file, "removed"):
                file.unlink(missing_ok=True)


# --- reading ---


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a monitor, of one file or of all its shards.

    Args:
        path: Where it was saved.
    """
    header, shards = _read_shards(Path(path))
    return header, _joined(shards, range(_size(header)))


def _read_shards(path: Path) -> tuple[dict[str, Any], list[_Shard]]:
    """Return the header of a monitor, and the tensors of its shards, in order.

    A monitor in one file is a single shard.

    Raises:
        MismatchError: If the file is one of several shards, or the shards are not all those of
            one monitor.
    """
    files = files_of_all(path)
    with file_errors(path, "read"):
        exists = path.exists()
    if exists:  # others may have files of such names
        files = [file for file in files if "shard" in artifact.header_of(file)]
    if exists and files:
        raise MismatchError(
            f"expected one monitor at {path}, found a whole one and {len(files)} parts of one "
            f"({files[0].name} ...); delete the older"
        )
    contents = [read_file(file) for file in files or [path]]
    header = contents[0][0]
    if not files and "shard" in header:
        raise MismatchError(
            f"expected a whole monitor at {path}, got a part of its weights; type the name "
            "it was saved under, without the numbers at its end"
        )
    whole = {"index": 0, "count": 1, "start": 0, "stop": _size(header)}
    shards = [(header.pop("shard", whole), tensors) for header, tensors in contents]
    shards.sort(key=lambda shard: shard[0]["index"])
    count = shards[0][0]["count"]
    expected = [(index, len(contents)) for index in range(len(contents))]
    if [(part["index"], part["count"]) for part, _ in shards] != expected:
        raise MismatchError(
            f"expected {count} files {path.name}.0-of-{count} and so on, got "
            f"{', '.join(file.name for file in files)}; bring all of them, and no others"
        )
    others = any(other != header for other, _ in contents)
    if others or not _fit_together(shards, _size(header)):
        raise MismatchError(f"expected parts of one monitor at {path}, got parts of several")
    _check_columns(path, [tensors["vectors"] for _, tensors in shards])
    return header, shards


def _fit_together(shards: Sequence[_Shard], size: int) -> bool:
    """Return whether shards cover all weights, and agree on the tensors they share."""
    _, first = shards[0]
    starts, stops = ([part[end] for part, _ in shards] for end in ("start", "stop"))
    return [*starts, size] == [0, *stops] and all(
        set(tensors) == set(first)
        and all(_is_tall(name) or torch.equal(tensors[name], first[name]) for name in first)
        for _, tensors in shards
    )


def _joined(shards: Sequence[_Shard], weights: range) -> dict[str, Tensor]:
    """Return the tensors of a monitor, those with a row for each weight for some weights."""
    joined = dict(shards[0][1])
    if len(shards) == 1 and len(weights) == shards[0][0]["stop"]:
        return joined
    for name in filter(_is_tall, joined):
        parts = []
        for part, tensors in shards:
            start = max(weights.start - part["start"], 0)
            parts.append(tensors[name][start : max(weights.stop - part["start"], start)])
        # a copy, or all of a file would stay in memory for a few of its rows
        joined[name] = torch.cat(parts)
    return joined


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of one file of a monitor, checked.

    Args:
        path: Where it is.
    """
    header, tensors = artifact.read(path, _KIND, _HEADER)
    name, size = str(path), _size(header)
    if "shard" in header:
        start, stop = header["shard"]["start"], header["shard"]["stop"]
        artifact.whole(start, size)(f"the end of the shard {name}", stop)
        size = stop - start
    state = documents.state_checks(tensors, _STATE) if "state" in header else {}
    named = {
        n: artifact.ANY_TENSOR for n in tensors if n.startswith((_PROBE, _COLUMNS, _PROJECTION))
    }
    artifact.fields({**_BASIS_TENSORS, **state}, {**_OTHER_TENSORS, **named})(name, tensors)
    rank = len(tensors["values"])
    artifact.whole(0, header["rank"])(f"the number of values of {name}", rank)
    artifact.tensor((size, rank))(f"vectors of {name}", tensors["vectors"])
    held_out = tensors.get("calibration", torch.empty(0))
    for own, dtype in (
        ("calibration_groups", torch.int64),
        ("calibration_boxes", torch.float64),
    ):
        if own in tensors:
            artifact.tensor(held_out.shape, (dtype,))(f"{own} of {name}", tensors[own])
    return header, tensors


def _size(header: Mapping[str, Any]) -> int:
    shapes = header["parameters"] | header.get("projected", {}).get("shapes", {})
    return sum(math.prod(shape) for shape in shapes.values())


def _is_tall(name: str) -> bool:
    """Return whether a tensor of a file has a row for each weight."""
    return name == "vectors" or (
        name.startswith(_STATE) and not name.endswith(_NUMBERS_OF_STATE)
    )


def _check_columns(path: str | Path, parts: Sequence[Tensor]) -> None:
    """Check that vectors are orthonormal: ``U^T U z = z``, for a few random ``z``.

    Args:
        path: Of the monitor.
        parts: Parts of their rows, which make up all of them.

    Raises:
        CorruptArtifactError: If they are not.
    """
    shape, random = (parts[0].shape[1], _TRIED), torch.Generator().manual_seed(0)
    tried = torch.randn(shape, dtype=sum_dtype(*parts), generator=random)
    product = torch.zeros_like(tried)
    for part in parts:
        for chunk in tall_chunks(part):
            rows = part[chunk].to(tried.dtype)
            product += rows.mT @ (rows @ tried)
    # rounding is far below, in half precision too; a wrong column is far above
    if not bool(((product - tried).abs() <= math.sqrt(torch.finfo(part.dtype).eps)).all()):
        artifact.refuse(f"orthonormal vectors in {path}", "others")


# --- loading ---


def load(
    path: str | Path,
    model: nn.Module,
    likelihood: Likelihood | None,
    sketch: Sketch | None,
    functions: Collection[str],
    part: tuple[int, int] = (0, 1),
) -> tuple[dict[str, Any], Fitted, Calibration | None, dict[str, Any]]:
    """Read a monitor and check that it belongs to a model.

    Args:
        path: Where from.
        model: The model, without wrappers.
        likelihood: The likelihood, where a file cannot describe it.
        sketch: The sketch, likewise.
        functions: Names of the user's functions that are given now.
        part: Which part of the weights to load basis and sketch for, from 0, of how many.

    Returns:
        Arguments to construct the monitor with, but for the user's own functions; the fit, on
        the model's device; held-out scores, if there are any; and the notes.

    Raises:
        MismatchError: If weights, functions or likelihood differ from those of the fit.
    """
    header, shards = _read_shards(Path(path))
    flags = {name: name in functions for name in _FUNCTIONS}
    if flags != header["functions"]:
        raise MismatchError(
            f"expected functions as at the fit ({header['functions']}), got {flags}; "
            "pass the same inputs=, outputs=, task= and by= to Monitor.load"
        )
    parameters = _parameters_in(model, header["parameters"])
    if "projected" in header:
        told = header["projected"]
        parameters = Projections.unpack(told, shards[0][1], _PROJECTION, parameters)
    _, weights = parameters.divided(*part)
    tensors = _joined(shards, weights)
    options = {
        "likelihood": _chosen("likelihood", header, likelihood, Likelihood),
        "rank": header["rank"],
        "sketch": _chosen("sketch", header, sketch, Sketch),
        "parameters": parameters,
        "prior_scale": header["prior_scale"],
    }
    if isinstance(options["likelihood"], Heads):
        options["likelihood"] = _as_in_the_fit(options["likelihood"], header)
    fitted = _fitted(header, tensors, options, weights)
    difference = fitted.fingerprints.difference_to(model, parameters)
    if difference:
        raise MismatchError(
            f"expected the weights of the fit for loading, but {difference}; "
            "load the weights of that time, or fit again"
        )
    calibration = None
    if "calibration" in tensors:
        groups, worst = tensors.get("calibration_groups"), tensors.get("calibration_boxes")
        boxes = None if worst is None else Calibration(worst, groups)
        calibration = Calibration(tensors["calibration"], groups, boxes)
    device = next(model.parameters()).device
    return options, fitted.to(device), calibration, dict(header.get("notes", {}))


def _chosen(what: str, header: Mapping[str, Any], given: Any, family: type) -> Any:
    """Return the likelihood or sketch of a file, or the one given if it agrees.

    Raises:
        MismatchError: If it does not.
    """
    described = header[what]
    chosen = documents.build(described, family) if given is None else given
    if documents.describe(chosen) != described:
        raise MismatchError(f"expected the {what} of the fit, {described}, got {chosen!r}")
    return chosen


def _as_in_the_fit(heads: Heads, header: Mapping[str, Any]) -> Heads:
    """Return heads in the order of the fit, with the shapes that they had.

    Raises:
        CorruptArtifactError: If the shapes cannot be of these heads.
    """
    shapes, outputs = header.get("heads", {}), header["output_shape"]
    if set(shapes) != set(heads.likelihoods) or len(outputs) != 1:
        artifact.refuse(f"the shapes of {', '.join(heads.likelihoods)}", str(shapes))
    ordered = replace(heads, likelihoods={name: heads.likelihoods[name] for name in shapes})
    ordered.shapes.update({name: tuple(shape) for name, shape in shapes.items()})
    return ordered


def _fitted(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    options: Mapping[str, Any],
    weights: range,
) -> Fitted:
    """Return the fit of a file; fields may be missing in old files."""
    parameters, sketch = options["parameters"], options["sketch"]
    numbers = dict(header["basis"])
    if numbers["residual_norm"] is None:
        numbers["residual_norm"] = math.inf
    basis = Eigenbasis(tensors["values"], tensors["vectors"], **numbers)
    _check_basis(basis, sketch)
    part = None if len(weights) == parameters.num_parameters else weights
    state = None
    if "state" in header and (part is None or sketch.takes_products):  # others hold whole rows
        state = documents.unpack_state(header["state"], tensors, _STATE, sketch, part)
        _check_state(state, basis, parameters.num_parameters, header["rank"])
    ranges, form = header.get("input_range"), header.get("form")
    columns = {
        name.removeprefix(_COLUMNS): seen
        for name, seen in tensors.items()
        if name.startswith(_COLUMNS)
    }
    return Fitted(
        likelihood=options["likelihood"],
        parameters=parameters,
        basis=basis,
        state=state,
        fingerprints=Fingerprints(
            **header["fingerprints"], exempt=tuple(header.get("exempt", ()))
        ),
        shape=tuple(header["output_shape"]),
        skipped=header["skipped"],
        engine=header.get("engine"),
        input_range=ranges and {name: (low, high) for name, (low, high) in ranges.items()},
        columns=InputRange.unpack(columns),
        samples=tensors.get("samples"),
        form=form and Form(**form),
        probes=Probes.unpack(header.get("probes"), tensors, _PROBE),
        precision=torch.bfloat16 if "precision" in header else None,
    )


def _check_basis(basis: Eigenbasis, sketch: Sketch) -> None:
    """Check that a basis which claims a certificate can have one.

    Raises:
        CorruptArtifactError: If it cannot.
    """
    rounding = math.sqrt(torch.finfo(basis.values.dtype).eps)
    most = (basis.trace + basis.rank * basis.slack) * (1 + rounding)
    below = float(basis.values.double().sum()) <= most
    exact = sketch.certified and basis.vectors.dtype == basis.values.dtype
    if basis.certified and not (below and exact):
        artifact.refuse("a basis below the curvature, as certified", "one that cannot be")


def _check_state(state: SketchState, basis: Eigenbasis, size: int, rank: int) -> None:
    """Check that a sketch belongs to a basis, as far as that shows without solving again.

    Raises:
        CorruptArtifactError: If it does not.
    """
    trace = (float(state.squared_norm) + float(state.outside)) / max(1, state.num_data)
    try:
        fewest = state.sketch.columns(size, rank)
    except OptionError as error:
        artifact.refuse(f"a sketch that can give rank {rank}", f"{state.sketch} ({error})")
    agrees = (
        (state.num_parameters, state.num_data) == (size, basis.num_data)
        and state.columns >= fewest
        and state.num_estimated <= state.num_data
        and (state.num_estimated > 0 or math.isclose(trace, basis.trace, rel_tol=1e-9))
        and not (state.num_estimated and basis.certified)
    )
    if not agrees:
        artifact.refuse("the sketch behind the basis", "another")


def _parameters_in(model: nn.Module, shapes: Mapping[str, list[int]]) -> ParameterSet:
    named = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    differing = [
        f"{name}: {tuple(shape)} in the file, {named.get(name, 'not')} in the model"
        for name, shape in shapes.items()
        if named.get(name) != tuple(shape)
    ]
    if differing:
        raise MismatchError(
            "expected the model this monitor was fitted on, but parameters differ ("
            + "; ".join(differing[:5])
            + "); build the model as it was then"
        )
    if list(shapes) != [name for name in named if name in shapes]:
        raise MismatchError(
            "expected parameters in the order of the model, got another order; build the model "
            "as it was then, or fit again"
        )
    return select_names(model, list(shapes))
