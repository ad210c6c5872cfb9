"""Several outputs of one network, each with its likelihood; outputs of a box, and of an image.

A monitor sees the outputs as one tensor ``(B, d)``: head after head, those of boxes box by box,
and last, if not every place has a box, which ones do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from scodkit.errors import BatchError, OptionError
from scodkit.likelihoods.likelihood import Likelihood

# what the mask is called among the outputs of a model that returns lists
_PRESENT = "present"


class _Part(NamedTuple):
    """The output of one head.

    Args:
        likelihood: Of the head.
        output: ``(B, *shape)``; of boxes ``(B Q, *shape)``, as if each were a sample.
        columns: Where it is in the flat output.
        present: ``(B, Q)``, 1 where there is a box, 0 elsewhere; None for heads of an image.
    """

    likelihood: Likelihood
    output: Tensor
    columns: slice
    present: Tensor | None


@dataclass(frozen=True)
class Heads(Likelihood):
    """Heads that are independent given the weights: ``F_theta`` is block diagonal.

    Directions of all heads count together: the score of the whole is the sum of the scores of
    its heads, all in nats. Outputs that are not named are not scored.

    With ``boxes`` the named heads have an output for each box, counted along the first axis
    after the batch, and their likelihoods are those of a single box. The image's score is then
    the sum over its boxes: 0 where there are none, as nothing was predicted.

    Args:
        likelihoods: By name of the output; of a model that returns a tuple the names are
            ``"0"``, ``"1"`` and so on.
        boxes: Names of the heads with an output for each box: a tensor ``(B, Q, *shape)``, or
            a list of ``B`` tensors ``(boxes of the image, *shape)``.
        present: Name of the output that says which of ``Q`` places have a box, a mask
            ``(B, Q)``. Without it, and without ``most``, all have one.
        most: For lists: boxes an image has at most. All are padded to as many.

    Attributes:
        shapes: Of each head's output, of one sample or box; known after the first pass.

    Examples:
        >>> from scodkit.likelihoods import Bernoulli, Gaussian
        >>> heads = Heads({"class": Bernoulli(), "box": Gaussian(4.0)})
        >>> flat = heads.joined({"class": torch.zeros(1, 1), "box": torch.ones(1, 2)})
        >>> heads.factor(flat)
        tensor([[[0.5000, 0.0000, 0.0000],
                 [0.0000, 0.5000, 0.0000],
                 [0.0000, 0.0000, 0.5000]]])
    """

    likelihoods: Mapping[str, Likelihood]
    boxes: tuple[str, ...] = ()
    present: str | None = None
    most: int | None = None
    shapes: dict[str, tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        named = dict(self.likelihoods)
        object.__setattr__(self, "likelihoods", named)
        object.__setattr__(self, "boxes", tuple(self.boxes))
        problem = None
        refused = [n for n, each in named.items() if not _is_head(n, each)]
        strangers = [name for name in self.boxes if name not in named]
        if not named or refused:
            listed = ", ".join(f"{n!r}: {named[n]!r}" for n in refused) or "none"
            problem = (
                "a likelihood without random draws, and with scores that add up (so not "
                "pool='max'), for each head, by the name of its output, "
                f'got {listed}; type {{"class": Categorical(), "box": Gaussian(variance=0.1)}}'
            )
        elif isinstance(self.boxes, str) or strangers:
            problem = f"names of heads as boxes, got {strangers}; type boxes={tuple(named)}"
        elif self._mask in named or (self.present is not None and self.most is not None):
            problem = (
                f"a mask beside the heads, got present={self.present!r} and most={self.most}; "
                "type present=... for tensors with a mask, or most=... for lists"
            )
        elif (self.present is not None or self.most is not None) and not self.boxes:
            problem = f"heads of boxes, got none; type boxes={tuple(named)}"
        elif self.most is not None and (type(self.most) is not int or self.most < 1):
            problem = f"most >= 1 boxes an image, got {self.most!r}"
        if problem:
            raise OptionError(f"expected {problem}")

    # --- from what a model returns to one tensor, and back ---

    def picking(self, outputs: Callable[[Any], Any] | None) -> Callable[[Any], Tensor]:
        """See `Likelihood.picking`.

        Returns:
            `joined`, of what that function returns.
        """
        return _Picking(self, outputs)

    def joined(self, result: Any) -> Tensor:
        """Return the outputs of all heads as one tensor ``(B, d)``.

        Args:
            result: What the model returned: a dict, or a tuple.

        Raises:
            BatchError: If it lacks a head, or shapes are not those of the fit.
        """
        found = self._named(result)
        if self.most is not None:
            found |= self._padded({name: found[name] for name in self.boxes}, self.most)
        tensors = {name: self._checked(name, found[name]) for name in self.likelihoods}
        sizes = {t.shape[: 1 + (n in self.boxes)] for n, t in tensors.items()}
        mask = found.get(self._mask) if self._mask else None
        if mask is not None:
            if not self.shapes:  # reading values waits for a GPU: in the first pass only
                self._check_mask(mask)
            sizes.add(mask.shape)
        if len({size[:1] for size in sizes}) > 1 or len({s for s in sizes if len(s) > 1}) > 1:
            raise BatchError(
                "expected heads of the same samples and boxes, got "
                + ", ".join(f"{name}: {tuple(t.shape)}" for name, t in tensors.items())
                + ("" if mask is None else f", {self._mask}: {tuple(mask.shape)}")
                + "; heads of boxes begin with (B, Q), others with (B,): type boxes=... for "
                "the heads of boxes, and no others"
            )
        self._record({n: tuple(t.shape[1 + (n in self.boxes) :]) for n, t in tensors.items()})
        flat = []
        for name, tensor in tensors.items():
            part = tensor.flatten(1)
            if mask is not None and name in self.boxes:  # what is there otherwise is nobody's
                width = math.prod(self.shapes[name])
                kept = mask.bool()[:, :, None].expand(-1, -1, width).flatten(1)
                part = torch.where(kept, part, 0.0)
            flat.append(part)
        if mask is not None:
            flat.append(mask.bool().to(flat[0].dtype))
        return torch.cat(flat, 1)

    def shown(self, output: Tensor) -> dict[str, Tensor]:
        """See `Likelihood.shown`.

        Returns:
            The heads by name: ``(B, *shape)``, those of boxes ``(B, Q, *shape)``; and where
            not every place has a box the mask ``(B, Q)``, under its name or ``"present"``.
        """
        count = self.num_boxes(output.shape[1])
        parts = {
            name: part.output.view(len(output), count, *self.shapes[name])
            if name in self.boxes
            else part.output
            for name, part in self._parts(output)
        }
        return parts | ({self._mask: self.mask(output)} if self._mask else {})

    def mask(self, output: Tensor) -> Tensor:
        """Return which places have a box, ``(B, Q)``.

        Args:
            output: All heads as one tensor, ``(B, d)``.
        """
        count = self.num_boxes(output.shape[1])
        if not self._mask:
            return torch.ones(len(output), count, dtype=torch.bool, device=output.device)
        return output[:, output.shape[1] - count :] > 0.5

    def num_boxes(self, outputs: int) -> int:
        """Return ``Q``, how many boxes there are places for; 0 without heads of boxes.

        Args:
            outputs: ``d``, of the flat output.

        Raises:
            BatchError: If no pass has shown the heads' shapes yet.
        """
        if not self.shapes:
            raise BatchError(
                "expected heads whose shapes are known, got some that no model has returned "
                "yet; type Monitor(model, heads).fit(train_loader), or heads.joined(outputs)"
            )
        of_image, of_box = 0, int(self._mask is not None)
        for name, shape in self.shapes.items():
            if name in self.boxes:
                of_box += math.prod(shape)
            else:
                of_image += math.prod(shape)
        return (outputs - of_image) // of_box if of_box else 0

    @property
    def _mask(self) -> str | None:
        """The name of the mask among the outputs; None where every place has a box."""
        return _PRESENT if self.most is not None else self.present

    def _named(self, result: Any) -> dict[str, Any]:
        """Return a model's outputs by name.

        Raises:
            BatchError: If some are missing.
        """
        if isinstance(result, Mapping):
            found = dict(result)
        elif isinstance(result, (tuple, list)):
            found = {str(i): each for i, each in enumerate(result)}
            found |= getattr(result, "_asdict", dict)()
        else:
            found = {"0": result} if isinstance(result, Tensor) else dict(vars(result))
        expected = [*self.likelihoods, *([self.present] if self.present else [])]
        missing = [name for name in expected if name not in found]
        if missing:
            raise BatchError(
                f"expected a model that returns {', '.join(expected)}, got "
                f"{', '.join(map(str, found)) or type(result).__name__}, without "
                f"{', '.join(missing)}; name the heads as the model does, or type Monitor(..., "
                f"outputs=lambda out: {{{missing[0]!r}: out[...], ...}})"
            )
        return found

    def _padded(self, lists: Mapping[str, Any], most: int) -> dict[str, Tensor]:
        """Return lists of tensors as one each, with the mask.

        Raises:
            BatchError: If there are too many boxes in an image, or other numbers in each head.
        """
        padded: dict[str, Tensor] = {}
        counts: dict[str, list[int]] = {}
        for name, each in lists.items():
            if not isinstance(each, (list, tuple)):
                raise BatchError(
                    f"expected a list with a tensor for each image as {name!r}, got "
                    f"{type(each).__name__}; for tensors leave out most=..., and type "
                    "present=... if they have a mask"
                )
            counts[name] = [len(boxes) for boxes in each]
            if max(counts[name], default=0) > most:
                raise BatchError(
                    f"expected at most {most} boxes an image, got {max(counts[name])}; type "
                    f"Heads(..., most={max(counts[name])}), and fit again"
                )
            room = [pad(b, (0, 0) * (b.ndim - 1) + (0, most - len(b))) for b in each]
            empty = torch.zeros(0, most, *self.shapes.get(name, (1,)))
            padded[name] = torch.stack(room) if room else empty
        numbers = next(iter(counts.values()))
        if any(other != numbers for other in counts.values()):
            raise BatchError(
                f"expected as many boxes in each head of an image, got {counts}; type "
                "Monitor(..., outputs=lambda out: ...) to pick the same boxes of each"
            )
        device = next(iter(padded.values())).device
        lengths = torch.tensor(numbers, device=device, dtype=torch.int64)
        return {**padded, _PRESENT: torch.arange(most, device=device) < lengths[:, None]}

    def _checked(self, name: str, output: Any) -> Tensor:
        """Return a head's output with at least one axis for its numbers.

        Raises:
            BatchError: If it is not a tensor of numbers in floating point, with all its axes.
        """
        axes = 1 + (name in self.boxes)
        if not isinstance(output, Tensor) or not output.is_floating_point():
            got = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise BatchError(
                f"expected a tensor in floating point as head {name!r}, got {got}; name the "
                "output it is made of, as logits, or type most=... for lists of tensors"
            )
        if output.ndim < axes:
            raise BatchError(
                f"expected head {name!r} with the axes ({'B, Q' if axes > 1 else 'B,'}), "
                f"got shape {tuple(output.shape)}; keep them: outputs=lambda out: ..."
            )
        return output if output.ndim > axes else output.unsqueeze(-1)

    def _check_mask(self, mask: Any) -> None:
        """Refuse what does not say which places have a box.

        Raises:
            BatchError: If it is not a tensor of zeros and ones.
        """
        values = mask if isinstance(mask, Tensor) else torch.tensor(math.inf)
        strange = values[~((values == 0) | (values == 1) | values.isnan())]
        if strange.numel():
            got = (
                f"{float(strange[0]):.4g}" if isinstance(mask, Tensor) else type(mask).__name__
            )
            raise BatchError(
                f"expected a mask of booleans, or of 0 and 1, as {self._mask!r}, got {got}; "
                "type Monitor(..., outputs=lambda out: ...) to make it of a probability or a "
                f"class: {{**out, {self._mask!r}: out[{self._mask!r}] > 0.5}}"
            )

    def _record(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Keep the shapes of the heads of the first pass.

        Raises:
            BatchError: If a later pass has others.
        """
        if not self.shapes:
            self.shapes.update(shapes)
        if self.shapes != shapes:
            raise BatchError(
                f"expected heads of the shapes of the first pass, {self.shapes}, got {shapes}; "
                "where the number of boxes changes type boxes=...; for another model make "
                "another Monitor"
            )

    # --- the likelihood of that tensor ---

    def _parts(self, output: Tensor) -> Iterator[tuple[str, _Part]]:
        """Yield the heads of a flat output ``(B, d)``, in order."""
        start, count = 0, self.num_boxes(output.shape[1])
        present = self.mask(output).to(output.dtype) if self.boxes else None
        for name, likelihood in self.likelihoods.items():
            shape, of_boxes = self.shapes[name], name in self.boxes
            columns = slice(start, start + math.prod(shape) * (count if of_boxes else 1))
            samples = len(output) * (count if of_boxes else 1)
            part = output[:, columns].reshape(samples, *shape)
            yield name, _Part(likelihood, part, columns, present if of_boxes else None)
            start = columns.stop

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """See `Likelihood.factor`; ``p`` is the sum over heads and places for boxes.

        Returns:
            Rows ``(B, p, d)``, block diagonal; zero where there is no box.
        """
        blocks = []
        for _, part in self._parts(output):
            rows = part.likelihood.factor(part.output)
            if part.present is not None:
                rows = rows.view(*part.present.shape, *rows.shape[1:])
                rows = rows * part.present[:, :, None, None]
                # (B, boxes, rows, boxes, columns), zero for two different boxes
                rows = torch.diag_embed(rows.movedim(1, -1), dim1=1, dim2=3)
                rows = rows.flatten(3).flatten(1, 2)
            columns = part.columns
            blocks.append(pad(rows, (columns.start, output.shape[1] - columns.stop)))
        return torch.cat(blocks, 1)

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return the sum over heads, for each of the places where boxes may be."""
        return len(self.directions(shape[0])[0])

    def directions(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Return which head and which box each direction is of, ``(p,)`` each.

        Args:
            outputs: ``d``, of the flat output.

        Returns:
            Indices of heads, and of boxes: -1 for heads of the image.
        """
        boxes, heads = [], []
        count = self.num_boxes(outputs)
        for i, (name, likelihood) in enumerate(self.likelihoods.items()):
            of_each = likelihood.num_directions(self.shapes[name])
            places = torch.arange(count) if name in self.boxes else torch.tensor([-1])
            boxes.append(places.repeat_interleave(of_each))
            heads.append(torch.full_like(boxes[-1], i))
        return torch.cat(heads), torch.cat(boxes)

    def groups(self, shape: Sequence[int]) -> Tensor:
        """See `Likelihood.groups`.

        Returns:
            Heads one after the other, each with all places for boxes, ``(p,)``.
        """
        of_head, of_box = self.directions(shape[0])
        return of_head * max(1, self.num_boxes(shape[0])) + of_box.clamp_min(0)

    def check_output(self, output: Tensor) -> None:
        """See `Likelihood.check_output`; each head checks its own."""
        for _, part in self._parts(output):
            there = slice(None) if part.present is None else part.present.flatten() > 0
            part.likelihood.check_output(part.output[there])

    def curvature_times(
        self, output: Tensor, vectors: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        """See `Likelihood.curvature_times`.

        Returns:
            ``(B, q, d)``: head by head, box by box.
        """
        times = torch.zeros_like(vectors)
        for _, part in self._parts(output):
            these = vectors[:, :, part.columns]
            if part.present is None:
                times[:, :, part.columns] = part.likelihood.curvature_times(part.output, these)
                continue
            boxes = part.present.shape[1]
            of_boxes = these.view(*these.shape[:2], boxes, -1).transpose(1, 2)
            found = part.likelihood.curvature_times(part.output, of_boxes.flatten(0, 1))
            found = found.view_as(of_boxes) * part.present[:, :, None, None]
            times[:, :, part.columns] = found.transpose(1, 2).flatten(2)
        return times

    @property
    def closed(self) -> bool:
        """See `Likelihood.closed`."""
        return all(each.closed for each in self.likelihoods.values())

    def curvature_trace(self, output: Tensor) -> Tensor:
        """See `Likelihood.curvature_trace`.

        Returns:
            The sum over heads and boxes.
        """
        total = output.new_zeros(len(output), dtype=torch.float64)
        for _, part in self._parts(output):
            traces = part.likelihood.curvature_trace(part.output)
            if part.present is not None:
                traces = (traces.view(part.present.shape) * part.present).sum(1)
            total = total + traces
        return total

    def named(self) -> Heads:
        """Return the same heads, each with a row for each of its outputs."""
        named = replace(self, likelihoods={n: e.named() for n, e in self.likelihoods.items()})
        named.shapes.update(self.shapes)
        return named


@dataclass(frozen=True)
class _Picking:
    """Joins what a function of the model's result returns; see `Heads.picking`."""

    heads: Heads
    outputs: Callable[[Any], Any] | None

    def __call__(self, result: Any) -> Tensor:
        return self.heads.joined(result if self.outputs is None else self.outputs(result))


def _is_head(name: object, likelihood: object) -> bool:
    if not isinstance(name, str) or not isinstance(likelihood, Likelihood):
        return False
    return not (isinstance(likelihood, Heads) or likelihood.draws or likelihood.worst)


def as_likelihood(
    given: Likelihood | Mapping[str, Likelihood] | Sequence[Likelihood | None],
) -> Likelihood:
    """Return `Heads` for a mapping or a sequence of likelihoods; else what was given.

    `Heads` are copied: two monitors may be of models whose heads have other shapes.

    Args:
        given: What a user passes for a likelihood. In a sequence, None stands for an output
            that is not to be scored.
    """
    if isinstance(given, (list, tuple)):
        given = {str(i): each for i, each in enumerate(given) if each is not None}
    if isinstance(given, Mapping):
        return Heads(given)
    if not isinstance(given, Heads):
        return given  # type: ignore[return-value]  # checked with the other options
    heads = copy.copy(given)
    object.__setattr__(heads, "shapes", dict(given.shapes))
    return heads
