"""Torch functions that keep the samples of a batch apart, and where these lie in the result.

A rule is called after the function: from where the samples lie in the arguments, and from the
results, it returns where they lie in the results, one place for all or a list with one each. A
rule that raises cannot tell: the results count as mixed, as do those of functions without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from scodkit.factors.layout import (
    MIXED,
    NEW,
    NOBODYS,
    Call,
    Lay,
    Where,
    indexed,
    matched,
    tensors_in,
)
from scodkit.factors.rules.recurrent import gates
from scodkit.factors.rules.steps import BY_FUNCTION

_MATRIX = 2  # axes of a matrix

Rule = Callable[[Call, list[Tensor]], Where | list[Where]]


# --- Rules ---------------------------------------------------------------------------------


def _number_by_number(call: Call, results: list[Tensor]) -> list[Where]:
    """Return places by broadcasting from the last axis; the batch axis may not be expanded."""
    given = call.given()
    return [matched(given, result) for result in results]


def _chosen(call: Call, results: list[Tensor]) -> Where | list[Where]:
    """Return places after ``torch.where``, which returns indices for a condition alone."""
    alone = len(call.args) + len(call.kwargs) == 1
    return MIXED if alone else _number_by_number(call, results)


def _refolded(call: Call, results: list[Tensor]) -> Where:
    """Return places after a reshape: entries keep their order, and so samples their stride."""
    tensor, where = call.tensors[0], call.wheres[0]
    if where is None or where in NOBODYS:
        return None
    if results[0].numel() != tensor.numel():
        return MIXED
    step = where.inner * math.prod(tensor.shape[where.axis + 1 :])  # to the next sample
    after = 1
    for axis in reversed(range(results[0].ndim)):
        length = after * results[0].shape[axis]
        if step % after == 0 and length % (step * call.size) == 0:
            return Lay(axis, length // (step * call.size), step // after)
        after = length
    return MIXED


def _turned(order: Callable[[Call, list[int]], list[int]]) -> Rule:
    """Return the rule for a permutation; ``order`` returns the old axes in their new order."""

    def rule(call: Call, results: list[Tensor]) -> Where:
        tensor, where = call.only()
        axes = order(call, list(range(tensor.ndim)))
        return where._replace(axis=axes.index(where.axis))

    return rule


def _backwards(_: Call, axes: list[int]) -> list[int]:
    return axes[::-1]


def _matrices_turned(_: Call, axes: list[int]) -> list[int]:
    return [*axes[:-2], axes[-1], axes[-2]]


def _permuted(call: Call, axes: list[int]) -> list[int]:
    dims = call.args[1:] if isinstance(call.argument(1), int) else call.argument(1, "dims")
    return [axes[dim] for dim in dims]


def _transposed(call: Call, axes: list[int]) -> list[int]:
    first = call.argument(1, "dim0", "axis0")
    second = call.argument(2, "dim1", "axis1")
    axes[first], axes[second] = axes[second], axes[first]
    return axes


def _moved(call: Call, axes: list[int]) -> list[int]:
    source, target = call.argument(1, "source"), call.argument(2, "destination")
    sources = [source] if isinstance(source, int) else list(source)
    targets = [target] if isinstance(target, int) else list(target)
    count = len(axes)
    placed = {t % count: s % count for s, t in zip(sources, targets, strict=True)}
    rest = iter(axis for axis in axes if axis not in placed.values())
    return [placed[axis] if axis in placed else next(rest) for axis in axes]


def _inserted(call: Call, axes: list[int]) -> list[int]:
    axes.insert(call.argument(1, "dim") % (len(axes) + 1), -1)
    return axes


def _squeezed(call: Call, axes: list[int]) -> list[int]:
    dims = call.argument(1, "dim", default=axes)
    named = {dim % len(axes) for dim in ([dims] if isinstance(dims, int) else dims)}
    shape = call.tensors[0].shape
    return [axis for axis in axes if axis not in named or shape[axis] != 1]


def _along(position: int = 1, default: Any = None, together: bool = False) -> Rule:
    """Return the rule for functions along given axes, which may remove these or add one.

    Args:
        position: Index of the argument with the axes.
        default: Its default value; None for all axes.
        together: Whether several tensors may have samples, in the same place in each.
    """

    def rule(call: Call, results: list[Tensor]) -> Where | list[Where]:
        dims = call.argument(position, "dim", "axis", "dims", default=default)
        if isinstance(dims, Tensor):  # an element-wise overload, such as max(a, b)
            return _number_by_number(call, results)
        tensor, where = call.alike() if together else call.only()
        dims = [dims] if type(dims) is int else dims
        plain = isinstance(dims, (list, tuple)) and all(type(dim) is int for dim in dims)
        # torch leaves out an empty vector among those it concatenates
        used = [t for t in call.tensors if not together or t.shape != (0,)]
        if not plain or {t.ndim for t in used} != {tensor.ndim}:
            return MIXED
        return [_beside(tensor.ndim, where, dims, result.ndim) for result in results]

    return rule


def _beside(ndim: int, where: Lay, dims: Sequence[int], after: int) -> Lay:
    added = max(0, after - ndim)
    used = {dim % (ndim + added) for dim in dims}
    if added:
        return where._replace(axis=where.axis + sum(dim <= where.axis for dim in used))
    if where.axis in used:
        return MIXED
    removed = sum(dim < where.axis for dim in used) if after < ndim else 0
    return where._replace(axis=where.axis - removed)


def _with_index(rule: Rule) -> Rule:
    """Return the rule for a function that also takes an index that has no samples."""

    def without_index(call: Call, results: list[Tensor]) -> Where | list[Where]:
        call.only()
        call.tensors, call.wheres = call.tensors[:1], call.wheres[:1]
        return rule(call, results)

    return without_index


def _at_quantile(call: Call, results: list[Tensor]) -> Where | list[Where]:
    single = isinstance(call.argument(1, "q"), float)
    return _along(2)(call, results) if single else MIXED


def _flipped(call: Call, results: list[Tensor]) -> Where:
    dims = call.args[1:] if isinstance(call.argument(1), int) else call.argument(1, "dims")
    tensor, where = call.only()
    return _beside(tensor.ndim, where, dims, tensor.ndim)


def _windowed(call: Call, results: list[Tensor]) -> Where:
    """Return places after ``x.unfold(axis, size, step)``: windows are a new last axis."""
    tensor, where = call.only()
    return MIXED if call.argument(1, "dimension") % tensor.ndim == where.axis else where


def _apart_from(axes: Callable[[Call], int], together: bool = False) -> Rule:
    """Return the rule for functions of the last axes; samples stay on an axis before these."""

    def rule(call: Call, results: list[Tensor]) -> Where:
        tensor, where = call.alike() if together else call.only()
        return where if where.axis < tensor.ndim - axes(call) else MIXED

    return rule


def _last(count: int) -> Callable[[Call], int]:
    return lambda _: count


def _padded(call: Call) -> int:
    return len(call.argument(1, "pad")) // 2


def _normalised(call: Call) -> int:
    return len(call.argument(1, "normalized_shape"))


def _in_front(ndim: int | None = None, together: bool = False) -> Rule:
    """Return the rule for functions of batches: samples stay on the first of ``ndim`` axes."""

    def rule(call: Call, results: list[Tensor]) -> Where:
        tensor, where = call.alike() if together else call.only()
        return where if where.axis == 0 and ndim in (None, tensor.ndim) else MIXED

    return rule


def _convolved(call: Call, results: list[Tensor]) -> Where | list[Where]:
    return _in_front(call.argument(1, "weight").ndim)(call, results)


def _by_channel(call: Call, results: list[Tensor]) -> Where:
    _, where = call.only()
    return MIXED if call.argument(5, "training") or where.axis == 1 else where


def _multiplied(call: Call, results: list[Tensor]) -> Where:
    """Return places in a matrix product: samples are rows, columns or batched matrices."""
    if tensors_in(call.kwargs.values()):
        return MIXED
    result, (*added, left, right) = results[0], call.tensors
    of_added = matched([(t, w) for t, w in call.given() if any(t is a for a in added)], result)
    places = {of_added} - {None}
    vector = -2 if left.ndim < _MATRIX else -1 if right.ndim < _MATRIX else None
    for tensor, summed in ((left, -1), (right, -2)):
        where = call.where_of(tensor)
        if where is None or where in NOBODYS:
            continue
        place = where.axis - tensor.ndim  # from the end
        if tensor.ndim < _MATRIX or place == summed:
            return MIXED
        # a product with a vector removes the axis that is summed over
        place += vector is not None and place < vector
        places.add(where._replace(axis=result.ndim + place))
    return places.pop() if len(places) == 1 else MIXED


def _compared(call: Call, results: list[Tensor]) -> Where:
    """Return places after ``cdist``: pairwise distances between rows of two matrices."""
    places = set()
    for tensor, where in call.given():
        place = where.axis - tensor.ndim  # from the end
        column = tensor is not call.args[0] and place == -_MATRIX
        places.add(MIXED if place == -1 else where._replace(axis=place + column))
    (where,) = places
    both = call.args[0] is call.args[1] and where.axis == -_MATRIX
    return MIXED if both else where._replace(axis=where.axis + results[0].ndim)


def _by_letters(call: Call, results: list[Tensor]) -> Where:
    """Return places after ``einsum``: the samples have one letter, kept in the result."""
    terms, out = call.args[0].replace(" ", "").split("->")
    places = set()
    for term, tensor, where in zip(terms.split(","), call.tensors, call.wheres, strict=True):
        if where is not None and where not in NOBODYS:
            letters = term.replace("...", "." * (tensor.ndim - len(term.replace("...", ""))))
            letter = letters[where.axis]
            if letter == "." or letters.count(letter) > 1:
                return MIXED
            places.add((letter, where.outer, where.inner))
    letter, outer, inner = places.pop()
    if places or out.count(letter) != 1:
        return MIXED
    out = out.replace("...", "." * (results[0].ndim - len(out.replace("...", ""))))
    return Lay(out.index(letter), outer, inner)


def _attended(call: Call, results: list[Tensor]) -> Where:
    where = matched(call.given(), results[0])
    return where if where and where.axis < results[0].ndim - _MATRIX else MIXED


def _one_hot(call: Call, results: list[Tensor]) -> Where:
    known = call.argument(1, "num_classes", default=-1) > 0
    return call.only()[1] if known else MIXED


def _recurrent(call: Call, results: list[Tensor]) -> Where | list[Where]:
    """Return places in outputs and states ``(layers, B, h)``; packed sequences are mixed."""
    first, weights, batch_first = call.args[0], call.args[2], call.args[8]
    where = call.where_of(first)
    if not isinstance(weights, list) or where is None or where.axis != (not batch_first):
        return MIXED
    state = where._replace(axis=1)
    if first.ndim != _MATRIX + 1 or any(w != state for t, w in call.given() if t is not first):
        return MIXED
    return [where, *[state] * (len(results) - 1)]


def _stepped(call: Call, results: list[Tensor]) -> Where | list[Where]:
    """Return places after the steps of a recurrent layer; states ``(B, h)`` have no steps."""
    where = call.where_of(call.args[0])
    if where is None or where.axis != 1 - call.args[2]:
        return MIXED
    state, steps = where._replace(axis=0), call.args[0].ndim
    if any(w != (where if t.ndim == steps else state) for t, w in call.given()):
        return MIXED
    return [where, *[state] * (len(results) - 1)]


def _of_that_shape(call: Call, results: list[Tensor]) -> Where:
    call.only()
    return NEW


# --- The table -----------------------------------------------------------------------------

_SPACES = (torch, Tensor, F, torch.special, torch.fft, torch.linalg)

_BY_NUMBER = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
arctanh asin asinh atan atan2 atanh bfloat16 bitwise_and bitwise_not bitwise_or bitwise_xor bool
byte ceil celu clamp clamp_max clamp_min clip clone conj contiguous copysign cos cosh cpu cuda
deg2rad detach digamma div divide double elu entr eq erf erfc erfinv exp exp2 expand expand_as
expit expm1 float floor floor_divide fmax fmin fmod frac ge gelu greater greater_equal gt half
hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 i0e i1 i1e imag int isclose
isfinite isinf isnan
le leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_ndtr logaddexp
logical_and logical_not logical_or logical_xor logit logsigmoid long lt masked_fill maximum
minimum mish mul multiply nan_to_num ndtr ndtri ne neg negative not_equal positive pow real
reciprocal relu relu6 remainder repeat round rsqrt rsub selu sgn short sigmoid sign silu sin
sinc sinh
softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold tile to
true_divide trunc type type_as xlogy dropout dropout1d dropout2d dropout3d alpha_dropout
feature_alpha_dropout fill_ zero_ copy_ requires_grad_
"""
_OPERATORS = "add sub mul truediv div floordiv mod pow and or"
_WITHOUT_ORDER = "xor rxor ixor neg pos abs invert eq ne lt le gt ge"
_REDUCING = """
sum nansum mean nanmean prod amax amin max min argmax argmin any all var std var_mean std_mean
median nanmedian mode logsumexp softmax log_softmax softmin cumsum cumprod cummax cummin
logcumsumexp count_nonzero narrow select aminmax
"""
_ASKED = """
size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex is_signed
element_size storage_offset get_device is_inference data_ptr __len__ is_same_size is_tensor
result_type _nested_tensor_from_mask_left_aligned
"""  # torch's encoder calls the last one before packing samples, which it does in no_grad
_READ = """
shape ndim dtype device is_cuda is_cpu layout requires_grad is_leaf grad_fn itemsize nbytes
is_sparse is_quantized is_nested is_meta
"""
_MADE = "zeros ones full empty arange linspace logspace eye tensor as_tensor scalar_tensor"
_MADE_LIKE = "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"
_NAMED: dict[str, Rule] = {
    _BY_NUMBER: _number_by_number,
    " ".join(f"{name}_" for name in _BY_NUMBER.split()): _number_by_number,
    " ".join(
        f"__{i}{o}__" for o in _OPERATORS.split() for i in ("", "r", "i")
    ): _number_by_number,
    " ".join(f"__{name}__" for name in _WITHOUT_ORDER.split()): _number_by_number,
    "where": _chosen,
    "prelu rrelu": _apart_from(_last(0)),
    "view reshape flatten unflatten view_as reshape_as ravel": _refolded,
    "permute": _turned(_permuted),
    "transpose swapaxes swapdims": _turned(_transposed),
    "movedim moveaxis": _turned(_moved),
    "t": _turned(_backwards),
    "adjoint": _turned(_matrices_turned),
    "unsqueeze": _turned(_inserted),
    "squeeze": _turned(_squeezed),
    _REDUCING: _along(),
    "index_select": _with_index(_along()),
    "flip": _flipped,
    "sort argsort glu": _along(default=-1),
    "unbind": _along(default=0),
    "cat concat concatenate stack": _along(default=0, together=True),
    "gather scatter scatter_add": _along(together=True),
    "split chunk tensor_split split_with_sizes": _along(2, default=0),
    "topk kthvalue diff fft ifft rfft irfft": _along(2, default=-1),
    "fft2 ifft2 rfft2 irfft2": _along(2, default=(-2, -1)),
    "norm vector_norm roll": _along(2),
    "repeat_interleave": _with_index(_along(2)),
    "quantile nanquantile": _at_quantile,
    "normalize": _along(2, default=1),
    "take_along_dim": _along(2, together=True),
    "cosine_similarity": _along(2, default=1, together=True),
    "linear": _apart_from(_last(1)),
    "bilinear": _apart_from(_last(1), together=True),
    "layer_norm rms_norm": _apart_from(_normalised),
    "pad": _apart_from(_padded),
    "tril triu": _apart_from(_last(2)),
    "pixel_shuffle pixel_unshuffle channel_shuffle": _apart_from(_last(3)),
    "view_as_real": _apart_from(_last(0)),
    "view_as_complex": _apart_from(_last(1)),
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d": _convolved,
    "batch_norm": _by_channel,
    "group_norm instance_norm local_response_norm interpolate upsample": _in_front(),
    "grid_sample": _in_front(together=True),
    "fold": _in_front(3),
    "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell": _in_front(2, together=True),
    "matmul __matmul__ mm bmm mv baddbmm addmm": _multiplied,
    "cdist": _compared,
    "einsum": _by_letters,
    "scaled_dot_product_attention": _attended,
    "embedding": _apart_from(_last(0)),
    "one_hot": _one_hot,
    "lstm gru rnn_tanh rnn_relu": _recurrent,
    "__getitem__": indexed,
    _MADE_LIKE: _of_that_shape,
}
_POOLS = ["avg", "max", "_max", "lp", "adaptive_avg", "adaptive_max", "_adaptive_max"]


def _functions(names: str) -> Iterator[Any]:
    for name in names.split():
        yield from (getattr(space, name) for space in _SPACES if hasattr(space, name))


def _reading(names: str) -> Iterator[Any]:
    """Yield the functions torch calls when attributes of tensors are read."""
    yield from (getattr(Tensor, name).__get__ for name in names.split())


def _table() -> dict[Callable[..., Any], Rule]:
    rules = {func: rule for names, rule in _NAMED.items() for func in _functions(names)}
    for count in (1, 2, 3):
        ends = (f"{count}d", f"{count}d_with_indices")
        pools = " ".join(f"{kind}_pool{end}" for kind in _POOLS for end in ends)
        rules |= dict.fromkeys(_functions(pools), _apart_from(_last(count)))
    rules |= {F.unfold: _in_front(4), Tensor.unfold: _windowed}
    rules |= {gates: _apart_from(_last(1), together=True)}
    rules |= dict.fromkeys(BY_FUNCTION.values(), _stepped)
    rules |= dict.fromkeys(_reading("data real imag"), _number_by_number)
    rules |= dict.fromkeys(_reading("mT mH"), _turned(_matrices_turned))
    return rules | dict.fromkeys(_reading("T H"), _turned(_backwards))


RULES = _table()
ASKING = frozenset([*_functions(_ASKED), *_reading(_READ)])  # metadata only, no values
MAKING = frozenset([*_functions(_MADE), *_functions(_MADE_LIKE)])
