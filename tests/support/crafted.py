"""Files made by hand: other headers and tensors, under a digest that is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from scodkit.numerics.hashing import digest_of

NAN, INF = float("nan"), float("inf")

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def craft(path: Path, change: Change) -> None:
    """Change header and tensors of a saved file in place, and make its digest right again."""
    with safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()["scodkit"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    del header["digest"]
    change(header, tensors)
    header["digest"] = digest_of(tensors, salt=json.dumps(header, sort_keys=True))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"scodkit": json.dumps(header)},
    )


def put(place: str, value: object) -> Change:
    """Return a change of one value of the header, ``a.b.0`` in ``{"a": {"b": [...]}}``."""
    *way, last = place.split(".")

    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        found: Any = header
        for step in way:
            found = found[int(step) if isinstance(found, list) else step]
        found[int(last) if isinstance(found, list) else last] = value

    return change


def drop(place: str) -> Change:
    """Return a change that leaves out one value of the header."""
    *way, last = place.split(".")

    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        found: Any = header
        for step in way:
            found = found[step]
        del found[last]

    return change


def turn(name: str, function: Callable[[Tensor], Tensor]) -> Change:
    """Return a change of one tensor."""

    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = function(tensors[name])

    return change


def add(name: str, tensor: Tensor) -> Change:
    """Return a change that adds a tensor."""
    return lambda header, tensors: tensors.update({name: tensor})


def without(name: str) -> Change:
    """Return a change that leaves out a tensor."""
    return lambda header, tensors: tensors.pop(name)
