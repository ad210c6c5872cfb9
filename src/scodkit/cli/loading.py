"""The user's own model and data, named as ``package.module:callable`` or ``file.py:callable``.

Code is run only if it is named on the command line or in the user's own configuration: a saved
monitor never names any. What it prints goes to stderr, so that stdout holds results alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from scodkit import Monitor
from scodkit.errors import (
    BatchError,
    InsufficientMemoryError,
    ModelCallError,
    OptionError,
    ScodError,
)

_LONGEST = 400  # letters of other libraries' messages that are passed on


def named(spec: str, what: str) -> object:
    """Return the object that a name on the command line stands for.

    Args:
        spec: ``package.module:name`` or ``file.py:name``; dots in the name go into objects.
        what: What it is to be, for messages.

    Raises:
        OptionError: If there is no such thing.
    """
    where, colon, name = spec.rpartition(":")
    if not (colon and where and name):
        raise OptionError(
            f"expected {what} as package.module:callable or file.py:callable, got {spec!r}; "
            f"type for instance {where or name or 'model.py'}:net"
        )
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            there = [n for n, v in vars(module).items() if callable(v) and n[0] != "_"]
            raise OptionError(
                f"expected {name} in {where}, found no such thing; there are "
                f"{', '.join(there) or 'no callables'}"
            )
        found = getattr(found, part)
    return found


def called(target: object, spec: str) -> object:
    """Return what a callable returns that takes no arguments.

    Args:
        target: The callable.
        spec: How it was named, for messages.

    Raises:
        OptionError: If it cannot be called so, or fails.
    """
    if not callable(target):
        raise OptionError(f"expected a callable at {spec}, got a {type(target).__name__}")
    try:
        inspect.signature(target).bind()
    except TypeError:
        raise OptionError(
            f"expected {spec} to be callable without arguments, but it takes "
            f"{inspect.signature(target)}; write a function without that calls it"
        ) from None
    except ValueError:  # it does not say what it takes
        pass
    with _user_code(spec):
        return target()


def load_model(spec: str, weights: Path | None, device: str) -> nn.Module:
    """Return the user's model, with weights if there is a file of them, on a device.

    Args:
        spec: A callable that returns an ``nn.Module``, or such a module.
        weights: A ``.safetensors`` file, or a state dict written by ``torch.save``.
        device: As torch names it.

    Raises:
        OptionError: If any of it is not what it should be.
    """
    where = _device(device)
    target = named(spec, "a model")
    model = target if isinstance(target, nn.Module) else called(target, spec)
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"expected {spec} to return an nn.Module, got a {type(model).__name__}"
        )
    if weights is not None:
        _load_weights(model, weights)
    return model.to(where)


@contextlib.contextmanager
def running(monitor: Monitor) -> Iterator[None]:
    """Run a model on the user's inputs: what it raises is taken to be about these.

    Args:
        monitor: The model's monitor, which may remember the form of inputs of its fit.

    Yields:
        Nothing.

    Raises:
        BatchError: If the model fails on the inputs.
        InsufficientMemoryError: If there is too little memory for a batch.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Exception as found:
        # what the library says to type where a model fails is Python
        error = found.__cause__ if isinstance(found, ModelCallError) else found
        if isinstance(error, (ScodError, OSError, MemoryError, SafetensorError)):
            raise
        assert error is not None
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise InsufficientMemoryError(
                f"expected enough memory for a batch, got too little ({said(error)}); type "
                "--batch-size with a smaller number"
            ) from error
        noted = monitor.notes.get("inputs", {})
        before, columns = noted.get("shape"), noted.get("columns")
        form = "" if before is None else f"; the fit had samples of shape {tuple(before)}"
        if columns is not None:
            form += f": to fit on some columns only, type --columns {columns[0]},..."
        raise BatchError(
            "expected inputs that the model can be run on, but it failed on these "
            f"({said(error)}); pass inputs of the shape and dtype it was trained with{form}"
        ) from error


def said(error: BaseException) -> str:
    """Return an error of another library on one line, cut where it gets long."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@functools.cache
def _from_file(path: Path) -> ModuleType:
    """Return the module in a file, with its folder to import from, as of a script.

    Raises:
        OptionError: If there is no such file, or it fails.
    """
    if not path.is_file():
        raise OptionError(f"expected a Python file at {path}, found none")
    path = path.resolve()
    _importable(path.parent)
    # by its own name, where processes that load data may look for it
    name = path.stem if path.stem not in sys.modules else f"_scod_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _user_code(str(path)):
        spec.loader.exec_module(module)
    return module


def _from_package(name: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        with _user_code(name):
            return importlib.import_module(name)
    except OptionError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise OptionError(
                f"expected a module named {name}, found none here or among the installed "
                "ones; for a file, type its name with .py"
            ) from cause
        raise


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextlib.contextmanager
def _user_code(where: str) -> Iterator[None]:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ScodError:
        raise
    except (Exception, SystemExit) as error:
        raise OptionError(
            f"expected {where} to run, but it raised {said(error)}; type scod --debug and the "
            "same command to see where"
        ) from error


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(
            f"expected a device that torch finds here, got {name!r} ({said(error)}); type "
            "--device cpu"
        ) from error
    return device


def _load_weights(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise OptionError(f"expected a file of weights at {path}, found none")
    try:
        if path.suffix == ".safetensors":
            state: object = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the error below says it all
                state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise OptionError(
            f"expected weights in {path} as .safetensors or as a state dict, but it cannot be "
            f"read without running code in it ({said(error)}); save them with "
            "torch.save(model.state_dict(), path)"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
        inside = f"a dict with {', '.join(map(str, state))}" if isinstance(state, dict) else ""
        raise OptionError(
            f"expected a state dict, tensors by name, in {path}, got "
            f"{inside or type(state).__name__}; save it with "
            "torch.save(model.state_dict(), path)"
        )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise OptionError(
            f"expected the weights of this model in {path}, got others ({said(error)})"
        ) from error
