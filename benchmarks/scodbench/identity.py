"""What a row is about, in a few letters: the network, the settings, the machine."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from scodbench.domain import Domain
from scodbench.methods import METHODS, Case
from scodbench.rows import Row
from scodkit import __version__
from scodkit.errors import OptionError
from scodkit.model.parameters import state_fingerprint
from scodkit.monitor import Monitor

_LETTERS = 8


def network_id(networks: Iterable[nn.Module]) -> str:
    """Return eight letters for the weights and buffers of all these networks, in order."""
    return _short([state_fingerprint(network) for network in networks])


@functools.cache
def settings_id(domain: Domain, name: str, *, sweep: bool = False) -> str:
    """Return eight letters for all that results depend on, but for the data and the weights.

    Args:
        domain: The domain.
        name: One of `METHODS`, or of the sweeps.
        sweep: Whether it is a sweep.
    """
    recipe = None if domain.recipe is None else domain.recipe.describe()
    network = in_words(untrained(domain)[0])
    own = (
        "likelihood",
        "all_layers",
        "last_layers",
        "last",
        "local_rank",
        "fit_on",
        "hessian_on",
    )
    chosen = {key: repr(getattr(domain, key)) for key in own}
    method = name if sweep else f"{name}: {_options(domain, name)}"
    return _short([domain.name, method, sweep, recipe, network, chosen])


def in_words(network: nn.Module) -> str:
    """Return a network's layers and their options, the same in every version of torch.

    Examples:
        >>> in_words(nn.BatchNorm2d(3))
        'BatchNorm2d(3, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)'
    """
    # torch 2.13 says this of norms, torch 2.11 does not
    return re.sub(r"(affine=\w+), bias=\w+", r"\1", repr(network))


def machine(device: torch.device) -> Row:
    """Return what a row says of the machine and the versions."""
    return {
        "device": device_name(device),
        "processor": processor(),  # another rounds otherwise, and training ends elsewhere
        "scodkit": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@functools.cache
def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not on Linux
        told = ""
    named = re.search(r"^model name\s*: (.+)$", told, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Return a device in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def check_device(device: str) -> None:
    """Raise unless torch has a device.

    Args:
        device: As it is typed: cpu, cuda, cuda:1.

    Raises:
        OptionError: If it is another one, or there is no GPU.
    """
    if device == "cpu" or (device.split(":")[0] == "cuda" and torch.cuda.is_available()):
        return
    there = "cpu or cuda" if torch.cuda.is_available() else "cpu (torch finds no GPU here)"
    raise OptionError(f"expected the device {there}, got {device}; type --device cpu")


def short_name(device: str) -> str:
    """Return a device's name as a part of an id.

    Examples:
        >>> short_name("NVIDIA H200"), short_name("NVIDIA GeForce RTX 4090")
        ('h200', 'geforce-rtx-4090')
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-").removeprefix("nvidia-")


def _options(domain: Domain, method: str) -> str:
    """Return what a method is made with; of one that cannot be made here, why."""
    try:
        detector = METHODS[method](Case(domain, untrained(domain)))
    except Exception as error:
        return str(error)
    sketch = f", {detector.sketch}" if isinstance(detector, Monitor) else ""
    return f"{detector}{sketch}"


@functools.cache
def untrained(domain: Domain) -> Sequence[nn.Module]:
    """Return a domain's networks without weights, as many as the smallest ensemble has."""
    with torch.device("meta"):
        return domain.build(), domain.build()


def _short(facts: object) -> str:
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LETTERS]
