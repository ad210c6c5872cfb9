"""Records a function of fixed shapes and replays it: a CUDA graph, or compiled code."""

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

# relative distance allowed between two computations that differ by rounding
_TOLERANCE = {torch.float64: 1e-8, torch.bfloat16: 1e-1, torch.float16: 1e-1}
_TOLERANCE_SINGLE = 1e-3
_TOLERANCE_TF32 = 1e-2  # convolutions on a GPU round to TF32 by default

_WARM_UP = 3
_TIMED_RUNS = 10


class Captured:
    """A recorded function of tensors of fixed shapes.

    Args:
        replay: Computes the function on other tensors of the same shapes; its second argument
            is how many of the results to return.
        example: Tensors it was recorded with.
    """

    def __init__(self, replay: Replay, example: Sequence[Tensor]) -> None:
        self._replay = replay
        self._signature = _signature(example)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # bound to this process and these weights: a copy has no recording

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

    Python control flow that depends on the values of tensors is recorded as it ran for the
    example.

    Args:
        function: Computes tensors from tensors, without synchronising with a GPU.
        example: Tensors with the shapes to come.
        fuse: On a GPU, compile before recording: fewer kernels, after a longer wait. On a CPU
            the function is always compiled, and not recorded.

    Returns:
        The recording; None (with a `CaptureWarning`) if it is not faster.

    Raises:
        CaptureError: If the function cannot be recorded, or the recording differs from it.
    """
    on_gpu = example[0].is_cuda
    try:
        expected = function(example)
        fast = _compiled(function, example) if fuse or not on_gpu else function
        captured = Captured(_cuda_graph(fast, example) if on_gpu else _plain(fast), example)
        results = captured(example, len(expected))
    except Exception as error:
        raise CaptureError(
            f"expected a model whose scored forward pass can be recorded, but it raised "
            f"{first_line(error)}; go on "
            "without monitor.compile"
        ) from error
    _check_same(results, expected)
    replays = partial(captured, example, len(results))
    if not on_gpu and _seconds(replays) >= _seconds(partial(function, example)):
        warnings.warn(
            "the compiled scored forward pass is not faster here: the eager one stays",
            CaptureWarning,
            stacklevel=3,
        )
        return None
    return captured


def _nothing() -> None:
    """Return None, in place of the copy of a recording."""


def _cuda_graph(function: Function, example: Sequence[Tensor]) -> Replay:
    device = torch.cuda.device(example[0].device)  # it need not be the current one
    with device:
        return _recorded(function, [tensor.clone() for tensor in example])


def _recorded(function: Function, static: list[Tensor]) -> Replay:
    side = torch.cuda.Stream(static[0].device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):  # libraries choose kernels and allocate on first use
            function(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(static)

    def replay(tensors: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
        with torch.cuda.device(static[0].device):
            for target, tensor in zip(static, tensors, strict=True):
                target.copy_(tensor)
            graph.replay()
            # the next replay overwrites the graph's own results
            return tuple(result.clone() for result in results[:count])

    return replay


def _plain(function: Function) -> Replay:
    return lambda tensors, count: function(tensors)[:count]


def _compiled(function: Function, example: Sequence[Tensor]) -> Function:
    # the trace has views, which fail on inputs with other strides
    plain: list[Any] = [tensor.contiguous() for tensor in example]
    # traced with its backward pass, so that the compiler sees plain operations only; not by
    # torch.compile, whose guards would inspect every weight on each call
    traced = make_fx(lambda *tensors: function(tensors))(*plain)
    with torch.no_grad():
        compiled = compile_graph(traced, plain)
    return lambda tensors: tuple(compiled(*(tensor.contiguous() for tensor in tensors)))


def _check_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    rough = expected[0].is_cuda and torch.backends.cudnn.allow_tf32
    single = _TOLERANCE_TF32 if rough else _TOLERANCE_SINGLE
    tolerance = _TOLERANCE.get(expected[0].dtype, single)
    for a, b in zip(actual, expected, strict=True):
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
