"""Names that people know: of layers by kind and shape, of predictions by class."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from scodkit.errors import OptionError
from scodkit.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Heads,
    HeteroscedasticGaussian,
    Likelihood,
    MonteCarlo,
)
from scodkit.likelihoods.task import Task
from scodkit.model.frames import Columns, are_numbered, columns_of
from scodkit.model.inputs import Form
from scodkit.model.kinds import first_part, is_array

# attributes that say what a layer takes and what it returns, and those of one size
_PAIRS = (
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("num_embeddings", "embedding_dim"),
    ("input_size", "hidden_size"),
)
_SIZES = ("num_features", "normalized_shape", "num_channels", "embed_dim")

# numbers of an output that are listed
_MOST_NUMBERS = 4


@dataclass(frozen=True)
class Names:
    """Names of columns and classes.

    Args:
        columns: Of a table, as the user gives them.
        classes: Of a classifier, or of the outputs of a regression; None for numbers.
        found: Names of columns that were not given, which may be others than the model's: those
            of a data frame, and those noted with the monitor.
    """

    columns: Sequence[str] | None = None
    classes: Sequence[str] | None = None
    found: tuple[Sequence[str], ...] = ()

    @staticmethod
    def of(
        batch: object,
        notes: Mapping[str, Any],
        columns: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        form: Form | None = None,
    ) -> Names:
        """Return all names there are.

        Args:
            batch: As the user passes it: perhaps a data frame, or one with labels.
            notes: Of the monitor; the command line notes columns with the inputs of a fit.
            columns: Those given.
            classes: Those given.
            form: Of the batches of the fit, whose columns come in its order.
        """
        fitted, own = (_first(form.columns) if form else None), _first(columns_of(batch))
        # a frame's own come in the order of the fit, if that had names
        of_frame = (fitted, own) if own is not None else (_other_labels(batch),)
        if columns is not None and fitted is not None and own == [*map(str, columns)]:
            columns = fitted
        noted = (notes.get("columns"), notes.get("inputs", {}).get("columns"))
        found = (*of_frame, *noted, fitted)
        if classes is None:
            classes = notes.get("classes")
        return Names(columns, classes, tuple(list(each) for each in found if each is not None))

    def of_columns(self, count: int) -> tuple[str, ...]:
        """Return the names of the columns of a table: those given, or found, or numbers.

        Args:
            count: How many columns there are.
        """
        fitting = (found for found in self.found if len(found) == count)
        given = next(fitting, None) if self.columns is None else self.columns
        return names_of(given, count, "column")


def _first(columns: Columns | None) -> list[str] | None:
    """Return the names of the first data frame's columns; None for numbers or no frame."""
    labels = next(iter((columns or {}).values()), None)
    return None if labels is None or are_numbered(labels) else labels


def _other_labels(batch: object) -> list[str] | None:
    """Return labels of a frame that are no names, such as dates, as text; None for others."""
    first = first_part(batch)
    labels = getattr(first, "columns", None) if is_array(first) else None
    if labels is None or columns_of(first) is not None:
        return None
    return [str(label) for label in labels]


def layer_names(model: nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    r"""Return names for layers: their kind and shape, after their own name if they have one.

    Layers whose path is made of numbers are counted by kind, over all of the model.

    Args:
        model: The model.
        paths: Of modules, or of parameters of the model itself, which keep their names.

    Examples:
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
        >>> layer_names(net, ["0", "3"])
        ('Conv2d 1 (1->8, 3x3)', 'Linear 1 (32->4)')
        >>> layer_names(nn.ModuleDict({"head": net[3]}), ["head"])
        ('head: Linear (32->4)',)
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    numbers: dict[nn.Module, int] = {}
    kinds: Counter[str] = Counter()
    for module in model.modules():
        kinds[_kind(module)] += 1
        numbers[module] = kinds[_kind(module)]
    names = []
    for path in paths:
        layer = modules.get(path)
        if layer is None:
            names.append(path)
        elif path.replace(".", "").isdigit():
            names.append(f"{_kind(layer)} {numbers[layer]}{_shape(layer)}")
        else:
            names.append(f"{path}: {_kind(layer)}{_shape(layer)}")
    return tuple(names)


def _kind(module: nn.Module) -> str:
    return type_before_parametrizations(module).__name__


def _shape(module: nn.Module) -> str:
    """Return the sizes of a layer in brackets; nothing where they are not known."""
    shape = ""
    for first, last in _PAIRS:
        if isinstance(getattr(module, first, None), int):
            shape = f"{getattr(module, first)}->{getattr(module, last, '?')}"
            break
    else:
        for name in _SIZES:
            size = getattr(module, name, None)
            if isinstance(size, (int, tuple)):
                shape = "x".join(map(str, size)) if isinstance(size, tuple) else str(size)
                break
    kernel = getattr(module, "kernel_size", None)
    if shape and isinstance(kernel, tuple):
        shape += ", " + "x".join(map(str, kernel))
    return f" ({shape})" if shape else ""


def names_of(given: Sequence[str] | None, count: int, what: str) -> tuple[str, ...]:
    """Return the names that were given, or numbers from 0.

    Args:
        given: Names; None for numbers.
        count: How many there must be.
        what: What one of them is.

    Raises:
        OptionError: If there are more or fewer, or one is repeated.

    Examples:
        >>> names_of(None, 2, "class"), names_of(["cat", "dog"], 2, "class")
        (('class 0', 'class 1'), ('cat', 'dog'))
    """
    if given is None:
        return tuple(f"{what} {i}" for i in range(count))
    names = tuple(map(str, given))
    if isinstance(given, str) or len(names) != count or len(set(names)) < count:
        first = given if isinstance(given, str) else ", ".join(names[:5])
        raise OptionError(
            f"expected a list of {count} different names, one for each {what}, got "
            f"{len(names)} ({first}{', ...' if len(names) > 5 else ''}); leave them out, or "
            "type them in the order of the model"
        )
    return names


def direction_names(
    likelihood: Likelihood, shape: Sequence[int], classes: Sequence[str] | None = None
) -> tuple[str, ...] | None:
    """Return what each direction of an output stands for; None if that is not known.

    Args:
        likelihood: Which distribution the output parametrises.
        shape: Of a sample's output.
        classes: Names of the classes, or of the outputs of a regression.

    Examples:
        >>> direction_names(Categorical(), (3,), ["cat", "dog", "cow"])
        ('cat', 'dog', 'cow')
        >>> direction_names(HeteroscedasticGaussian(), (2,), ["height"])
        ('height', 'log-variance of height')
    """
    if isinstance(likelihood, Categorical):
        if likelihood.samples is not None:
            return names_of(None, likelihood.samples, "draw")
        count = shape[likelihood.class_axis(len(shape) + 1) - 1]
        positions, names = likelihood.num_positions(shape), names_of(classes, count, "class")
        if likelihood.directions is not None:
            count = likelihood.num_directions(shape) // positions
            names = names_of(None, count, "axis")
        if positions == 1:
            return names
        return tuple(f"{name} at {place}" for place in range(positions) for name in names)
    if isinstance(likelihood, HeteroscedasticGaussian):
        names = names_of(classes, math.prod(shape) // 2, "output")
        return (*names, *(f"log-variance of {name}" for name in names))
    if isinstance(likelihood, (Gaussian, Bernoulli)):
        return names_of(classes, math.prod(shape), "output")
    if isinstance(likelihood, Heads):
        return _names_of_heads(likelihood, shape[0], classes)
    if isinstance(likelihood, (MonteCarlo, Task)):
        what = "draw" if isinstance(likelihood, MonteCarlo) else "outcome"
        return names_of(None, likelihood.num_directions(shape), what)
    return None


def _names_of_heads(
    heads: Heads, outputs: int, classes: Sequence[str] | None
) -> tuple[str, ...] | None:
    """Return the names of the directions of heads; None if those of one are not known."""
    names: list[str] = []
    for name, likelihood in heads.likelihoods.items():
        of_classes = classes if isinstance(likelihood, Categorical) else None
        each = direction_names(likelihood, heads.shapes[name], of_classes)
        if each is None:
            return None
        if name not in heads.boxes:
            names += [f"{name}: {direction}" for direction in each]
            continue
        for box in range(heads.num_boxes(outputs)):
            names += [f"box {box}, {name}: {direction}" for direction in each]
    return tuple(names)


def shortened(name: str, most: int = 30) -> str:
    """Return the end of a long name, which tells more than its beginning.

    Args:
        name: Of a layer, a column or a class.
        most: Letters that there is room for.
    """
    return name if len(name) <= most else f"...{name[3 - most :]}"


def in_words(
    likelihood: Likelihood, output: Tensor, classes: Sequence[str] | None = None
) -> str:
    """Return a network's prediction for one input in words.

    Args:
        likelihood: Which distribution the output parametrises.
        output: ``(*shape)``, of one sample.
        classes: Names of the classes, if they have names.

    Examples:
        >>> import torch
        >>> in_words(Categorical(), torch.tensor([0.0, 9.0]))
        'class 1 (100 %)'
        >>> in_words(Categorical(), torch.tensor([0.0, 9.0]), ["cat", "dog"])
        'dog (100 %)'
        >>> in_words(Gaussian(), torch.tensor([0.25, 3.0]))
        '0.25, 3'
    """
    if not bool(output.isfinite().all()):
        return "not finite"
    if isinstance(likelihood, Heads):
        parts = [
            f"{name}: {in_words(likelihood.likelihoods[name], values[0], classes)}"
            for name, values in likelihood.shown(output[None]).items()
            if name in likelihood.likelihoods and name not in likelihood.boxes
        ]
        if likelihood.boxes:
            count = int(likelihood.mask(output[None]).sum())
            parts.append(f"{count} box{'' if count == 1 else 'es'}")
        return "; ".join(parts)
    if isinstance(likelihood, Categorical) and output.ndim == 1:
        shares = output.double().softmax(0)
        best = int(shares.argmax())
        known = classes is not None and len(classes) == len(shares)
        name = classes[best] if known and classes is not None else f"class {best}"
        return f"{name} ({100 * float(shares[best]):.0f} %)"
    values = output.double().flatten()[:_MOST_NUMBERS]
    if isinstance(likelihood, Bernoulli):
        shown = [f"{100 * share:.0f} %" for share in values.sigmoid().tolist()]
    else:
        shown = [f"{value:.3g}" for value in values.tolist()]
    more = f", ... ({output.numel()} numbers)" if output.numel() > _MOST_NUMBERS else ""
    return ", ".join(shown) + more
