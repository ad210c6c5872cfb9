"""Monitors whose weights several processes divide: for sketches too large for one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from typing_extensions import Self

from scodkit import monitor_file as storage
from scodkit.errors import NotFittedError, OptionError, ParameterSelectionError
from scodkit.factors.pieces import FactorSource, MemoryBudget
from scodkit.fit import fit as fitting
from scodkit.fit.fit import same_in_all, shared
from scodkit.fit.fitted import UNFITTED, FitOptions, Fitted, Recipe, check_options
from scodkit.fit.probes import check_probes
from scodkit.fit.processes import Processes
from scodkit.likelihoods import Likelihood
from scodkit.likelihoods.heads import as_likelihood
from scodkit.model.network import Network, StateWatch
from scodkit.model.parameters import Selection, select_names
from scodkit.model.projected import Projected, ProjectedSet
from scodkit.numerics.artifact import check_place
from scodkit.scoring import score as scoring
from scodkit.scoring.certificate import Certificate, certificate
from scodkit.scoring.energies import Energies
from scodkit.sketch import Nystrom, Sketch
from scodkit.sketch.eigenbasis import Eigenbasis

_RENEWAL = "monitor.fit(train_loader)"


class ShardedMonitor:
    """A `Monitor` of which every process of a group holds a part of sketch and basis.

    All processes have the whole model, pass the same batches to `fit`, and ask about the same
    inputs: gradients are formed of a process's own weights alone, and sums over all weights
    are added up for every batch. Where the sketch fits one device, `Monitor.fit` is faster:
    there processes divide the data.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises.
        rank: ``k``.
        sketch: `Nystrom` (the default) or `TwoSided`.
        parameters: Which weights, as for `Monitor`. Whole parameters are given to processes.
        prior_scale: ``eps``.
        inputs: As for `Monitor`.
        outputs: As for `Monitor`.

    Examples:
        >>> import torch
        >>> from scodkit import Gaussian
        >>> monitor = ShardedMonitor(nn.Linear(3, 2), Gaussian(), rank=2)
        >>> monitor.fit([torch.randn(20, 3)], progress=False).score(torch.randn(4, 3)).shape
        torch.Size([4])
    """

    memory_budget = MemoryBudget()

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        rank: int = 50,
        *,
        sketch: Sketch | None = None,
        parameters: Selection = "all",
        prior_scale: float = 1.0,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> None:
        sketch = Nystrom() if sketch is None else sketch
        likelihood = as_likelihood(likelihood)
        check_options(model, likelihood, rank, sketch, prior_scale)
        if isinstance(parameters, (Projected, ProjectedSet)):
            raise ParameterSelectionError(
                "expected weights to be divided among processes, got projected ones, which "
                "are few; type Monitor(..., parameters=Projected(...))"
            )
        if likelihood.worst:
            raise OptionError(
                f"expected a score that is summed over processes, got {likelihood}; type "
                'Categorical(..., pool="mean")'
            )
        self.prior_scale = prior_scale
        self._recipe = Recipe(likelihood, rank, sketch, parameters, 0)
        self._functions = storage.given(inputs=inputs, outputs=outputs)
        self._network = Network(model, inputs, likelihood.picking(outputs))
        self._processes = Processes.here()
        self._state_watch = StateWatch(self._network, _RENEWAL)
        self._fitted: Fitted | None = None
        self._source: FactorSource | None = None

    def fit(
        self,
        loader: Iterable[Any],
        *,
        progress: bool = True,
        on_bad: Literal["raise", "skip"] = "raise",
    ) -> Self:
        """Summarise the training data in one pass.

        Args:
            loader: Batches, the same in every process; read once.
            progress: Show a progress bar in the first process.
            on_bad: As in `Monitor.fit`.

        Returns:
            The monitor itself, fitted.

        Raises:
            MismatchError: If processes have different weights, options or data.
            NonFiniteError: If there was not one finite sample.
        """
        options = FitOptions(
            progress=progress, on_bad=on_bad, check_deterministic=False, sharded=True
        )
        watch = StateWatch(self._network, _RENEWAL)
        recipe = replace(self._recipe, budget=self.memory_budget)
        self._fitted, self._source = fitting.fit(self._network, recipe, loader, options)
        self._state_watch, self._processes = watch, Processes.here()
        return self

    def score(self, batch: Any) -> Tensor:
        """Return how atypical inputs are, ``(B,)`` in nats, larger = more atypical.

        Args:
            batch: As the loader yields it; the same in every process.
        """
        parts = self._energies(batch)
        return scoring.score(parts, self.basis, self.prior_scale).to(self.basis.values.dtype)

    def certify(self, batch: Any) -> Certificate:
        """Return bounds on the exact scores, as `Monitor.certify` does.

        Args:
            batch: As the loader yields it; the same in every process.
        """
        return certificate(self._energies(batch), self.basis, self.prior_scale)

    @property
    def basis(self) -> Eigenbasis:
        """The eigenbasis; of its vectors those rows that this process holds."""
        return self._ready().basis

    def _ready(self) -> Fitted:
        if self._fitted is None:
            raise NotFittedError(UNFITTED)
        return self._fitted

    def save(self, path: str | Path) -> None:
        """Write the monitor, one file for each process: ``path.0-of-4`` and so on.

        They are loaded by as many processes, by fewer or more, or by one: `Monitor.load`.

        Args:
            path: Where to; the same in every process.

        Raises:
            StaleMonitorError: If the model has changed since the fit.
        """
        self._ready()
        path, processes = Path(path), self._processes
        with processes.failing_together():
            fitted = self._check("saving", contents=True)
            check_place(path)
        with processes.failing_together():
            storage.save(
                processes.own_file(path),
                fitted,
                self._recipe,
                prior_scale=self.prior_scale,
                functions=self._functions,
                part=(processes.rank, processes.count),
            )
        with processes.failing_together():  # once all files are written, old ones may go
            if processes.rank == 0:
                storage.remove_replaced(path, processes.kept_files(path)[1])

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        sketch: Sketch | None = None,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> Self:
        """Read a monitor written by `save`, or by `Monitor.save`: each process its own part.

        Args:
            path: Where from.
            model: The model it was fitted on, with the same weights.
            likelihood: As for `Monitor.load`.
            sketch: Likewise.
            inputs: The same function it was made with, if there was one.
            outputs: Likewise.

        Returns:
            The monitor, divided among the processes there are now.
        """
        processes = Processes.here()
        with processes.failing_together():
            options, fitted, _, _ = storage.load(
                path,
                Network(model).model,  # without wrappers
                likelihood,
                sketch,
                storage.given(inputs=inputs, outputs=outputs),
                (processes.rank, processes.count),
            )
        monitor = cls(model, **options, inputs=inputs, outputs=outputs)
        with processes.failing_together():
            check_probes(fitted.probes, monitor._network)
        monitor._fitted = fitted
        if fitted.state is not None:
            fitted.state.add_up = processes.summed
        return monitor

    def _energies(self, batch: Any) -> Energies:
        network, processes = self._network, self._processes
        with processes.failing_together():
            fitted = self._check("a score")
        call = same_in_all(processes, network, lambda: batch, fitted.form)
        assert call is not None
        if call.batch_size == 0:
            return Energies.none(fitted.basis)
        with network.evaluating():
            if self._source is None:
                with processes.failing_together():
                    names, _ = fitted.parameters.divided(processes.rank, processes.count)
                    recipe = replace(self._recipe, budget=self.memory_budget)
                    part = select_names(network.model, names)
                    source = recipe.source(network, part, call, fitted.shape)
                self._source = shared(source, processes)
            return scoring.score_batch(self._source, call, fitted.basis)[1]

    def _check(self, doing: str, *, contents: bool = False) -> Fitted:
        """Return the fit, after checking that the model has not changed since.

        Args:
            doing: What is about to be done, for the message if it has.
            contents: Compare the weights even if nothing seems to have touched them.
        """
        fitted = self._ready()
        if contents or not self._state_watch.unmoved():
            with self._network.evaluating():
                fitted = self._fitted = fitted.settled(self._state_watch, doing)
        return fitted
