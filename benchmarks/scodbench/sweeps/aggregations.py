"""The parts of `Fused`, combined by the rules of the `detectors` library (Dadalto et al.).

The library lists torchvision, which its rules do not need: their modules are loaded from its
files, without the package around them, which imports it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scodbench.measure import POOLED, Setup
from scodbench.rows import Row
from scodbench.sweeps.fused import fitted, look
from scodbench.sweeps.points import RESAMPLES, sweep_row
from scodkit.errors import MissingPeerError
from scodkit.metrics import separation

Rule = Callable[[Tensor], Tensor]  # parts (n, P) to scores (n,)

# rules of p-values that are larger for unknown inputs; all others are smaller
_LARGER = ("fisher", "pearson")

# rules that are fitted to the parts of held-out data; larger for known inputs. The library's
# inner products divide by a part's largest value, which is 0 for the input range
_FITTED = ("mahalanobis", "if", "quantile", "power", "cosine")


def aggregation_sweep(setup: Setup) -> Iterator[Row]:
    """Yield a row for each rule, and one for `Fused` itself, on the same parts.

    Args:
        setup: Network and data.

    Raises:
        MissingPeerError: If the library is not installed.
    """
    p_values, fits = _module("ensemble"), _module("aggregations")
    fused = fitted(setup)
    samples = (setup.splits.selection, setup.splits.test, *setup.splits.novel.values())
    held, known, *novel = (look(fused, own, setup.device) for own in samples)
    # the library's scores are larger for known inputs
    reference = -held.parts.double()
    # together: one rule replaces infinite scores by the largest finite one of its call
    judged = -torch.cat([known.parts, *(own.parts for own in novel)]).double()
    rules: dict[str, Rule] = {}
    for name in p_values.ensemble_names:
        sign = 1 if name in _LARGER else -1
        combine = p_values.get_combine_p_values_fn(name)
        rules[f"p-values, {name}"] = _of_p_values(p_values, combine, reference, sign)
    for name in _FITTED:
        torch.manual_seed(setup.seed)
        aggregation = fits.aggregations_registry[name]()
        with warnings.catch_warnings():  # of fewer samples than its 1,000 quantiles
            warnings.simplefilter("ignore", UserWarning)
            aggregation.fit(reference)
        rules[name] = _apart(aggregation)
    scores = [known.score, torch.cat([own.score for own in novel])]
    yield _row(setup, "fused", asdict(separation(*scores, resamples=RESAMPLES)))
    for name, rule in rules.items():
        try:
            both = rule(judged)
        except ValueError as error:  # theirs: one rule has no finite score on some data
            found: dict[str, object] = {"auroc": None, "why": str(error)}
        else:
            split = both[: len(known.parts)], both[len(known.parts) :]
            found = asdict(separation(*split, resamples=RESAMPLES))
        yield _row(setup, name, found)


def _row(setup: Setup, name: str, found: dict[str, object]) -> Row:
    return sweep_row(setup, "aggregations", POOLED, {"name": name}, **found)


def _of_p_values(library: ModuleType, combine: Any, reference: Tensor, sign: int) -> Rule:
    """Return a rule of p-values of the library as scores, larger = more atypical."""

    def rule(parts: Tensor) -> Tensor:
        p_values = library.p_value_fn(parts.numpy(), reference.numpy())
        return sign * torch.from_numpy(combine(p_values))

    return rule


def _apart(aggregation: Any) -> Rule:
    """Return a fitted rule as scores, in batches: one of them compares all pairs of a batch."""
    return lambda parts: -torch.cat([aggregation(some) for some in torch.split(parts, 256)])


def _module(name: str) -> ModuleType:
    """Return a module or a package of the library.

    Raises:
        MissingPeerError: If the library is not installed.
    """
    about = find_spec("detectors")
    if about is None or about.origin is None:
        raise MissingPeerError(
            "expected the library detectors, found none; "
            "type pip install --no-deps -r peers.txt"
        )
    own = f"_detectors_{name}"
    if own in sys.modules:
        return sys.modules[own]
    folder = Path(about.origin).parent
    package = folder / name / "__init__.py"
    file = package if package.exists() else folder / f"{name}.py"
    spec = spec_from_file_location(own, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[own] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
