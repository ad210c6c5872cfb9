"""Load what a command line names: a model, its data, a saved monitor.

Models and data may be the user's code, ``package.module:callable`` or ``file.py:callable``.

Code is run only if it is named on the command line or in the user's own configuration: a saved
monitor never names any. What code prints goes to stderr, so that stdout holds results alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import operator
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from scodkit import Calibration, Heads, Likelihood, Monitor, Scored, errors, monitor_file
from scodkit.cli import messages
from scodkit.cli.files import Form, Samples, read_samples
from scodkit.cli.tables import Columns, joined
from scodkit.errors import OptionError, ScodError
from scodkit.fit.data import loader_like
from scodkit.model.projected import options_in
from scodkit.numerics.files import regular_file
from scodkit.parts import Shard, reads_all_once
from scodkit.sketch import Sketch, documents

_LONGEST = 400  # letters of other libraries' messages that are passed on


def load_model(spec: str, weights: Path | None, device: str) -> nn.Module:
    """Return the user's model, with weights if there is a file of them, on a device.

    Args:
        spec: A callable that returns an ``nn.Module``, or such a module.
        weights: A ``.safetensors`` file, or a state dict written by ``torch.save``.
        device: As torch names it.

    Raises:
        OptionError: If the model, the weights or the device cannot be used.
    """
    where = _device(device)
    model = _named(spec, "a model")
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"expected {spec} to return an nn.Module, got a {type(model).__name__}; type the "
            "name of a function that returns the trained network"
        )
    if weights is not None:
        _load_weights(model, weights)
    return model.to(where)


def open_monitor(
    path: Path, model: str, weights: Path | None, device: str
) -> tuple[Monitor, Form]:
    """Return a saved monitor, and the form of its model's inputs.

    Args:
        path: Where it is.
        model: The model it was fitted on, as the user names it.
        weights: A file of the model's weights; None if it comes with them.
        device: Where the model is to run.
    """
    network = load_model(model, weights, device)
    monitor = load_monitor(path, network, weights)
    return monitor, Form.of_fit(monitor.notes, network)


def load_monitor(path: Path, model: nn.Module, weights: Path | None) -> Monitor:
    """Return a saved monitor of a model.

    Args:
        path: Where it is.
        model: The model it was fitted on.
        weights: Where the model's weights are from; None if it came with them.

    Raises:
        MismatchError: If it belongs to another model.
    """
    try:
        return _of_one_output(path, Monitor.load(path, model))
    except errors.MismatchError as error:
        if weights is not None:
            raise
        told, _, advice = str(error).partition("; ")
        forgotten = "type --weights with the file of the fit, if it was left out"
        raise errors.MismatchError(f"{told}; {forgotten}; or {advice}") from error


def unfitted_monitor(path: Path, model: nn.Module) -> Monitor:
    """Return a monitor with the options of a saved one, for a model whose weights may differ.

    Args:
        path: Where the saved one is.
        model: The model to fit it on.

    Raises:
        OptionError: If it was made with functions, which are in no file.
    """
    header, tensors = monitor_file.read(path)
    functions = [name for name, given in header["functions"].items() if given]
    if functions:
        raise OptionError(
            f"expected a monitor that was made without functions, got {path}, which had "
            f"{', '.join(functions)}; renew it in Python, where they are"
        )
    names: list[str] = list(header["parameters"])
    projected = header.get("projected")
    monitor = Monitor(
        model,
        documents.build(header["likelihood"], Likelihood),
        header["rank"],
        sketch=documents.build(header["sketch"], Sketch),
        parameters=names if projected is None else options_in(projected, names),
        prior_scale=header["prior_scale"],
    )
    monitor.notes = dict(header.get("notes", {}))
    _of_one_output(path, monitor)
    if "calibration" in tensors:
        monitor.calibration = Calibration(tensors["calibration"])
    return monitor


def _of_one_output(path: Path, monitor: Monitor) -> Monitor:
    """Return a monitor that the command line can show.

    Raises:
        OptionError: If it is of several heads.
    """
    if isinstance(monitor.likelihood, Heads):
        raise OptionError(
            f"expected a monitor of one output, got {path}, which is of several heads "
            f"({', '.join(monitor.likelihood.likelihoods)}); use it in Python: "
            f"Monitor.load({str(path)!r}, model)(x)"
        )
    return monitor


def batches_of(
    spec: str,
    size: int,
    form: Form,
    *,
    finite: bool = True,
    columns: Columns | None = None,
) -> Iterable[Any]:
    """Return batches of what the user names.

    Args:
        spec: A file of arrays, a folder of images, or a callable that returns a tensor or
            array, a ``Dataset``, or an iterable of batches; so is a tuple of tensors.
        size: Samples in a batch, of what is not in batches yet.
        form: The form to bring samples to, if they come as arrays.
        finite: Refuse a NaN or an infinity in arrays.
        columns: What those of a table are for; as at the fit by default.

    Raises:
        OptionError: If the callable returns something else.
    """
    path = Path(spec)
    if path.exists() or ":" not in spec:
        data: object = read_samples(path, columns or Columns(), form)
    else:
        data = _named(spec, "data")
    if isinstance(data, Tensor):
        data = data.detach().cpu()
        data = (data.float() if data.dtype == torch.bfloat16 else data).numpy()
    if isinstance(data, np.ndarray):
        data = Samples.of_array(data, spec)
    if isinstance(data, Samples):
        data = replace(data, form=form, finite=finite)
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=size)
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping)):
        return data
    raise OptionError(
        f"expected {spec} to return a tensor, a Dataset or an iterable of batches, got a "
        f"{type(data).__name__}; type the name of a function that returns one of those"
    )


def shard_of(batches: Iterable[Any], index: int, count: int) -> Iterable[Any]:
    """Return one shard of some batches: nothing is padded or repeated.

    Args:
        batches: As `batches_of` returns them. Batches of the user's own iterable are dealt
            out in turn, so that every shard reads all of them.
        index: Which part, from 0.
        count: How many parts there are.

    Raises:
        OptionError: If it is a loader that cannot be divided.
    """
    if count == 1:
        return batches
    if isinstance(batches, DataLoader):
        if not reads_all_once(batches):
            raise OptionError(
                "expected a DataLoader that reads every item of its data set once, to be "
                "divided, got one with a sampler of its own, or that drops some; let the "
                "callable return a Dataset that is read by position"
            )
        part = Shard(batches.dataset, index, count)
        return loader_like(batches, part, batch_size=batches.batch_size)
    return itertools.islice(batches, index, None, count)


@contextlib.contextmanager
def running(monitor: object, *, columns_typed: bool = False) -> Iterator[None]:
    """Run a model on the user's inputs; its errors are reported as errors of the inputs.

    Args:
        monitor: A method with the model; the notes of a monitor may have the form of the
            fit's inputs.
        columns_typed: Whether the command names the columns to take.

    Yields:
        Nothing.

    Raises:
        BatchError: If the model fails on the inputs.
        InsufficientMemoryError: If there is too little memory for a batch.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Exception as raised:
        # where a model fails, the library says what to type in Python
        error = raised.__cause__ if isinstance(raised, errors.ModelCallError) else raised
        if error is None or isinstance(error, (ScodError, OSError, MemoryError)):
            raise
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise errors.InsufficientMemoryError(
                f"expected enough memory for a batch, got too little ({one_line(error)}); type "
                "--batch-size with a smaller number"
            ) from error
        raise errors.BatchError(
            "expected inputs that the model can be run on, but it failed on these "
            f"({one_line(error)}); {_of_other_inputs(monitor, columns_typed)}"
        ) from error


def _of_other_inputs(monitor: object, columns_typed: bool) -> str:
    """Return what to do where a model fails on its inputs."""
    notes = monitor.notes if isinstance(monitor, Monitor) else {}
    noted = notes.get("inputs", {})
    shape, columns = noted.get("shape"), noted.get("columns")
    if columns is not None and "fit" not in notes:  # it is being fitted
        advice = "give the columns that the model was trained with, and no others"
        if columns_typed:
            advice = "name after --columns all that the model was trained with, and no others"
        elif noted.get("target") is None:
            last = columns[-1]
            advice = "leave out columns that the model was not trained with, as --target "
            advice += f"{shlex.quote(last)} or --drop {shlex.quote(joined([last]))}"
        return f"{advice}: the inputs were the {len(columns)} columns {', '.join(columns)}"
    form = "" if shape is None else f" (the fit had samples of shape {tuple(shape)})"
    return f"pass inputs of the shape and dtype it was trained with{form}"


def name_columns(monitor: Monitor) -> None:
    """Let a fit on a table tell columns of data frames apart by name, in Python.

    Args:
        monitor: Fitted; its notes have the names, if there are any.
    """
    form, columns = monitor.fitted.form, monitor.notes.get("inputs", {}).get("columns")
    if columns is not None and form is not None:
        calibration = monitor.calibration  # the scores stay the same
        monitor._change(form=replace(form, columns={"0": [*columns]}))
        monitor.calibration = calibration


def threshold_of(
    monitor: Monitor,
    rate: float,
    confidence: float | None = None,
    *,
    needed: str | None,
    todo: str,
) -> float | None:
    """Return the score above which inputs are flagged, refused before any input is read.

    Args:
        monitor: Fitted, perhaps calibrated.
        rate: Accepted share of false alarms.
        confidence: How surely it must hold; None for on average.
        needed: What a calibration is needed for, if it is.
        todo: The command that makes one.

    Returns:
        The score (nats); None without a calibration.

    Raises:
        NotFittedError: If there is no calibration, and one is needed.
    """
    if monitor.calibration is not None:
        return monitor.calibration.threshold(rate, confidence=confidence)
    if needed is None:
        return None
    raise errors.NotFittedError(
        f"expected a calibrated monitor {needed}, got one that is not; type: {todo}"
    )


def scored_batches(
    monitor: Monitor, batches: Iterable[Any], title: str = "scoring"
) -> Iterator[tuple[Any, Scored]]:
    """Yield batches with their scores, behind a progress bar on a terminal.

    Args:
        monitor: The monitor.
        batches: As `batches_of` returns them.
        title: What the bar says.
    """
    with running(monitor):
        for batch in tqdm(batches, title, unit="batch", disable=None):
            yield batch, monitor(batch)


def one_line(error: BaseException) -> str:
    """Return an error of another library on one line, cut where it gets long."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _named(spec: str, what: str) -> object:
    """Return the module at a name on the command line, or the result of the callable there.

    Args:
        spec: ``package.module:name`` or ``file.py:name``; dots in the name go into objects.
        what: What it is to be, for messages.

    Raises:
        OptionError: If there is no such name, the callable needs arguments, or it fails.
    """
    where, colon, name = spec.rpartition(":")
    if not (colon and where and name):
        raise OptionError(
            f"expected {what} as package.module:callable or file.py:callable, got {spec!r}; "
            f"type: {_with_callable(where or name)}"
        )
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    try:
        target = operator.attrgetter(name)(module)
    except AttributeError as error:
        callables = _callables(module)
        near = messages.nearest(name, callables)
        advice = f"type one of {', '.join(callables) or 'no callables'}"
        if near is not None:
            advice = f"type: {messages.corrected(spec, f'{where}:{near}')}"
        raise OptionError(
            f"expected {name} in {where}, got {', '.join(callables) or 'nothing'} there; "
            f"{advice}"
        ) from error
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        raise OptionError(
            f"expected a callable at {spec}, got a {type(target).__name__}; type the name of a "
            "function, or of a class"
        )
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


def _callables(module: ModuleType) -> list[str]:
    """Return the names of a module's own functions and classes, and of its networks."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, nn.Module)
        or (callable(value) and name[0] != "_" and value.__module__ == module.__name__)
    ]


def _with_callable(where: str) -> str:
    """Return the command that was typed with a callable after the name of a file or module."""
    callables = ["net"]
    if where.endswith(".py") and Path(where).is_file():
        callables = _callables(_from_file(Path(where))) or callables
    return messages.corrected(where, f"{where or 'model.py'}:{callables[0]}")


@functools.cache
def _from_file(path: Path) -> ModuleType:
    """Return the module in a file, with its folder to import from, as of a script.

    Raises:
        OptionError: If it fails.
        MissingFileError: If there is no such file.
    """
    path = regular_file(path, "Python file").resolve()
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
            near = messages.nearest(name, [path.stem for path in Path().glob("*.py")])
            advice = "for a file, type its name with .py"
            if near is not None:
                advice = f"type: {messages.corrected(name, near)}"
            raise OptionError(
                f"expected a module named {name}, got none here or among the installed ones; "
                f"{advice}"
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
            f"expected {where} to run, but it raised ({one_line(error)}); to see where, type: "
            f"{messages.debug_command()}"
        ) from error


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(
            f"expected a device that torch finds here, got {name!r} ({one_line(error)}); type "
            "--device cpu"
        ) from error
    return device


def _load_weights(model: nn.Module, path: Path) -> None:
    regular_file(path, "file of weights")
    try:
        if path.suffix == ".safetensors":
            state: Any = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the error below says it all
                state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = f"what cannot be read without running code in it ({one_line(error)})"
        raise _not_a_state_dict(path, reason) from error
    if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
        names = f" with {', '.join(map(str, state))}" if isinstance(state, dict) else ""
        raise _not_a_state_dict(path, f"a {type(state).__name__}{names}")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise OptionError(
            f"expected the weights of this model in {path}, got others ({one_line(error)}); "
            "type the file of this model, or the model of this file"
        ) from error


def _not_a_state_dict(path: Path, content: str) -> OptionError:
    return OptionError(
        f"expected a state dict, tensors by name, in {path}, got {content}; save the "
        "model's state_dict alone, as torch.save or safetensors does"
    )
