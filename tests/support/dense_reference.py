"""Scores by the formula of docs/ideas/method.md alone, beside a monitor of the same models.

Nothing of the library's own mathematics is used: rows come from plain autograd on one sample
at a time, each through a model of its own; the root of the output Fisher information from its
eigenvalues, where that is the second derivative of a log-partition function; the basis from
singular values of all rows; the score from its definition.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scodkit import Bernoulli, Categorical, Gaussian, Monitor
from scodkit.errors import ScodError
from scodkit.likelihoods import HeteroscedasticGaussian, Likelihood

TOLERANCE = 1e-9
CATEGORICAL = Categorical()

# of the squared length of a Jacobian: what rounding leaves of differences of near-equals
ROUNDING = 1e-13


def sample_of(batch: Any, i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with one sample of a batch, in memory of its own."""

    def one(value: Any) -> Any:
        return value[i : i + 1].clone() if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        return (), {key: one(value) for key, value in batch.items()}
    return tuple(one(value) for value in (batch if isinstance(batch, tuple) else (batch,))), {}


def tensors_of(batch: Any) -> list[Tensor]:
    values = batch.values() if isinstance(batch, Mapping) else batch
    values = values if not isinstance(values, Tensor) else (values,)
    return [value for value in values if isinstance(value, Tensor)]


def size_of(batch: Any) -> int:
    return len(tensors_of(batch)[0])


# --- The formula ---------------------------------------------------------------------------


def output_fisher(likelihood: Likelihood, theta: Tensor) -> Tensor:
    """``F_theta`` of one sample's output ``shape``, ``(d, d)``."""
    if isinstance(likelihood, HeteroscedasticGaussian):
        means, log_variances = theta.chunk(2)
        precision = (-log_variances).exp().flatten()
        return torch.cat([precision, torch.full_like(means, 0.5).flatten()]).diag()
    if isinstance(likelihood, Gaussian):
        variance = torch.tensor(likelihood.variance, dtype=theta.dtype).expand(theta.numel())

        def partition(flat: Tensor) -> Tensor:
            return (flat.square() / variance).sum() / 2

    elif isinstance(likelihood, Bernoulli):

        def partition(flat: Tensor) -> Tensor:
            return flat.exp().log1p().sum()

    else:
        assert isinstance(likelihood, Categorical)
        axis = 1 if likelihood.class_dim is None else likelihood.class_dim
        axis = axis - 1 if axis > 0 else axis

        def partition(flat: Tensor) -> Tensor:
            return flat.reshape(theta.shape).logsumexp(axis).sum()

    return torch.autograd.functional.hessian(partition, theta.flatten())


def rows_of(
    model: nn.Module, call: tuple[Any, Any], how: OddModel
) -> tuple[Tensor, Tensor, Tensor]:
    """One sample's output, ``J``, and ``R J`` with ``R^T R = F_theta``: ``(d, N)`` each."""
    names = [
        n for n, _ in model.named_parameters() if any(map(partial(fnmatch, n), how.chosen))
    ]
    weights = [model.get_parameter(name) for name in names]
    for weight in weights:  # frozen ones count
        weight.requires_grad_()
    result = model(*call[0], **call[1])
    output = (how.outputs(result) if how.outputs else result)[0]
    jacobian = torch.stack([_gradient(value, weights) for value in output.flatten()])
    theta = output.detach()
    if not theta.isfinite().all():
        return theta, jacobian, jacobian
    fisher = output_fisher(how.likelihood, theta if theta.ndim else theta[None])
    values, vectors = torch.linalg.eigh(fisher)
    root = values.clamp_min(0).sqrt()[:, None] * vectors.mT
    return theta, jacobian, root @ jacobian


def _gradient(value: Tensor, weights: Sequence[Tensor]) -> Tensor:
    for weight in weights:
        weight.grad = None
    if value.requires_grad:
        value.backward(retain_graph=True)  # as grad() would, but for reentrant checkpoints
    found = [torch.zeros_like(w) if w.grad is None else w.grad.to_dense() for w in weights]
    return torch.cat([gradient.flatten() for gradient in found])


class Reference:
    """The score's formula with the top eigenpairs of the rows of all samples fitted.

    Args:
        how: The model.
        fitted: Batches; samples that are not finite are left out.
        rank: How many eigenpairs; None for all.
    """

    def __init__(self, how: OddModel, fitted: Iterable[Any], rank: int | None) -> None:
        self._how = how
        every = [self.rows(batch, i) for batch in fitted for i in range(size_of(batch))]
        kept = [rows for _, _, rows in every if rows is not None]
        self._num_data = len(kept)
        _, singular, right = torch.linalg.svd(torch.cat(kept), full_matrices=False)
        values = singular.square() / len(kept)
        count = len(values) if rank is None else rank
        if count < len(values):
            gap = float(values[count - 1] - values[count]) / float(values[0])
            assert gap > 1e-6 or float(values[count - 1]) < 1e-12, f"no clear cut: {gap:.1e}"
        self._values, self._vectors = values[:count], right[:count]

    def rows(self, batch: Any, i: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """A sample's output, Jacobian, and rows; None if the sample is not finite."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says of modules is not the subject
            model, call = self._how.model(alone=True), sample_of(batch, i)
            theta, jacobian, rows = rows_of(model, call, self._how)
        own = [t[i] for t in tensors_of(batch) if t.is_floating_point()]
        finite = all(bool(t.isfinite().all()) for t in (*own, theta, rows))
        return theta, jacobian, rows if finite else None

    def score(self, batch: Any, i: int) -> tuple[float, float, Tensor]:
        """A sample's score, what rounding may take from it, and its output."""
        theta, jacobian, rows = self.rows(batch, i)
        if rows is None:
            return float("inf"), 0.0, theta
        c = 1 / (2 * self._num_data)
        along = rows @ self._vectors.mT
        outside = (rows - along @ self._vectors).square().sum()
        inside = (along.square().sum(0) * (c / (self._values + c))).sum()
        return float(outside + inside), ROUNDING * float(jacobian.square().sum()), theta


# --- Models, and what becomes of them ------------------------------------------------------


@dataclass(frozen=True)
class OddModel:
    """A small model, in float64, with the batches it takes.

    Args:
        name: Its name.
        build: Makes it; the weights are drawn afterwards.
        batch: Makes a batch of so many samples: a tensor, a tuple or a dict.
        likelihood: Of its output.
        outputs: Picks the prediction from what it returns.
        refusal: Why a monitor may refuse it; where empty, it has to be scored.
        train: Whether it is handed over in train mode.
        chosen: Names or patterns of the parameters that count.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    likelihood: Likelihood = CATEGORICAL
    outputs: Callable[[Any], Tensor] | None = None
    refusal: str = ""
    train: bool = False
    chosen: tuple[str, ...] = ("*",)

    def __str__(self) -> str:
        return self.name

    def model(self, *, alone: bool = False) -> nn.Module:
        """The model, the same every time; in eval mode if it is to be run by itself."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build().double().train(self.train and not alone)
            draw_weights(model)
        return model

    def inputs(self, size: int, seed: int) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.batch(size)


def draw_weights(model: nn.Module) -> None:
    """Draw every weight and running statistic anew, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0.0, 0.6)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)


@dataclass(frozen=True)
class Verdict:
    """What became of a model: "right", "refused", "wrong" or "crashed".

    Args:
        kind: One of these.
        engine: What computed the scores, where there were any.
        detail: What differs, or what was said.
    """

    kind: str
    engine: str = ""
    detail: str = ""

    @property
    def column(self) -> str:
        """Where it is counted."""
        return self.engine if self.kind == "right" else self.kind


def engine_of(monitor: Monitor) -> str:
    source = monitor._ready().source
    return "none" if source is None else type(source.engine).__name__


def judged(work: Callable[[], tuple[str, str]]) -> Verdict:
    """What comes of some work that returns an engine, and what is wrong with its scores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # slower engines, and what torch says of modules
        try:
            engine, difference = work()
        except ScodError as error:
            return Verdict("refused", detail=f"{type(error).__name__}: {error}")
        except Exception as error:  # whatever else comes out is what this looks for
            return Verdict("crashed", detail=f"{type(error).__name__}: {error}")
    return Verdict("wrong" if difference else "right", engine, difference)


def difference(scores: Tensor, outputs: Tensor, batch: Any, reference: Reference) -> str:
    """What is wrong with a batch's scores or outputs; empty if nothing is."""
    for i, score in enumerate(scores.tolist()):
        expected, rounding, theta = reference.score(batch, i)
        off = 0.0 if score == expected else abs(score - expected)
        if not off <= TOLERANCE * expected + rounding:
            return f"sample {i} of {len(scores)}: score {score:.9g}, alone {expected:.9g}"
        if expected < float("inf") and not torch.allclose(
            outputs[i].flatten(), theta.flatten(), rtol=TOLERANCE, atol=TOLERANCE
        ):
            return f"sample {i} of {len(scores)}: another output than alone"
    return ""
