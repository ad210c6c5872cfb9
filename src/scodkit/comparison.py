"""Methods compared on the same inputs: how well they tell unknown ones, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from scodkit.baselines import Baseline, Detector
from scodkit.errors import BatchError, OptionError, ScodError
from scodkit.explain import plots
from scodkit.fit import data
from scodkit.fused import Fused
from scodkit.metrics import Array, Scores, Separation, checked, separation
from scodkit.model.kinds import is_loader
from scodkit.model.network import Network
from scodkit.monitor import Monitor
from scodkit.numerics.timing import in_turns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POOLED = "pooled"
# inputs of a kind below which the interval of the FPR95 misses it in up to 25 % of samples,
# not in 5 % (normal scores, 5 to 20 inputs of each kind)
_FEW = 40
_FIGURES = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR95"}
_COLOURS = (plots.RAISES, plots.LOWERS, plots.GREEN, plots.YELLOW, plots.OTHERS)
_MARKS = "os^v"
_WIDTH, _LETTERS = 5.0, 8.5  # inches, points: the figure can be read as wide as a phone
_CHANCE = {"auroc": 0.5, "aupr": 0.5, "fpr95": 0.95}


class MethodScores(NamedTuple):
    """Scores of a method in float64, larger = more atypical; `compare` takes them, too.

    Attributes:
        known: Of the known inputs, ``(n,)``.
        unknown: Of each set of unknown inputs, ``(m,)`` by name.
    """

    known: Array
    unknown: Mapping[str, Array]


# a fitted detector, a function from a batch to scores (B,), or scores
Method: TypeAlias = Detector | Callable[[Any], Scores] | tuple[Any, Any]


@dataclass(frozen=True)
class Cost:
    """What a method costs, measured on the first batch of the known inputs: the fastest run.

    Args:
        seconds: Per input, of a scored batch.
        forward_passes: The same, in forward passes of the network on that batch; None for
            functions, whose network is not known.
        kept_bytes: Memory kept for scoring, besides the network; None where it is not known.
        batch: Inputs in the batch.
    """

    seconds: float
    forward_passes: float | None
    kept_bytes: int | None
    batch: int


@dataclass(frozen=True, eq=False)
class Comparison:
    """How well methods tell unknown inputs from known ones, and what they cost; print it.

    Args:
        separations: By method and unknown set; ``"pooled"`` is all sets together.
        costs: By method; none of methods whose scores were given.
        scores: By method.
        notes: What a reader of the figures should know, in words.
    """

    separations: Mapping[str, Mapping[str, Separation]]
    costs: Mapping[str, Cost]
    scores: Mapping[str, MethodScores]
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each method and unknown set, for ``pandas.DataFrame`` or a file."""
        return [
            {"method": method, "unknown": name, **asdict(one)}
            | (asdict(self.costs[method]) if method in self.costs else {})
            for method, by_set in self.separations.items()
            for name, one in by_set.items()
        ]

    def table(self) -> list[list[str]]:
        """Return the cells of the table, headings first."""
        lines = [["method", "unknown", *_FIGURES.values(), "time", "memory"]]
        for method, by_set in self.separations.items():
            costs = _in_words(self.costs.get(method))
            for name, one in by_set.items():
                cells = [
                    f"{value:.3f} ({low:.3f}-{high:.3f})"
                    for value, low, high in (_interval(one, figure) for figure in _FIGURES)
                ]
                lines.append([method, name, *cells, *costs])
        return lines

    @property
    def legend(self) -> str:
        """What the columns of the table are."""
        says = "In brackets: intervals of 95 % over inputs, not over other trained networks."
        batches = sorted({cost.batch for cost in self.costs.values()})
        if batches:
            says += (
                f"\nTime: of a score at batch {batches[0]}, in forward passes (x). Memory: "
                "kept besides the network."
            )
        return says

    def __str__(self) -> str:
        lines = self.table()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
            for line in lines
        ]
        return "\n".join([*map(str.rstrip, text), "", self.legend, *self.notes])

    def plot(self) -> Figure:
        """Return a matplotlib figure of all figures with their intervals, method by method."""
        methods = list(self.separations)
        sets = list(next(iter(self.separations.values())))
        height = 0.6 + len(methods) * (0.25 + 0.1 * len(sets))
        figure = plots.new_figure(_WIDTH, len(_FIGURES) * height)
        panels = figure.subplots(len(_FIGURES), 1)
        costs = [", ".join(filter(None, _in_words(self.costs.get(m)))) for m in methods]
        labels = [
            f"{method}\n{cost.replace(' x', ' x forward')}".strip()
            for method, cost in zip(methods, costs, strict=True)
        ]
        for axes, name in zip(panels, _FIGURES, strict=True):
            self._draw(axes, name, methods, sets)
            shown = labels if axes is panels[0] else methods  # costs are said once
            axes.set_yticks(range(len(methods)), shown, fontsize=_LETTERS)
            axes.set_ylim(len(methods) - 0.5, -0.5)
        if len(sets) > 1:
            figure.legend(
                *panels[0].get_legend_handles_labels(),
                loc="outside lower center",
                ncols=3,
                fontsize=_LETTERS,
            )
        return figure

    def _draw(self, axes: Axes, figure: str, methods: list[str], sets: list[str]) -> None:
        """Draw one figure of all methods, each set in a colour and a place of its own."""
        step = 0.7 / len(sets)
        for i, name in enumerate(sets):
            ends = np.array([_interval(self.separations[m][name], figure) for m in methods])
            value, low, high = ends.T
            pooled = name == POOLED
            axes.errorbar(
                value,
                np.arange(len(methods)) + (i - (len(sets) - 1) / 2) * step,
                xerr=np.maximum(0.0, [value - low, high - value]),
                fmt="D" if pooled else _MARKS[i // len(_COLOURS) % len(_MARKS)],
                color="black" if pooled else _COLOURS[i % len(_COLOURS)],
                ms=4,
                lw=1.3,
                label=name,
            )
        for place in range(1, len(methods)):
            axes.axhline(place - 0.5, color="#DDDDDD", lw=0.8)
        axes.axvline(_CHANCE[figure], color="black", lw=0.8, ls=":")
        better = "smaller" if figure == "fpr95" else "larger"
        axes.set_xlabel(
            f"{_FIGURES[figure]} ({better} is better; dotted: chance)", fontsize=_LETTERS
        )
        axes.tick_params(labelsize=_LETTERS)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", lw=0.4, color="#DDDDDD")
        axes.set_axisbelow(True)


def compare(
    methods: Mapping[str, Method] | Sequence[Detector],
    *,
    known: Any = None,
    unknown: Any = None,
    resamples: int = 1000,
    seed: int = 0,
    progress: bool = True,
) -> Comparison:
    """Score known and unknown inputs with several methods, and say which tells them apart best.

    Args:
        methods: By name: a fitted `Monitor`, a calibrated `Fused`, a method of
            `scodkit.baselines` or anything else with ``score(batch)``; a function that
            returns scores ``(B,)`` of a batch; or scores that are there already, as ``(known,
            unknown)``. A list of methods is named after their classes.
        known: Inputs like the training data that no method has seen, as a Monitor takes them: a
            loader, which is read once, or all as one tensor, array or table. A batch that is
            a tuple or a dict goes into a list: ``[batch]``.
        unknown: Inputs unlike the training data; or several sets of them by name, which are
            also compared pooled, each input counting the same.
        resamples: Of the bootstrap that the intervals come from.
        seed: Of the bootstrap.
        progress: Show progress bars.

    Returns:
        Figures with intervals, costs and notes: print it, ``plot()`` it, or take its ``rows``.

    Raises:
        BatchError: If methods were given scores of different numbers of inputs.
        ScodError: As a subclass, if a method cannot score, with its name.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> mine = rng.normal(size=500), rng.normal(2, size=500)
        >>> guess = rng.random(500), rng.random(500)
        >>> found = compare({"mine": mine, "a guess": guess})
        >>> round(found.separations["mine"]["unknown"].auroc, 2)
        0.92
        >>> [row["method"] for row in found.rows]
        ['mine', 'a guess']
    """
    named = _named(methods)
    run = {name: score for name, method in named.items() if (score := _score_of(name, method))}
    sets = _unknown_sets(named, run, known, unknown)
    scores = {
        name: _given(name, method, sets) for name, method in named.items() if name not in run
    }
    first = None
    watched = {
        name: _Watched(monitor, run[name])
        for name in run
        if (monitor := _monitor_of(named[name])) is not None
    }
    if run:
        found, first = _scored({**run, **watched}, known, "known", progress)
        of_sets = {s: _scored(run, own, s, progress)[0] for s, own in sets.items()}
        for name in run:
            scores[name] = MethodScores(found[name], {s: of_sets[s][name] for s in sets})
    scores = {name: scores[name] for name in named}  # in the order that was given
    _check_lengths(scores)
    costs = _costs({name: named[name] for name in run}, run, first) if run else {}
    separations: dict[str, dict[str, Separation]] = {}
    for name, own in scores.items():
        by_set = dict(own.unknown)
        if len(by_set) > 1:
            by_set[POOLED] = np.concatenate(list(by_set.values()))
        separations[name] = {
            s: separation(own.known, theirs, resamples=resamples, seed=seed)
            for s, theirs in by_set.items()
        }
    notes = [
        f"{again} known inputs are in the fit of {name}, which knows those best: its figures "
        "are too good. Compare on inputs that no method has seen."
        for name, one in watched.items()
        if (again := one.fitted_before()) is not None
    ]
    return Comparison(separations, costs, scores, (*notes, *_notes(separations, scores)))


def kept_bytes(method: object) -> int | None:
    """Return the bytes a fitted method keeps for scoring, besides the network.

    Args:
        method: Any; None is returned for those that are none of ours.
    """
    if isinstance(method, Monitor):
        return method.basis.nbytes
    if isinstance(method, (Fused, Baseline)):
        return sum(method.memory().values())
    return None


# --- What was passed -----------------------------------------------------------------------


def _named(methods: Any) -> dict[str, Any]:
    """Return methods by name.

    Raises:
        OptionError: If there are none, or names are missing.
    """
    if isinstance(methods, Mapping) and methods:
        return {str(name): method for name, method in methods.items()}
    advice = "type compare({'SCOD': monitor, 'mine': (known_scores, unknown_scores)}, ...)"
    if not isinstance(methods, (list, tuple)) or not methods:
        raise OptionError(
            f"expected methods by name, got {type(methods).__name__}"
            f"{'' if methods else ' without any'}; {advice}"
        )
    for method in methods:
        if isinstance(method, type):
            raise OptionError(
                f"expected fitted methods, got the class {method.__name__}; type "
                f"{method.__name__}(model, likelihood), fitted if it learns"
            )
        if not hasattr(method, "score"):
            raise OptionError(
                f"expected methods with score(batch) in a list, got a {type(method).__name__}; "
                f"{advice}, or give {{'mine': lambda x: scores}} with larger = more atypical"
            )
    names = [type(method).__name__ for method in methods]
    if len(set(names)) < len(names):
        raise OptionError(
            f"expected methods that are named after different classes, got {', '.join(names)}; "
            f"{advice}"
        )
    return dict(zip(names, methods, strict=True))


def _score_of(name: str, method: Any) -> Callable[[Any], Scores] | None:
    """Return the function that scores a batch; None where scores are given.

    Raises:
        OptionError: If it is neither.
    """
    if isinstance(method, tuple) and len(method) == 2:
        return None
    score = getattr(method, "score", method)
    if isinstance(method, type) or not callable(score):
        what = f"the class {method.__name__}" if isinstance(method, type) else repr(method)
        raise OptionError(
            f"expected for {name!r} a fitted method, a function of a batch or (known_scores, "
            f"unknown_scores), got {what[:200]}; type for instance {{{name!r}: monitor}}"
        )
    return score  # type: ignore[no-any-return]


def _unknown_sets(
    named: Mapping[str, Any], run: Mapping[str, Any], known: Any, unknown: Any
) -> dict[str, Any]:
    """Return the unknown sets by name; of scores alone, empty values.

    Raises:
        OptionError: If inputs are missing, or a set has a name that is taken.
    """
    if run and (known is None or unknown is None):
        raise OptionError(
            f"expected inputs for {next(iter(run))!r} to score, got none; type "
            "compare(..., known=test_x, unknown=other_x)"
        )
    if not run and unknown is None:
        unknown = next(iter(named.values()))[1]
    if not isinstance(unknown, Mapping):
        return {"unknown": unknown}
    if isinstance(known, Mapping) and known.keys() == unknown.keys():
        raise OptionError(
            "expected unknown sets by name, got a dict like the batch of known inputs; put "
            "batches in lists: compare(..., known=[batch], unknown=[other_batch])"
        )
    if not unknown or (POOLED in unknown and len(unknown) > 1):
        raise OptionError(
            f"expected unknown sets by name, {POOLED!r} not among them, got "
            f"{', '.join(map(repr, unknown)) or 'none'}; type unknown={{'night': night_x}}"
        )
    return {str(name): own for name, own in unknown.items()}


def _given(name: str, pair: tuple[Any, Any], sets: Mapping[str, Any]) -> MethodScores:
    """Return scores that were passed, as arrays.

    Raises:
        OptionError: If they are of other sets.
    """
    known, unknown = pair
    by_set = unknown if isinstance(unknown, Mapping) else {"unknown": unknown}
    if by_set.keys() != sets.keys():
        raise OptionError(
            f"expected scores of {', '.join(map(repr, sets))} from {name!r}, got those of "
            f"{', '.join(map(repr, by_set))}; type {name!r}: (known_scores, "
            f"{{{next(iter(sets))!r}: scores}})"
        )
    with _naming(name, "known"):
        array = checked(known)
    arrays = {}
    for s in sets:
        with _naming(name, s):
            arrays[s] = checked(by_set[s])
    return MethodScores(array, arrays)


def _check_lengths(scores: Mapping[str, MethodScores]) -> None:
    """Refuse scores of different numbers of inputs.

    Raises:
        BatchError: If there are such.
    """
    sizes: dict[str, dict[str, int]] = {}
    for name, own in scores.items():
        for s, array in {"known": own.known, **own.unknown}.items():
            sizes.setdefault(s, {})[name] = len(array)
    for s, by_method in sizes.items():
        if len(set(by_method.values())) > 1:
            got = ", ".join(f"{size} from {name!r}" for name, size in by_method.items())
            raise BatchError(
                f"expected scores of the same inputs from all methods, got for {s!r} {got}; "
                "pass one score for each input that is compared"
            )


# --- Scores and costs ----------------------------------------------------------------------


@contextmanager
def _naming(name: str, where: str) -> Iterator[None]:
    """Add the names of method and set to errors of ours."""
    try:
        yield
    except ScodError as error:
        raise type(error)(f"{name!r} on {where!r}: {error}") from error


def _scored(
    run: Mapping[str, Callable[[Any], Scores]], inputs: Any, where: str, progress: bool
) -> tuple[dict[str, Array], Any]:
    """Return the scores of a set by method, and its first batch; it is read once."""
    loader: Iterable[Any] = data.as_loader(inputs)
    if loader is inputs and not is_loader(inputs) and not isinstance(inputs, Dataset):
        loader = [inputs]  # a single batch
    parts: dict[str, list[Array]] = {name: [] for name in run}
    first = None
    for batch in data.batches_of(loader, f"scoring {where}", progress):
        first = batch if first is None else first
        for name, score in run.items():
            with _naming(name, where):
                parts[name].append(checked(score(batch)))
    return {name: np.concatenate(own) for name, own in parts.items()}, first


def _monitor_of(method: object) -> Monitor | None:
    """Return the monitor in a method, which may not be fitted; None where there is none."""
    if isinstance(method, Fused):
        return method._unfitted if method._parts is None else method.monitor
    return method if isinstance(method, Monitor) else None


class _Watched:
    """The score of a monitor, and which samples of the fit it was asked for.

    Args:
        monitor: The one whose fit is meant.
        score: Scores a batch.
    """

    def __init__(self, monitor: Monitor, score: Callable[[Any], Scores]) -> None:
        self._monitor, self._score, self._seen = monitor, score, data.Seen()

    def __call__(self, batch: Any) -> Scores:
        """Return the scores of a batch."""
        scores = self._score(batch)  # if that fails, it says why
        call = self._monitor._network.inputs_of(batch, self._monitor.fitted.form)
        self._seen.add(data.digests_of(call))
        return scores

    def fitted_before(self) -> data.Again | None:
        """Return how many of the samples were fitted; None if no more than by chance."""
        return data.seen_again(self._monitor.fitted.samples, self._seen.all())


def _costs(
    methods: Mapping[str, Any], run: Mapping[str, Callable[[Any], Scores]], batch: Any
) -> dict[str, Cost]:
    """Return what each method costs, timed in turns with the forward passes of its network."""
    networks = {name: _network_of(method) for name, method in methods.items()}
    forwards = {f"forward {id(n.model)}": n for n in networks.values() if n is not None}
    device = next((n.device for n in forwards.values()), torch.device("cpu"))
    runs: dict[str, Callable[[], object]] = {
        name: _forward_pass(network, batch) for name, network in forwards.items()
    }
    runs |= {f"score {name}": partial(score, batch) for name, score in run.items()}
    # of busy machines the fastest run says most: any other waited for something else
    seconds = in_turns(runs, device, min)
    costs = {}
    for name, method in methods.items():
        own, network = seconds[f"score {name}"], networks[name]
        passes = None if network is None else own / seconds[f"forward {id(network.model)}"]
        size = len(checked(run[name](batch)))
        costs[name] = Cost(own / size, passes, kept_bytes(method), size)
    return costs


def _network_of(method: object) -> Network | None:
    """Return the network of a fitted method of ours."""
    method = _monitor_of(method) or method
    return method._network if isinstance(method, (Monitor, Baseline)) else None


def _forward_pass(network: Network, batch: Any) -> Callable[[], object]:
    """Return a function that predicts a batch, without any score."""
    with network.evaluating():
        module = network.running(network.inputs_of(batch))

    def forward() -> object:
        with network.evaluating(), torch.no_grad():
            call = network.inputs_of(batch)
            return module(*call.args, **call.kwargs)

    return forward


# --- In words ------------------------------------------------------------------------------


def _interval(one: Separation, figure: str) -> tuple[float, float, float]:
    value, low, high = (getattr(one, f"{figure}{end}") for end in ("", "_low", "_high"))
    return value, low, high


def _in_words(cost: Cost | None) -> list[str]:
    """Return time and memory; empty where they are not known."""
    if cost is None:
        return ["", ""]
    time = f"{1e3 * cost.seconds:.3g} ms"
    if cost.forward_passes is not None:
        time = f"{cost.forward_passes:.3g} x"
    kept = cost.kept_bytes
    if not kept:
        return [time, "" if kept is None else "none"]
    power = min(3, int(math.log(kept, 1024)))
    return [time, f"{kept / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"]


def _notes(
    separations: Mapping[str, Mapping[str, Separation]], scores: Mapping[str, MethodScores]
) -> Iterator[str]:
    """Yield what a reader of the figures should know."""
    inverted = {
        name: ", ".join(
            f"{s} {one.auroc:.3f}" for s, one in by_set.items() if one.auroc_high < 0.5
        )
        for name, by_set in separations.items()
    }
    listed = "; ".join(f"{name}: {sets}" for name, sets in inverted.items() if sets)
    if listed:
        why = "If they do not, the method takes these inputs for known ones."
        if all(inverted.values()):
            why = "Or were known and unknown swapped?"
        yield (
            "Scores are lower on unknown inputs than on known ones (AUROC below 0.5, its "
            f"interval included): {listed}. Larger must mean more atypical: pass minus scores "
            f"that mean the opposite. {why}"
        )
    for name, own in scores.items():
        if len(np.unique(np.concatenate([own.known, *own.unknown.values()]))) == 1:
            yield f"{name} gives all inputs the same score, which tells nothing."
    first = next(iter(scores.values()))
    sizes = {"known": len(first.known)} | {s: len(own) for s, own in first.unknown.items()}
    few = [f"{s} {size}" for s, size in sizes.items() if size < _FEW]
    if few:
        yield (
            f"Sets of fewer than {_FEW} inputs ({', '.join(few)}): the interval of the FPR95 "
            "is too narrow, and misses more often than in 5 % of samples."
        )
