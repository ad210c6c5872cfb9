"""A saved `Fused`: the monitor's own file, with features and held-out scores around it."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scodkit import __version__
from scodkit.calibration import Calibration
from scodkit.fused.features import FeatureBank
from scodkit.fused.parts import Parts, part_names
from scodkit.fused.standard import Standard
from scodkit.model.input_range import InputRange
from scodkit.monitor import Monitor
from scodkit.numerics import artifact

_KIND = "fused"
_FEATURES, _STANDARD, _RANGE = "features.", "standard.", "range."
_HEADER = artifact.fields(
    {
        "layer": artifact.maybe(artifact.TEXT),
        "most": artifact.whole(1),
        "closed": artifact.FLAG,
        "standardised_on": artifact.whole(),
        "why": artifact.each(artifact.TEXT),
        "parts": artifact.each(artifact.TEXT),
        "bytes": artifact.whole(1),
    },
    others=True,
)


def save(
    path: str | Path,
    parts: Parts,
    standard: Standard | None,
    calibration: Calibration | None,
    *,
    by: Callable[[Tensor], Tensor] | None,
    budget: int,
    sketch: bool,
) -> None:
    """Write a detector to one file, atomically.

    Args:
        path: Where to.
        parts: Fitted.
        standard: How parts are standardised; None if it is not calibrated.
        calibration: Held-out scores, likewise.
        by: What it was calibrated by; a file tells of one such function. A calibration of the
            monitor itself is kept if it is the same.
        budget: Bytes that were allowed.
        sketch: Keep what updates and merges need.
    """
    artifact.check_place(Path(path))
    monitor = copy.copy(parts.monitor)
    if monitor._by is not by:
        monitor.calibration, monitor._by = None, by
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder) / "monitor.scod"
        monitor.save(inner, sketch=sketch)
        content = bytearray(inner.read_bytes())
    tensors = {"monitor": torch.frombuffer(content, dtype=torch.uint8)}
    header: dict[str, Any] = {
        "scodkit_version": __version__,
        "layer": parts.layer,
        "most": 1 if parts.bank is None else parts.bank.most,
        "closed": parts.closed,
        "standardised_on": 0 if standard is None else standard.num_data,
        "why": list(parts.why),
        "parts": list(parts.names),
        "bytes": budget,
    }
    tensors |= {_RANGE + name: own for name, own in parts.range.pack().items()}
    if parts.bank is not None:
        tensors |= {_FEATURES + name: own for name, own in parts.bank.pack().items()}
    if standard is not None and calibration is not None:
        for name in ("median", "spread", "weight"):
            tensors[_STANDARD + name] = getattr(standard, name)
        tensors["calibration"] = calibration.scores
        if calibration.groups is not None:
            tensors["calibration_groups"] = calibration.groups
    artifact.write(path, _KIND, header, tensors)


def load(
    path: str | Path, model: nn.Module, **options: Any
) -> tuple[Parts, Standard | None, Calibration | None, int]:
    """Read a detector, and check that it belongs to a model.

    Args:
        path: Where from.
        model: The model.
        options: Of `Monitor.load`.

    Returns:
        The parts, how they are standardised, held-out scores, and the bytes that were allowed.
    """
    header, tensors = artifact.read(path, _KIND, _HEADER)
    content = artifact.tensor((None,), {torch.uint8}, lambda _: True, "bytes")
    artifact.fields({"monitor": content}, others=True)(str(path), tensors)
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder) / "monitor.scod"
        inner.write_bytes(tensors["monitor"].numpy().tobytes())
        monitor = Monitor.load(inner, model, **options)
    bank = _bank(header, tensors)
    if (bank is None) != (header["layer"] is None):
        artifact.refuse("features of a layer", "one without the other")
    own = f"{header['layer']}.weight", f"{header['layer']}.bias"
    if header["closed"] and monitor.fitted.parameters.names not in ((own[0],), own, own[::-1]):
        artifact.refuse("a closed form of a single layer", "other weights")
    names = part_names(monitor.likelihood)
    if tuple(header["parts"]) != names:
        artifact.refuse(f"the parts {', '.join(names)}", ", ".join(header["parts"]))
    standard = _standard(header, tensors, len(names))
    calibration = None
    if standard is not None:
        scores = artifact.tensor((None,), {torch.float64})
        artifact.fields({"calibration": scores}, others=True)(str(path), tensors)
        calibration = Calibration(tensors["calibration"], tensors.get("calibration_groups"))
    why = tuple(header["why"])
    parts = Parts(
        monitor,
        header["layer"],
        bank,
        header["closed"],
        why,
        InputRange.unpack(_named(tensors, _RANGE)),
    )
    return parts, standard, calibration, header["bytes"]


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _bank(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> FeatureBank | None:
    """Return the features of a file, whose shapes must go together."""
    own = _named(tensors, _FEATURES)
    if not own:
        return None
    wide = {torch.float64}
    matrix = artifact.tensor((None, None), wide)
    counts = artifact.tensor((None,), wide, _none_negative, "counts")
    artifact.fields({"means": matrix, "counts": counts}, others=True)("the features", own)
    classes, width = own["means"].shape
    count = len(own["keys"]) if "keys" in own and own["keys"].ndim else 0
    if not 0 < count <= min(header["most"], int(own["counts"].sum())):
        artifact.refuse(
            "features of at most as many samples as were fitted", f"{count} of them"
        )
    artifact.fields(
        {
            "counts": artifact.tensor((classes,), wide, _none_negative, "counts"),
            "means": matrix,
            "scatter": artifact.tensor((width, width), wide),
            "precision": artifact.tensor((), wide),
            "samples": artifact.tensor((count, width), {torch.float32}),
            "keys": artifact.tensor((count,), {torch.int64}),
        }
    )("the features", own)
    return FeatureBank.unpack(own, header["most"])


def _none_negative(tensor: Tensor) -> bool:
    return bool((tensor >= 0).all()) and bool(tensor.isfinite().all())


def _standard(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], count: int
) -> Standard | None:
    """Return how parts are standardised; None in the file of one that is not calibrated."""
    if not header["standardised_on"]:
        return None
    own = _named(tensors, _STANDARD)
    number = artifact.tensor((count,), {torch.float64})
    amount = artifact.tensor((count,), {torch.float64}, _none_negative, "numbers >= 0")
    artifact.fields({"median": number, "spread": amount, "weight": amount})("the parts", own)
    if not bool((own["spread"] > 0).all()):
        artifact.refuse("spreads > 0", "a spread of 0")
    return Standard(**own, num_data=header["standardised_on"])
