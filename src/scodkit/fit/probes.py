"""Made-up inputs and the model's answers: they tell the same weights in another architecture.

The inputs are drawn anew from a seed, between the lowest and the highest number of the data, so
that no data is in a file.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scodkit.calibration import groups_of
from scodkit.errors import CorruptArtifactError, MismatchError, NoProbesWarning
from scodkit.likelihoods.task import Task
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.numerics.hashing import hashed, shares

# a function of outputs ``(B, *shape)`` that says which group each sample is in
Groups = Callable[[Tensor], Tensor]

_SAMPLES = 4
# made-up outputs that functions of outputs are asked about, and numbers in all of them
_OUTPUTS, _MOST_OUTPUTS = 64, 2**20
# numbers of a sample that are kept of an answer
_ANSWER = 4096
# numbers a made-up tensor may have, and different ones among them: a prime, so that no two
# samples are alike
_MOST, _DRAWN = 2**28, 65521

# distance allowed between two ways to round the same, in shares of the largest number
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_HALF = 1e-1

# which of the user's own things gives an answer, and what to do if it gives another
_ADVICE = {
    "output": "the model, or inputs= or outputs=, gives others; build the model as it was "
    "then, and pass the same functions",
    "task": "task= gives others; pass the task of that time",
    "by": "by= gives others; pass the function it was calibrated with",
}

_HEADER = ("batch", "picked", "outputs", "seed")

_CORRUPT = (
    "expected probe inputs as monitor.save describes them, got others ({}); save the monitor "
    "again"
)


@dataclass(frozen=True)
class Probes:
    """Inputs that are made up, and the answers to them.

    Args:
        batch: How to make a batch, as plain data.
        picked: Whether the model's inputs are picked from it, as from any batch; else it has
            the arguments of the call itself.
        outputs: How to make outputs, for the user's functions of outputs.
        answers: What the model (``output``), its task and its groups (``by``) make of them.
        seed: Of all that is drawn.
    """

    batch: Any
    picked: bool
    outputs: Any = None
    answers: Mapping[str, Tensor] = field(default_factory=dict)
    seed: int = 0

    @staticmethod
    def of(
        network: Network, batch: object, call: Inputs, *, deterministic: bool = False
    ) -> Probes | None:
        """Return probes like a batch.

        Args:
            network: The model, held in eval mode.
            batch: As the loader yields it.
            call: The inputs in it.
            deterministic: Whether the model gave the same outputs twice for real data. It is
                asked once then, unless it draws random numbers.

        Returns:
            None where the model fails on what is made up, or has no finite answer, or two.
        """
        samples = min(_SAMPLES, call.batch_size)
        forms = {True: batch, False: [list(call.args), dict(call.kwargs)]}
        # a mask may mean what to look at, or what not to
        for picked, mask in itertools.product(forms, (True, False)):
            # whatever the user's code raises, which never saw such data
            with contextlib.suppress(Exception):
                described = _described(forms[picked], call.batch_size, samples, mask)
                probes, before = Probes(described, picked), _generators(network)
                output = probes._output(network)
                once = deterministic and torch.equal(before, _generators(network))
                again = output if once else probes._output(network)
                if bool(output.isfinite().all()) and _distance(output, again) is None:
                    count = max(1, min(_OUTPUTS, _MOST_OUTPUTS // output[0].numel()))
                    outputs = _described(output, len(output), count, mask)
                    return replace(
                        probes, outputs=outputs, answers={"output": _thinned(output)}
                    )
        return None

    def answered(self, network: Network, task: Task | None, by: Groups | None) -> Probes:
        """Return the same probes with the answers of a user's functions of outputs.

        Args:
            network: The model, on the device that outputs are on.
            task: The monitor's task.
            by: What it is calibrated by.
        """
        answers = {name: a for name, a in self.answers.items() if name == "output"}
        for name, function in (("task", task), ("by", by)):
            if function is not None:
                with contextlib.suppress(Exception):  # as above
                    answers[name] = self.answer(name, network, task, by)
        return replace(self, answers=answers)

    def answer(
        self, name: str, network: Network, task: Task | None, by: Groups | None
    ) -> Tensor:
        """Return what the model (``output``), its ``task`` or its groups (``by``) answer."""
        if name == "output":
            return _thinned(self._output(network))
        outputs: Tensor = self._made(self.outputs).to(network.device)
        if name == "task" and task is not None:
            return _thinned(task.factor(outputs))
        assert by is not None
        return groups_of(by, outputs)

    def pack(self, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the probes as header data and tensors with prefixed names."""
        answers = {prefix + name: tensor for name, tensor in self.answers.items()}
        return {name: getattr(self, name) for name in _HEADER}, answers

    @staticmethod
    def unpack(
        header: Mapping[str, Any] | None, tensors: Mapping[str, Tensor], prefix: str
    ) -> Probes | None:
        """Return the probes that `pack` took apart; None where a file has none.

        Raises:
            CorruptArtifactError: If the header describes no probes.
        """
        if header is None:
            return None
        answers = {n: tensors[prefix + n] for n in _ADVICE if prefix + n in tensors}
        try:
            return Probes(answers=answers, **header)
        except TypeError as error:
            raise CorruptArtifactError(_CORRUPT.format(error)) from error

    def _output(self, network: Network) -> Tensor:
        made = self._made(self.batch)
        call = network.inputs_of(made if self.picked else Inputs(tuple(made[0]), made[1]))
        with torch.no_grad(), network.in_full_precision():
            return network(call)

    def _made(self, description: Any) -> Any:
        """Return what a description is of.

        Raises:
            CorruptArtifactError: If it is of nothing.
        """
        try:
            return _made(description, self.seed, itertools.count())
        except Exception as error:  # whatever there may be in a file
            raise CorruptArtifactError(_CORRUPT.format(error)) from error


def check_probes(
    probes: Probes | None,
    network: Network,
    task: Task | None = None,
    by: Groups | None = None,
) -> None:
    """Make sure that a model, and functions of its outputs, answer as those of the fit did.

    Args:
        probes: Of the monitor that is loaded; without any, a warning says that nobody can tell.
        network: The model.
        task: The monitor's task.
        by: What it is calibrated by.

    Raises:
        MismatchError: If they do not.
        CorruptArtifactError: If the probes cannot be made.
    """
    if probes is None:
        warnings.warn(
            "the file has no probe inputs: it was saved by an earlier version, or the model "
            "takes none; its weights were compared, but the same weights in another "
            "architecture, or another inputs=, would not be noticed; to have them in it, fit "
            "and save it again",
            NoProbesWarning,
            stacklevel=3,
        )
        return
    for name, function in (("output", network), ("task", task), ("by", by)):
        if function is None or name not in probes.answers:
            continue
        cause = None
        try:
            with network.evaluating():
                answer = probes.answer(name, network, task, by)
                difference = _distance(answer, probes.answers[name])
        except CorruptArtifactError:
            raise
        except Exception as error:
            difference, cause = f"{type(error).__name__}: {error}", error
        if difference is not None:
            raise MismatchError(
                "expected the answers of the fit to made-up inputs, but "
                f"{_ADVICE[name]} ({difference})"
            ) from cause


def _generators(network: Network) -> Tensor:
    """Return the state of torch's random number generators, which changes with each draw."""
    cuda = network.device.type == "cuda"
    states = [torch.cuda.get_rng_state(network.device)] if cuda else []
    return torch.cat([torch.get_rng_state(), *states])


def _described(value: object, size: int, samples: int, mask: bool) -> dict[str, Any]:
    """Return how to make something like a value.

    Args:
        value: A batch, or what is in one.
        size: Samples in that batch.
        samples: Samples in the batches that are made up.
        mask: What all of a mask is.

    Raises:
        TypeError: If it cannot be described without being kept.
    """
    if isinstance(value, Tensor):
        low, high = _range(value.detach(), mask)
        shape = list(value.shape)
        if shape and shape[0] == size:
            shape[0] = samples
        if math.prod(shape) > _MOST:
            raise TypeError("too large to make up")
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": {"shape": shape, "dtype": dtype, "low": low, "high": high}}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        inside = {key: _described(v, size, samples, mask) for key, v in value.items()}
        return {"dict": inside}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return {type(value).__name__: [_described(v, size, samples, mask) for v in value]}
    # words are not to be in the file: they may be a user's
    if value is None or (isinstance(value, (bool, int, float)) and math.isfinite(value)):
        return {"number": value}
    raise TypeError(f"cannot make up a {type(value).__name__}")


def _range(tensor: Tensor, mask: bool) -> tuple[Any, Any]:
    """Return the least and the greatest number to draw for a tensor like this one."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return mask, mask
    if tensor.is_floating_point():
        finite = tensor[tensor.isfinite()].double()
        return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    least, greatest = int(tensor.min()), int(tensor.max())
    if least >= 0 and greatest <= 1:  # a mask, very likely
        return int(mask), int(mask)
    # each place may have a vocabulary of its own, and on a GPU a wrong one is the end of the
    # process: only what was seen in every place
    low, high = int(tensor.amin(0).max()), int(tensor.amax(0).min())
    return (low, high) if low <= high else (least, least)


def _made(description: Any, seed: int, streams: Iterator[int]) -> Any:
    ((kind, inside),) = description.items()
    if kind == "tensor":
        return _drawn(inside, seed, next(streams))
    if kind == "dict":
        return {key: _made(inner, seed, streams) for key, inner in inside.items()}
    if kind == "number":
        return inside
    kinds: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple}
    return kinds[kind](_made(inner, seed, streams) for inner in inside)


def _drawn(description: Mapping[str, Any], seed: int, stream: int) -> Tensor:
    shape, dtype = description["shape"], getattr(torch, description["dtype"])
    low, high = description["low"], description["high"]
    count = math.prod(shape)
    if not isinstance(dtype, torch.dtype) or count > _MOST or min(shape, default=0) < 0:
        raise ValueError(f"{dtype}, {shape}")
    counter = torch.arange(min(count, _DRAWN))
    few: Tensor
    if dtype.is_floating_point:
        few = low + (high - low) * shares(seed, stream, counter).double()
    else:
        few = low + hashed(seed, stream, counter) % (high - low + 1)
    drawn = few.repeat(-(-count // _DRAWN))[:count] if count else few
    return drawn.reshape(shape).to(dtype)


def _thinned(answer: Tensor) -> Tensor:
    """Return some numbers of each sample's answer, spread evenly, on the CPU."""
    flat = answer.detach().flatten(1)
    return flat[:, :: max(1, -(-flat.shape[1] // _ANSWER))].cpu().contiguous()


def _distance(answer: Tensor, fitted: Tensor) -> str | None:
    """Return in words how far an answer is from that of the fit; None if it may be rounding."""
    if answer.shape != fitted.shape or answer.dtype != fitted.dtype:
        return f"{answer.dtype} {tuple(answer.shape)} for {fitted.dtype} {tuple(fitted.shape)}"
    if not fitted.is_floating_point():  # groups, of which one may be a tie
        others = int((answer != fitted).sum())
        return f"{others} of {len(fitted)} groups" if others > len(fitted) // _OUTPUTS else None
    if fitted.numel() == 0:
        return None
    tolerance = _TOLERANCE.get(fitted.dtype, _TOLERANCE_HALF)
    apart, largest = float((answer - fitted).abs().max()), float(fitted.abs().max())
    if apart <= tolerance * largest:  # which a NaN is not
        return None
    return f"{apart:.2g} apart, where the largest is {largest:.2g}"
