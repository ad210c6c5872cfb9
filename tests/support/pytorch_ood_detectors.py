"""pytorch-ood and its detectors, without torchvision, of which they use nothing.

Its package imports data sets and image models at the top, and these torchvision. For the time
of the import, empty stand-ins take that place; a torchvision that can be imported is used. The
trial "pytorch-ood" of try_dist.py runs the tests of the adapter with one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

_STAND_INS = (
    "torchvision",
    "torchvision.datasets",
    "torchvision.datasets.utils",
    "torchvision.models",
    "torchvision.models.resnet",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)


class _Nothing:
    """Can be made of anything, and be a base class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Empty(ModuleType):
    """A package without contents, of which anything can be imported."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


def _has_torchvision() -> bool:
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # the latter beside a torch it was not built for
        return False
    return True


@contextlib.contextmanager
def _without_torchvision() -> Iterator[None]:
    if _has_torchvision():
        yield
        return
    made = {name: _Empty(name) for name in _STAND_INS}
    for name, module in made.items():
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, module)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


@functools.cache
def _imported() -> ModuleType | None:
    if importlib.util.find_spec("pytorch_ood") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the imports, which are not ours
        with _without_torchvision():
            importlib.import_module("pytorch_ood.benchmark")
            return importlib.import_module("pytorch_ood")


def package() -> ModuleType:
    """Return ``pytorch_ood`` with its benchmarks, or skip the test where there is none."""
    module = _imported()
    if module is None:
        pytest.skip("needs pytorch-ood: pip install --no-deps pytorch-ood==0.4.0")
    return module


@contextlib.contextmanager
def detectors() -> Iterator[ModuleType]:
    """Give ``pytorch_ood.detector``, or skip the test where there is none.

    For the time being float64 is the default dtype, in which some of them allocate.
    """
    module = package().detector
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield module
    finally:
        torch.set_default_dtype(before)
