"""Why a score is what it is: its shares, its slopes, and known samples that are alike.

The score ``tr(L^T Sigma L)`` is a sum over pairs of weights, and over directions. A parameter
is given every pair of two weights of its own, and half of the pairs it has one weight of.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scodkit.errors import BatchError, OptionError
from scodkit.explain import plots
from scodkit.explain.columns import Columns
from scodkit.explain.saliency import Saliency, differentiable_score, saliency_of
from scodkit.explain.words import Names, direction_names, in_words, layer_names
from scodkit.factors.engine import Factors, Sums
from scodkit.factors.pieces import FactorSource
from scodkit.fit.fitted import Fitted
from scodkit.likelihoods import Heads, Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.parameters import ParameterSet
from scodkit.scoring import score as scoring
from scodkit.scoring.energies import Energies
from scodkit.sketch.eigenbasis import Eigenbasis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Columns",
    "Explanation",
    "Nearest",
    "References",
    "Saliency",
    "Shares",
    "differentiable_score",
    "explain",
    "saliency_of",
    "shares_of",
]

# shares shown in a figure with other panels, and named in a sentence
_TOP = 8
_NAMED = 5
# references named for each sample
_NEAREST = 3
# distances to references computed and sorted at a time: a few tens of MB
_DISTANCES = 1 << 20


@dataclass(frozen=True)
class Shares:
    """The terms that add up to the scores of a batch.

    Args:
        names: Whose shares these are: parameters, layers or directions of the output.
        values: ``(B, len(names))`` in float64, nats (squared units), larger = more of the
            score is from there. Each row sums to the sample's score. NaN for samples with a
            NaN or an infinity: their score is infinite, and has no parts.

    Examples:
        >>> shares = Shares(("body", "head"), torch.tensor([[1.5, 0.5]]))
        >>> shares.values.sum(1)
        tensor([2.])
        >>> dict(zip(shares.names, shares.values[0].tolist()))
        {'body': 1.5, 'head': 0.5}
    """

    names: tuple[str, ...]
    values: Tensor

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.shape[1] != len(self.names):
            raise OptionError(
                f"expected values of shape (B, {len(self.names)}), one column per name, got "
                f"{tuple(self.values.shape)}; give as many names as there are columns"
            )

    def plot(self, sample: int = 0, top: int = 12) -> Figure:
        """Return bars, the largest share first.

        Args:
            sample: Which sample of the batch.
            top: How many shares to show; the others are shown as their sum.

        Raises:
            OptionError: If none should be shown.
        """
        if top < 1:
            raise OptionError(f"expected top >= 1 shares to show, got {top}")
        figure = plots.new_figure(6.0, 1.2 + 0.28 * min(top + 1, len(self.names)))
        axes = figure.subplots()
        plots.shares(axes, self.names, self.values, sample=sample, top=top)
        axes.set_title(plots.place_of(self.values, sample), fontsize=10)
        return figure

    def sentence(self, sample: int = 0) -> str:
        """Return the largest shares in words, as percentages of the score.

        Args:
            sample: Which sample of the batch.
        """
        parts = plots.row(self.values, sample)
        order, whole = parts.abs().argsort(descending=True, stable=True), float(parts.sum())
        percent = 100 / whole if whole else 0.0
        shown = [
            f"{self.names[i]} {round(percent * float(parts[i]))} %"
            for i in order[:_NAMED].tolist()
        ]
        more = len(order) - _NAMED
        return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def shares_of(
    source: FactorSource, call: Inputs, basis: Eigenbasis, prior_scale: float
) -> Explanation:
    """Split the scores of a batch by parameter, by layer and by output direction.

    Shares of parameters and layers may be negative: weights of two layers can make up for one
    another in the posterior, and each is given half of that. Shares of directions never are.

    Rows are formed within the source's budget, and only projections of them are kept. The
    score itself is the one scoring gives; what the shares' sums differ from it by rounding is
    spread over them by size.

    Args:
        source: Turns batches into Fisher factors.
        call: The batch.
        basis: The eigenbasis, on the model's device.
        prior_scale: ``eps``, the standard deviation of the prior of a weight.

    Returns:
        The shares. A layer is a module that owns parameters, its share their sum; parameters
        of the model itself stand for themselves. A direction is a column of the likelihood's
        factor: an output of `Gaussian`, a class of `Categorical()`. Samples with a NaN or an
        infinity have an infinite score, and NaN for shares and features.

    Raises:
        BatchError: If the batch is empty.

    Examples:
        >>> from torch import nn
        >>> from scodkit import Gaussian, Monitor
        >>> from scodkit.factors.hooks import HookEngine
        >>> from scodkit.model.network import Network
        >>> from scodkit.model.parameters import select
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> x = torch.randn(9, 2)
        >>> basis = Monitor(net, Gaussian(), rank=5).fit([x], progress=False).basis
        >>> network, call = Network(net), Inputs((x,), {})
        >>> engine = HookEngine(network, select("all", network, call))
        >>> split = shares_of(FactorSource(engine, Gaussian(), (1,), 2**20), call, basis, 1.0)
        >>> split.layers.names
        ('0', '2')
        >>> torch.allclose(split.layers.values.sum(1), split.score)
        True
    """
    if call.batch_size == 0:
        raise BatchError("expected samples to explain, got an empty batch; leave it out")
    parameters = source.engine.parameters
    # lists of directions, by the first of the samples they belong to
    directions: dict[int, list[Tensor]] = {}
    features: dict[int, list[Tensor]] = {}
    with source.engine.network.evaluating():
        output, energies = scoring.score_batch(source, call, basis)
        sizes, shares = energies.total.new_zeros(2, call.batch_size, len(parameters.blocks))
        for piece in source.named().pieces(call, hold=True):
            parts = _by_parameter(piece.factors, parameters, basis)
            total = torch.stack([norms for norms, _ in parts.values()]).sum(0)
            projected = torch.stack([along for _, along in parts.values()]).sum(0)
            determined = projected * scoring.determined(basis, prior_scale)
            for i, (norms, along) in parts.items():
                size = norms.sum(1)
                sizes[piece.samples, i] += size
                shares[piece.samples, i] += size - (along * determined).sum((1, 2))
            # as if each direction were a sample: its score is its share
            each = Energies(total.flatten(), projected.square().flatten(0, 1))
            scores = scoring.score(each, basis, prior_scale).view_as(total)
            directions.setdefault(piece.samples.start, []).append(scores)
            features.setdefault(piece.samples.start, []).append(projected)
    score = scoring.score(energies, basis, prior_scale)
    shares = prior_scale**2 * shares
    # a share is a difference of sums as large as its size, and so is its rounding error
    shares = shares + _in_proportion(sizes, score - shares.sum(1))
    bad = ~score.isfinite()[:, None]
    by_parameter = Shares(parameters.names, shares.masked_fill(bad, torch.nan))
    by_direction = _in_proportion(_joined(directions), score).masked_fill(bad, torch.nan)
    names = tuple(f"direction {q}" for q in range(by_direction.shape[1]))
    return Explanation(
        score=score,
        output=output.detach(),
        parameters=by_parameter,
        layers=_by_layer(by_parameter),
        directions=Shares(names, by_direction),
        features=_joined(features).masked_fill(bad[:, None], torch.nan),
    )


def _joined(parts: dict[int, list[Tensor]]) -> Tensor:
    """Return one tensor ``(B, p, ...)`` from lists of directions by sample."""
    return torch.cat([torch.cat(directions, dim=1) for directions in parts.values()])


def _in_proportion(sizes: Tensor, whole: Tensor) -> Tensor:
    """Return ``whole (b,)`` cut in proportion to ``sizes (b, n)``."""
    sizes = sizes + torch.finfo(sizes.dtype).tiny  # evenly where all have underflowed
    return sizes / sizes.sum(1, keepdim=True) * whole[:, None]


def _by_parameter(
    factors: Factors, parameters: ParameterSet, basis: Eigenbasis
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return squared norms ``(b, q)`` and projections ``(b, q, k)``, by index of parameter."""
    sums: defaultdict[int, Sums] = defaultdict(Sums)
    for columns, rows in factors.blocks():
        shape = rows.shape[:2]
        for i, block in enumerate(parameters.blocks):
            start = max(columns.start, block.columns.start)
            stop = min(columns.stop, block.columns.stop)
            if start < stop:
                part = rows[:, :, start - columns.start : stop - columns.start]
                vectors = basis.vectors[start:stop].to(rows.device)
                # as if each row were a sample: for the norm of every direction
                sums[i].add_rows(part.flatten(0, 1)[:, None], vectors)
    results = {}
    for i, block_sums in sums.items():
        norms, along = (sum_.view(*shape, -1) for sum_ in block_sums.result)
        outside = 0.0 if factors.outside is None else factors.outside[:, :, i]
        results[i] = (norms[:, :, 0] + outside, along)
    return results


def _by_layer(shares: Shares) -> Shares:
    members: dict[str, list[int]] = {}
    for i, name in enumerate(shares.names):
        members.setdefault(_layer_of(name), []).append(i)
    sums = [shares.values[:, indices].sum(1) for indices in members.values()]
    return Shares(tuple(members), torch.stack(sums, dim=1))


def _by_head(likelihood: Likelihood, output: Tensor, directions: Tensor) -> Shares | None:
    """Return the shares of heads, from those of directions; None where there is one output."""
    if not isinstance(likelihood, Heads):
        return None
    names = tuple(likelihood.likelihoods)
    of_head, _ = likelihood.directions(output.shape[1])
    sums = directions.new_zeros(len(directions), len(names))
    return Shares(names, sums.index_add(1, of_head.to(sums.device), directions))


def _layer_of(name: str) -> str:
    """Return the module a parameter belongs to, or its own name at the top of the model."""
    owner = name.partition(".parametrizations.")[0]  # where weight_norm keeps its weights
    if owner == name:
        owner = name.rpartition(".")[0]
    return owner or name


@dataclass(frozen=True)
class Nearest:
    """The references nearest to each sample of a batch, the nearest first.

    Args:
        index: ``(B, count)`` int64, indices of the references; -1 for samples with a NaN or
            an infinity.
        distance: ``(B, count)``, >= 0, ascending, larger = less alike; units of
            sqrt(nats) / eps. Infinite where the index is -1.

    Examples:
        >>> nearest = Nearest(torch.tensor([[7, 2]]), torch.tensor([[0.1, 0.4]]))
        >>> nearest.index[0, 0].item()
        7
    """

    index: Tensor
    distance: Tensor

    def plot(self, inputs: Tensor, references: Tensor, sample: int = 0) -> Figure:
        """Return an image beside the images of its nearest references.

        Args:
            inputs: The images asked about, ``(B, C, H, W)`` or ``(B, H, W)``.
            references: Those of the references, ``(n, C, H, W)`` or ``(n, H, W)``.
            sample: Which sample of the batch.
        """
        index, distance = plots.row(self.index, sample), plots.finite_row(self.distance, sample)
        shown = [("asked", plots.row(inputs, sample))]
        for i, length in zip(index.tolist(), distance.tolist(), strict=True):
            shown.append((f"reference {i}, at {length:.3g}", plots.row(references, i)))
        panels = [partial(plots.image, pixels=image, title=title) for title, image in shown]
        title = plots.place_of(self.index, sample)
        return plots.figure_of(panels, 1.6 * len(panels), 2.1, title)


class References:
    """Known samples, by the part of their curvature that the basis sees.

    The distance between two samples is the Euclidean one of their ``U^T L``. No direction is
    weighed more than another: the leading ones, along which the training data varies most,
    count for most because ``L`` is largest there.

    Args:
        features: ``U^T L`` of the references, ``(n, p, k)``, as `Monitor.features` gives it:
            finite, in units of sqrt(nats) / eps. Of training or calibration data.

    Examples:
        >>> references = References(torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]]))
        >>> nearest = references.nearest(torch.tensor([[[3.0, 3.0]]]), count=2)
        >>> nearest.index
        tensor([[1, 0]])
        >>> nearest.distance
        tensor([[1.0000, 4.2426]])
    """

    def __init__(self, features: Tensor) -> None:
        if features.ndim != 3 or not features.is_floating_point() or len(features) == 0:
            raise OptionError(
                "expected features (n, p, k) of at least one sample, got a tensor of shape "
                f"{tuple(features.shape)} and {features.dtype}; type References("
                "torch.cat([monitor.features(batch) for batch in loader]))"
            )
        bad = (~features.isfinite().flatten(1).all(1)).sum().item()
        if bad:
            raise OptionError(
                f"expected finite features, got a NaN or an infinity in {bad} of "
                f"{len(features)} samples; leave them out: "
                "features[features.isfinite().flatten(1).all(1)]"
            )
        self.features = features.detach()

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        n, p, k = self.features.shape
        return f"References({n} samples, {p} directions, rank {k})"

    def nearest(self, features: Tensor, count: int = 3) -> Nearest:
        """Return the nearest references of each sample; of equally near ones the first.

        Args:
            features: ``U^T L`` of the samples, ``(B, p, k)``, from the same monitor.
            count: How many to return, at most as many as there are.

        Raises:
            OptionError: If there are fewer references than that.
            BatchError: If the features are not of the same monitor.
        """
        if not 1 <= count <= len(self):
            raise OptionError(
                f"expected 1 <= count <= {len(self)}, the number of references, got {count}"
            )
        if features.ndim != 3 or features.shape[1:] != self.features.shape[1:]:
            raise BatchError(
                f"expected features of shape (B, {self.features.shape[1]}, "
                f"{self.features.shape[2]}), as the references have, got "
                f"{tuple(features.shape)}; type references.nearest(monitor.features(batch)), "
                "with the monitor that gave the references theirs"
            )
        known = self.features.flatten(1)
        queries = features.detach().flatten(1).to(known)
        distances, indices = [], []
        for chunk in torch.split(queries, max(1, _DISTANCES // len(known))):
            # by differences: with products, near samples would be lost in the rounding of far
            # ones; stable: of equally near references the first comes first
            mode = "donot_use_mm_for_euclid_dist"
            distance, index = torch.cdist(chunk, known, compute_mode=mode).sort(stable=True)
            # copies: a view would keep all of the distances alive
            distances.append(distance[:, :count].clone())
            indices.append(index[:, :count].clone())
        bad = ~queries.isfinite().all(1, keepdim=True)
        return Nearest(
            index=torch.cat(indices).masked_fill(bad, -1),
            distance=torch.cat(distances).masked_fill(bad, torch.inf),
        )


@dataclass(frozen=True)
class Explanation:
    """What the scores of a batch are made of.

    Args:
        score: ``(B,)``, what `Monitor.score` returns: nats (squared units), >= 0, larger = more
            atypical; infinite for samples with a NaN or an infinity.
        output: What the model returned, ``(B, *shape)``; of several heads by name.
        parameters: Shares of the parameters; for each sample they sum to its score.
        layers: Shares of the layers; likewise.
        directions: Shares of the directions of the output; likewise.
        heads: Shares of the heads of the model; likewise. None where there is one output.
        features: ``U^T L``, ``(B, p, k)`` in float64, units of sqrt(nats) / eps; what
            `References` compares. NaN where the score is infinite.
        saliency: The score's slopes in the input; None if not asked for.
        nearest: The nearest references; None where no references were given.
        columns: The columns of a table beside those of the training data; None for other
            inputs.
        predictions: What the model returned, in words.
        p_value: ``(B,)`` in (0, 1], smaller = more atypical; None without a calibration.
    """

    score: Tensor
    output: Any
    parameters: Shares
    layers: Shares
    directions: Shares
    features: Tensor
    saliency: Saliency | None = None
    nearest: Nearest | None = None
    columns: Columns | None = None
    predictions: tuple[str, ...] = ()
    p_value: Tensor | None = None
    heads: Shares | None = None

    def sentences(self, sample: int = 0) -> dict[str, str]:
        """Return the explanation of one sample in sentences, by what they are about.

        Args:
            sample: Which sample of the batch.

        Returns:
            The most striking first: columns far outside the training data come before the
            score.
        """
        told = {}
        beyond = [] if self.columns is None else self.columns.sentences(sample)
        if beyond:
            told["columns"] = "\n".join(beyond)
        told["score"] = self._headline(sample)
        if not math.isfinite(plots.row(self.score, sample)):
            return told
        told["layers"] = self.layers.sentence(sample)
        if self.heads is not None:
            told["heads"] = self.heads.sentence(sample)
        if len(self.directions.names) > 1:
            told["directions"] = self.directions.sentence(sample)
        if self.nearest is not None:
            index = plots.row(self.nearest.index, sample).tolist()
            distance = plots.row(self.nearest.distance, sample).tolist()
            pairs = zip(index, distance, strict=True)
            told["nearest"] = ", ".join(f"sample {i} at {away:.3g}" for i, away in pairs)
        if self.saliency is not None:
            steepest = self.saliency.steepest(sample).items()
            listed = ", ".join(f"{place} {slope:+.3g}" for place, slope in steepest)
            told["slopes"] = f"{listed} ({self.saliency.unit})"
        if self.columns is not None and not beyond:
            told["columns"] = self.columns.inside(sample)
        return told

    def words(self, sample: int = 0) -> str:
        """Return the explanation of one sample in words, the most striking first.

        Args:
            sample: Which sample of the batch.
        """
        topics = {"columns": "", "score": "score "}  # those of others end in a colon
        return "\n".join(
            topics.get(topic, f"{topic}: ") + line
            for topic, line in self.sentences(sample).items()
        )

    def __str__(self) -> str:
        each = [f"sample {i}: {self.words(i)}" for i in range(len(self.score))]
        return "\n".join(each)

    def _headline(self, sample: int) -> str:
        score = float(plots.row(self.score, sample))
        line = f"{score:.3g} nats"
        if not math.isfinite(score):
            line += ": a NaN or an infinity in its inputs or outputs"
        if self.p_value is not None:
            line += f", p-value {float(self.p_value[sample]):.3g}"
        return line + (f", predicted {self.predictions[sample]}" if self.predictions else "")

    def plot(self, sample: int = 0, name: str | None = None) -> Figure:
        """Return one figure: shares, columns of a table, slopes, nearest references.

        Args:
            sample: Which sample of the batch. Slopes are shown for vectors and images.
            name: What the sample is called; its place in the batch by default.
        """
        shares = {"by layer": self.layers}
        if self.heads is not None:
            shares["by head"] = self.heads
        if len(self.directions.names) > 1:
            shares["by output"] = self.directions
        below: list[plots.Panel] = []
        if self.columns is not None and self.columns.farthest(sample) is not None:
            below.append(self.columns.panel(sample))
        if self.saliency is not None and 2 <= self.saliency.gradient.ndim <= 4:
            below += self.saliency.panels(sample)
        if self.nearest is not None:
            index = plots.row(self.nearest.index, sample)
            distance = plots.row(self.nearest.distance, sample)
            below.append(partial(plots.distances, index=index, distance=distance))
        tallest = min(_TOP + 1, max(len(part.names) for part in shares.values()))
        heights = [1.1 + 0.25 * tallest] + [2.5] * bool(below)
        figure = plots.new_figure(9.0, sum(heights))
        rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat
        name = plots.place_of(self.score, sample) if name is None else name
        rows[0].suptitle(f"{name}: score {self._headline(sample)}", fontsize=10)
        every_axes = rows[0].subplots(1, len(shares), squeeze=False).flat
        for axes, (title, part) in zip(every_axes, shares.items(), strict=True):
            plots.shares(axes, part.names, part.values, sample=sample, top=_TOP)
            axes.set_title(title, fontsize=9)
        if below:
            plots.draw_beside(rows[1], below)
        return figure


def explain(
    prepared: tuple[Inputs, FactorSource, Eigenbasis],
    fitted: Fitted,
    prior_scale: float,
    names: Names,
    saliency: bool,
    references: References | None,
) -> Explanation:
    """Explain the scores of a batch, by the names that people know.

    Args:
        prepared: The batch, what turns it into factors, and the basis on the model's device.
        fitted: The fit.
        prior_scale: ``eps``, the standard deviation of the prior of a weight.
        names: Of columns and classes.
        saliency: Whether to differentiate the scores by the input, which must be one
            floating-point tensor. Takes several times as long as all the rest.
        references: Samples to look for the nearest among, three for each sample; or None.

    Returns:
        The explanation, without p-values.

    Raises:
        OptionError: If a score is that of the worst position.
    """
    call, source, basis = prepared
    if source.likelihood.worst:
        raise OptionError(
            f"expected a score whose rows add up, got {source.likelihood}, that of the worst "
            "position alone; monitor.positions(batch).worst tells which, and monitor.task = "
            "Task(lambda out: out[:, 3:4], Categorical(class_dim=-1, directions=1)) is of the "
            "fourth alone and can be explained"
        )
    columns = Columns.of(fitted.columns, call, names)
    split = shares_of(source, call, basis, prior_scale)
    output, slopes = split.output, None
    directions = direction_names(source.likelihood, output.shape[1:], names.classes)
    if saliency:
        slopes = saliency_of(source, call, basis, prior_scale)
        if columns is not None:
            slopes = replace(slopes, names=columns.names, spread=columns.spread)
    layers = layer_names(source.engine.network.model, split.layers.names)
    count = 0 if references is None else min(_NEAREST, len(references))
    return replace(
        split,
        score=split.score.to(basis.values.dtype),
        layers=replace(split.layers, names=layers),
        directions=replace(split.directions, names=directions or split.directions.names),
        heads=_by_head(source.named().likelihood, output, split.directions.values),
        saliency=slopes,
        nearest=None if references is None else references.nearest(split.features, count),
        columns=columns,
        predictions=tuple(
            in_words(fitted.likelihood, own, names.classes) for own in output.cpu()
        ),
    )
