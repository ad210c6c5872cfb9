"""A monitor as a file: what is in it, and what must agree when it comes back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scodkit import __version__
from scodkit.calibration import Calibration
from scodkit.errors import MismatchError, OptionError
from scodkit.factors import is_engine
from scodkit.fit.fitted import Fitted
from scodkit.fit.probes import Probes
from scodkit.fit.processes import files_of_all
from scodkit.likelihoods import Likelihood
from scodkit.model.network import Form
from scodkit.model.parameters import ParameterSet, select_names
from scodkit.model.state import Fingerprints
from scodkit.numerics import artifact
from scodkit.numerics.files import file_errors
from scodkit.numerics.matmul import sum_dtype
from scodkit.numerics.schema import (
    ANY_TENSOR,
    DIGESTS,
    FLAG,
    OBJECT,
    RANGES,
    SCORES,
    TEXT,
    WIDE,
    all_of,
    each,
    falling,
    fields,
    maybe,
    number,
    refuse,
    table,
    tensor,
    that,
    whole,
)
from scodkit.parts import Part
from scodkit.sketch import Sketch, SketchState, documents
from scodkit.sketch.eigenbasis import Eigenbasis
from scodkit.sketch.tall import tall_chunks

_KIND = "monitor"
_STATE = "sketch."
_PROBE = "probe."

# what a header must have, and what it may have besides
_HEADER = fields(
    {
        "scodkit_version": TEXT,
        "torch_version": TEXT,
        "likelihood": documents.DESCRIPTION,
        "sketch": documents.DESCRIPTION,
        "rank": whole(1),
        "prior_scale": number("a number > 0", lambda value: 1e-100 < value < 1e100),
        "functions": fields({"inputs": FLAG, "outputs": FLAG, "task": FLAG, "by": FLAG}),
        "parameters": table(each(whole())),
        "fingerprints": fields({"parameters": TEXT, "model": TEXT}),
        "output_shape": each(whole()),
        "skipped": whole(),
        "basis": fields(
            {
                "num_data": whole(1),
                "trace": number(),
                "certified": FLAG,
                "residual_norm": maybe(number()),
                "residual_rank": whole(),
                "slack": number(),
                "clamped": whole(),
            }
        ),
    },
    {
        "parts": each(
            all_of(
                fields({"data": TEXT, "start": whole(), "stop": whole()}),
                that("samples in ascending order", lambda part: part["start"] <= part["stop"]),
            )
        ),
        "notes": OBJECT,
        "state": documents.STATE,
        "shard": fields(dict.fromkeys(("index", "count", "start", "stop"), whole())),
        "engine": maybe(that("the name of an engine", is_engine)),
        "probes": OBJECT,
        "input_range": maybe(RANGES),
        "form": maybe(fields({"parts": whole(1), "axes": each(whole())})),
    },
    others=True,
)

# tensors that must be there, and that may be, besides those of sketch and probes
_BASIS = {
    "values": tensor((None,), WIDE, falling, "finite numbers >= 0, descending,"),
    "vectors": ANY_TENSOR,
}
_OTHERS = {
    "calibration": SCORES,
    "calibration_groups": ANY_TENSOR,
    "samples": DIGESTS,
}

# directions that columns are tried along
_TRIED = 4


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
        "likelihood": documents.describe(stored.likelihood),
        "sketch": documents.describe(stored.sketch),
        "rank": stored.rank,
        "prior_scale": stored.prior_scale,
        "functions": dict(stored.functions),
        "parameters": {b.name: list(b.shape) for b in fitted.parameters.blocks},
        "fingerprints": fitted.fingerprints.document(),
        "exempt": list(fitted.fingerprints.exempt),
        "output_shape": list(fitted.shape),
        "skipped": fitted.skipped,
        "engine": fitted.engine,
        "parts": [part.document() for part in fitted.parts],
        "form": fitted.form and fitted.form.document(),
        "basis": numbers,
        "notes": dict(stored.notes),
    }
    if fitted.input_range is not None:
        header["input_range"] = fitted.input_range
    if shard is not None:
        header["shard"] = asdict(shard)
    tensors = {"values": basis.values, "vectors": basis.vectors}
    if with_sketch and fitted.state is not None:
        header["state"], state_tensors = documents.pack_state(fitted.state, _STATE)
        tensors |= state_tensors
        if fitted.samples is not None:
            tensors["samples"] = fitted.samples
    if fitted.probes is not None:
        header["probes"], answers = fitted.probes.pack(_PROBE)
        tensors |= answers
    if stored.calibration is not None:
        tensors["calibration"] = stored.calibration.scores
        if stored.calibration.groups is not None:
            tensors["calibration_groups"] = stored.calibration.groups
    artifact.write(path, _KIND, header, tensors)
    if shard is None:
        remove_replaced(Path(path), files_of_all(Path(path)))


def remove_replaced(path: Path, files: Iterable[Path]) -> None:
    """Remove what a monitor was before; other files that only have such names stay.

    Args:
        path: The name of the monitor, which may have been one file.
        files: Which to look into: that, and its shards.
    """
    for file in files:
        header = artifact.header_of(file) or {}
        if header.get("kind") == _KIND and (file == path or "shard" in header):
            with file_errors(file, "removed"):
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
    with file_errors(path, "read"):
        one = path.exists()
    if one:  # others may have files of such names
        files = [file for file in files if "shard" in (artifact.header_of(file) or ())]
    if one and files:
        raise MismatchError(
            f"expected one monitor at {path}, found a whole one and {len(files)} parts of one "
            f"({files[0].name} ...); delete the older"
        )
    if not files:
        header, tensors = read_file(path)
        if "shard" in header:
            raise MismatchError(
                f"expected a whole monitor at {path}, got a part of its weights; type the name "
                "it was saved under, without the numbers at its end"
            )
        _check_columns(path, [tensors["vectors"]])
        if rows is None:
            return header, tensors
        # copies, or all of it would stay in memory
        return header, {n: _rows_of(n, t, rows, 0).clone() for n, t in tensors.items()}
    header, shards, parts = _read_shards(path, files)
    _check_columns(path, [part["vectors"] for part in parts])
    joined: dict[str, Tensor] = {}
    for name, small in parts[0].items():
        own = [
            _rows_of(name, part[name], rows, shard.start)
            for part, shard in zip(parts, shards, strict=True)
        ]
        joined[name] = torch.cat(own) if _is_tall(name) else small
    return header, joined


def _read_shards(
    path: Path, files: list[Path]
) -> tuple[dict[str, Any], list[Shard], list[dict[str, Tensor]]]:
    """Return the header that all shards of a monitor share, and the shards, in order.

    Raises:
        MismatchError: If there are others, or not all.
    """
    found = [read_file(file) for file in files]
    if any("shard" not in header for header, _ in found):
        raise MismatchError(f"expected parts of a monitor at {path}, got a whole one")
    both = [(Shard(**header.pop("shard")), header, tensors) for header, tensors in found]
    both.sort(key=lambda one: one[0].index)
    shards = [shard for shard, _, _ in both]
    alike = {shard.count for shard in shards} == {len(files)}
    if not alike or [shard.index for shard in shards] != list(range(len(files))):
        raise MismatchError(
            f"expected {shards[0].count} files {path.name}.0-of-{shards[0].count} and so on, "
            f"got {', '.join(file.name for file in files)}; bring all of them, and no others"
        )
    _, header, first = both[0]
    ends = [0, *(shard.stop for shard in shards)]
    joined = [shard.start for shard in shards] == ends[:-1] and ends[-1] == _size(header)
    for _, other, tensors in both:
        joined = joined and other == header and set(tensors) == set(first)
        joined = joined and all(
            _is_tall(name) or torch.equal(tensors[name], first[name]) for name in first
        )
    if not joined:
        raise MismatchError(f"expected parts of one monitor at {path}, got parts of several")
    return header, shards, [tensors for _, _, tensors in both]


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of one file of a monitor, each as it must be.

    Args:
        path: Where it is.
    """
    header, tensors = artifact.read(path, _KIND, _HEADER)
    name, size = str(path), _size(header)
    if "shard" in header:
        start, stop = header["shard"]["start"], header["shard"]["stop"]
        whole(start, size)(f"the end of the shard {name}", stop)
        size = stop - start
    state = documents.state_checks(tensors, _STATE) if "state" in header else {}
    probes = {probe: ANY_TENSOR for probe in tensors if probe.startswith(_PROBE)}
    fields({**_BASIS, **state}, {**_OTHERS, **probes})(name, tensors)
    rank = len(tensors["values"])
    whole(0, header["rank"])(f"the number of values of {name}", rank)
    tensor((size, rank))(f"vectors of {name}", tensors["vectors"])
    if "calibration_groups" in tensors:
        held_out = tensors.get("calibration", torch.empty(0))
        tensor(held_out.shape, (torch.int64,))(
            f"groups of {name}", tensors["calibration_groups"]
        )
    return header, tensors


def _size(header: Mapping[str, Any]) -> int:
    return sum(math.prod(shape) for shape in header["parameters"].values())


def _check_columns(path: Path, parts: Sequence[Tensor]) -> None:
    """Make sure that vectors are orthonormal: ``U^T U z = z``, for a few random ``z``.

    Args:
        path: Of the monitor.
        parts: Parts of their rows, which make up all of them.

    Raises:
        CorruptArtifactError: If they are not.
    """
    shape, random = (parts[0].shape[1], _TRIED), torch.Generator().manual_seed(0)
    tried = torch.randn(shape, dtype=sum_dtype(*parts), generator=random)
    found = torch.zeros_like(tried)
    for part in parts:
        for chunk in tall_chunks(part):
            rows = part[chunk].to(tried.dtype)
            found += rows.mT @ (rows @ tried)
    # rounding is far below, in half precision too; a wrong column is far above
    if not bool(((found - tried).abs() <= math.sqrt(torch.finfo(part.dtype).eps)).all()):
        refuse(f"orthonormal vectors in {path}", "others")


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
    own_likelihood = _chosen("likelihood", header, likelihood, Likelihood)
    own_sketch = _chosen("sketch", header, sketch, Sketch)
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


def _fitted(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    options: tuple[Likelihood, Sketch],
    rows: range | None,
) -> Fitted:
    likelihood, sketch = options
    parameters = _parameters_in(model, header["parameters"])
    exempt = tuple(header.get("exempt", ()))
    fingerprints = Fingerprints(**header["fingerprints"], exempt=exempt)
    numbers = dict(header["basis"])
    if numbers["residual_norm"] is None:
        numbers["residual_norm"] = float("inf")
    state = None
    basis = Eigenbasis(tensors["values"], tensors["vectors"], **numbers)
    _check_basis(basis, sketch)
    if "state" in header and (rows is None or sketch.takes_products):  # others hold whole rows
        state = documents.unpack_state(header["state"], tensors, _STATE, sketch, rows)
        _check_state(state, basis, parameters.num_parameters, header["rank"])
    shape, skipped = tuple(header["output_shape"]), header["skipped"]
    parts = tuple(Part(**part) for part in header.get("parts", ()))
    ranges = header.get("input_range")  # files of earlier versions have none
    if ranges is not None:
        ranges = {name: (low, high) for name, (low, high) in ranges.items()}
    form = Form(**header["form"]) if header.get("form") else None
    probes = Probes.unpack(header.get("probes"), tensors, _PROBE)
    data = (parts, header.get("engine"), ranges, tensors.get("samples"), form, probes)
    about = (fingerprints, shape, skipped, *data)
    fitted = Fitted(likelihood, parameters, basis, state, *about)
    fitted.check_weights(model)
    return fitted.to(next(model.parameters()).device)


def _check_basis(basis: Eigenbasis, sketch: Sketch) -> None:
    """Make sure a basis is certified only where it can be.

    Raises:
        CorruptArtifactError: If it cannot.
    """
    rounding = math.sqrt(torch.finfo(basis.values.dtype).eps)
    most = (basis.trace + basis.rank * basis.slack) * (1 + rounding)
    below = float(basis.values.double().sum()) <= most
    exact = sketch.certified and basis.vectors.dtype == basis.values.dtype
    if basis.certified and not (below and exact):
        refuse("a basis below the curvature, as certified", "one that cannot be")


def _check_state(state: SketchState, basis: Eigenbasis, size: int, rank: int) -> None:
    """Make sure a sketch is the one behind a basis, as far as that is known without solving.

    Raises:
        CorruptArtifactError: If it is not.
    """
    trace = float(state.squared_norm) / max(1, state.num_data)
    try:
        fewest = state.sketch.columns(size, rank)
    except OptionError as error:
        refuse(f"a sketch that can give rank {rank}", f"{state.sketch} ({error})")
    agrees = (
        (state.num_parameters, state.num_data) == (size, basis.num_data)
        and state.columns >= fewest
        and state.num_estimated <= state.num_data
        and (state.num_estimated > 0 or math.isclose(trace, basis.trace, rel_tol=1e-9))
        and not (state.num_estimated and basis.certified)
    )
    if not agrees:
        refuse("the sketch behind the basis", "another")


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
    if list(shapes) != [name for name in named if name in shapes]:
        raise MismatchError(
            "expected parameters in the order of the model, got another order; build the model "
            "as it was then, or fit again"
        )
    return select_names(model, list(shapes))
