"""One function of fixed shapes, recorded once and replayed: a CUDA graph, or compiled code."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from scodkit.errors import CaptureError, CaptureWarning, first_line
from scodkit.numerics.torch_private import compile_graph, make_fx

Function = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
Replay = Callable[[Sequence[Tensor], int], tuple[Tensor, ...]]

# relative distance allowed between two ways to round the same numbers
_TOLERANCE = {torch.float64: 1e-8, torch.bfloat16: 1e-1, torch.float16: 1e-1}
_TOLERANCE_SINGLE = 1e-3
_TOLERANCE_TF32 = 1e-2  # what convolutions on a GPU round to, unless told not to

_WARM_UP = 3
_TIMED_RUNS = 10


class Captured:
    """A function that was recorded for tensors of fixed shapes.

    Args:
        replay: Computes the same from other tensors of the same shapes; told how many of its
            results are wanted.
        example: Tensors it was recorded with.
    """

    def __init__(self, replay: Replay, example: Sequence[Tensor]) -> None:
        self._replay = replay
        self._signature = _signature(example)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # it is of this process and of these weights: a copy starts without

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors have the shapes, dtypes and device of the example."""
        return _signature(tensors) == self._signature

    def __call__(self, tensors: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
        """Return the first ``count`` results of the function for these tensors."""
        with self._lock, torch.no_grad():
            return self._replay(tensors, count)


def capture(
    function: Function, example: Sequence[Tensor], *, fuse: bool = False
) -> Captured | None:
    """Record a function of tensors, and check that the recording computes the same.

    What depends on the values of tensors through Python (branches, loops) is recorded as it
    went for the example.

    Args:
        function: Computes tensors from tensors, without waiting for a GPU.
        example: Tensors with the shapes to come.
        fuse: On a GPU, compile before recording: fewer kernels, after a longer wait. On a CPU
            compiling is all there is.

    Returns:
        The recording; None (with a `CaptureWarning`) where it would not pay.

    Raises:
        CaptureError: If the function cannot be recorded, or the recording differs from it.
    """
    on_gpu = example[0].is_cuda
    try:
        expected = function(example)
        fast = _compiled(function, example) if fuse or not on_gpu else function
        captured = Captured(_cuda_graph(fast, example) if on_gpu else _plain(fast), example)
        found = captured(example, len(expected))
    except Exception as error:
        raise CaptureError(
            f"expected a model whose scored forward pass can be recorded, but it raised "
            f"{first_line(error)}; go on "
            "without monitor.compile"
        ) from error
    _check_same(found, expected)
    replays = partial(captured, example, len(found))
    if not on_gpu and _seconds(replays) >= _seconds(partial(function, example)):
        warnings.warn(
            "the compiled scored forward pass is not faster here: the eager one stays",
            CaptureWarning,
            stacklevel=3,
        )
        return None
    return captured


def _nothing() -> None:
    """Return what is left of a recording when it is copied."""


def _cuda_graph(function: Function, example: Sequence[Tensor]) -> Replay:
    device = torch.cuda.device(example[0].device)  # it need not be the current one
    with device:
        return _recorded(function, [tensor.clone() for tensor in example])


def _recorded(function: Function, held: list[Tensor]) -> Replay:
    aside = torch.cuda.Stream(held[0].device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP):  # libraries choose kernels and allocate on first use
            function(held)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(held)

    def replay(tensors: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
        with torch.cuda.device(held[0].device):
            for own, given in zip(held, tensors, strict=True):
                own.copy_(given)
            graph.replay()
            # the next replay writes over the graph's own
            return tuple(result.clone() for result in results[:count])

    return replay


def _plain(function: Function) -> Replay:
    return lambda tensors, count: function(tensors)[:count]


def _compiled(function: Function, example: Sequence[Tensor]) -> Function:
    # views are traced, which other strides would not allow
    plain: list[Any] = [tensor.contiguous() for tensor in example]
    # traced with its backward pass, so that the compiler sees plain operations only; and not
    # by torch.compile, which would look at every weight again on each call
    traced = make_fx(lambda *tensors: function(tensors))(*plain)
    with torch.no_grad():
        compiled = compile_graph(traced, plain)
    return lambda tensors: tuple(compiled(*(tensor.contiguous() for tensor in tensors)))


def _check_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    rough = expected[0].is_cuda and torch.backends.cudnn.allow_tf32
    single = _TOLERANCE_TF32 if rough else _TOLERANCE_SINGLE
    tolerance = _TOLERANCE.get(expected[0].dtype, single)
    for a, b in zip(found, expected, strict=True):
        same_places = torch.equal(a.isfinite(), b.isfinite())
        a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (a, b))
        distance = float((a - b).norm()) if same_places else float("inf")
        if distance > tolerance * max(float(b.norm()), 1e-30):
            raise CaptureError(
                f"expected the same numbers from the recording as from the model, got a "
                f"difference of {distance:.1e}; go on without monitor.compile"
            )


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMED_RUNS):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return sorted(times)[_TIMED_RUNS // 2]


def _signature(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
