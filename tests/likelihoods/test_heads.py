"""The Fisher information of several heads: block diagonal, of each head's own."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draws import noise
from scodkit import Bernoulli, Categorical, Gaussian, Heads, HeteroscedasticGaussian, MonteCarlo
from scodkit.errors import BatchError, OptionError
from scodkit.likelihoods.heads import as_likelihood

BATCH, PLACES = 3, 4
PRESENT = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
LIKELIHOODS = {
    "class": Categorical(),
    "map": Categorical(class_dim=1),
    "box": HeteroscedasticGaussian(),
    "score": Bernoulli(),
    "angle": Gaussian(0.25),
}
OF_BOXES = ("class", "box", "score")
RESULT = {
    "class": noise(BATCH, PLACES, 3),
    "map": noise(BATCH, 2, 2),
    "box": noise(BATCH, PLACES, 4),
    "score": noise(BATCH, PLACES),
    "angle": noise(BATCH),
    "kept": PRESENT,
}


def dense(sample: int, heads: Heads) -> Tensor:
    """The Fisher of a sample, head by head and box by box, as block diagonal matrices."""
    blocks = []
    for name, likelihood in heads.likelihoods.items():
        output = RESULT[name][sample]
        boxes = output if name in heads.boxes else output[None]
        for place, theta in enumerate(boxes):
            rows = likelihood.factor(theta.reshape(1, *(theta.shape or (1,))))[0]
            there = not heads.boxes or name not in heads.boxes or heads.present is None
            blocks.append(rows.mT @ rows * float(there or PRESENT[sample, place]))
    if heads.present is not None:
        blocks.append(torch.zeros(PLACES, PLACES))
    return torch.block_diag(*blocks)


def heads_of(present: str | None) -> Heads:
    return Heads(LIKELIHOODS, boxes=OF_BOXES, present=present)


@pytest.mark.parametrize("named", [False, True], ids=["scored", "named"])
@pytest.mark.parametrize("present", [None, "kept"])
def test_the_fisher_is_block_diagonal(present: str | None, named: bool) -> None:
    heads = heads_of(present)
    flat = heads.joined(RESULT)
    scored = heads.named() if named else heads
    rows = scored.factor(flat)
    assert rows.shape == (BATCH, scored.num_directions(flat.shape[1:]), flat.shape[1])
    expected = torch.stack([dense(i, heads) for i in range(BATCH)])
    torch.testing.assert_close(rows.mT @ rows, expected, rtol=1e-10, atol=1e-12)
    assert scored.closed
    vectors = noise(BATCH, 5, flat.shape[1])
    torch.testing.assert_close(
        scored.curvature_times(flat, vectors), vectors @ expected, rtol=1e-10, atol=1e-12
    )
    traces = expected.diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(scored.curvature_trace(flat), traces, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("present", [None, "kept"])
def test_directions_know_their_head_and_box(present: str | None) -> None:
    heads = heads_of(present)
    flat = heads.joined(RESULT)
    rows = heads.factor(flat)
    of_head, of_box = heads.directions(flat.shape[1])
    assert len(of_head) == len(of_box) == rows.shape[1]
    changed = dict(RESULT)
    for i, name in enumerate(heads.likelihoods):
        for box in range(PLACES) if name in OF_BOXES else [-1]:
            changed[name] = RESULT[name].clone()
            if box < 0:
                changed[name] += 1.0
            else:
                changed[name][:, box] += noise(*changed[name][:, box].shape, seed=7)
            moved = (heads.joined(changed) != flat).any(0)
            theirs = rows[:, (of_head == i) & (of_box == box)]
            assert not theirs[:, :, ~moved].any()
        changed[name] = RESULT[name]


def test_outputs_come_back_by_name() -> None:
    heads = heads_of("kept")
    shown = heads.shown(heads.joined(RESULT))
    assert list(shown) == [*LIKELIHOODS, "kept"]
    assert torch.equal(shown["kept"], PRESENT)
    assert torch.equal(shown["map"], RESULT["map"])
    assert torch.equal(shown["box"], RESULT["box"] * PRESENT[:, :, None])
    assert shown["score"].shape == (BATCH, PLACES, 1)


def test_what_is_at_a_place_without_a_box_does_not_matter() -> None:
    heads, other = heads_of("kept"), dict(RESULT)
    other["box"] = torch.where(PRESENT[:, :, None], RESULT["box"], torch.nan)
    assert torch.equal(heads.joined(RESULT), heads.joined(other))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64])
def test_a_mask_may_be_of_numbers(dtype: torch.dtype) -> None:
    mask = PRESENT.to(dtype)
    assert torch.equal(
        heads_of("kept").joined({**RESULT, "kept": mask}), heads_of("kept").joined(RESULT)
    )


def test_lists_are_padded() -> None:
    heads = Heads(LIKELIHOODS, boxes=OF_BOXES, most=PLACES)
    lists: dict[str, Any] = dict(RESULT)
    for name in OF_BOXES:
        lists[name] = [each[there] for each, there in zip(RESULT[name], PRESENT, strict=True)]
    flat = heads.joined(lists)
    assert heads.mask(flat).sum(1).tolist() == PRESENT.sum(1).tolist()
    shown = heads.shown(flat)
    assert torch.equal(shown["box"][0, :3], lists["box"][0])
    assert not shown["box"][0, 3:].any()
    assert torch.equal(shown["present"], heads.mask(flat))
    empty = {name: [] if name in OF_BOXES else each[:0] for name, each in lists.items()}
    assert heads.joined(empty).shape == (0, flat.shape[1])


def test_the_number_of_places_may_change() -> None:
    heads = heads_of(None)
    heads.joined(RESULT)
    fewer = {n: each[:, :2] if n in OF_BOXES else each for n, each in RESULT.items()}
    assert heads.shown(heads.joined(fewer))["class"].shape == (BATCH, 2, 3)


def test_forms_of_results() -> None:
    first, second = noise(2, 3), noise(2, 1)
    pair = namedtuple("pair", ("a", "b"))
    flat = torch.cat([first, second], 1)
    of_tuple = as_likelihood([Gaussian(), None, Bernoulli()])
    assert torch.equal(of_tuple.joined((first, noise(2, 9), second)), flat)
    for result in (pair(first, second), SimpleNamespace(a=first, b=second)):
        assert torch.equal(Heads({"a": Gaussian(), "b": Bernoulli()}).joined(result), flat)
    assert torch.equal(Heads({"0": Gaussian()}).joined(first), first)


def test_probabilities_are_recognised_head_by_head() -> None:
    shares = noise(4, PLACES, 3).softmax(-1)
    heads = Heads({"class": Categorical()}, boxes=("class",))
    with pytest.raises(BatchError, match="got probabilities"):
        heads.check_output(heads.joined({"class": shares}))


# --- errors --------------------------------------------------------------------------------

GAUSSIAN = Gaussian()


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Heads({}), r"a likelihood.*for each head.*got none; type \{\"class\""),
        (lambda: Heads({"a": "gaussian"}), r"got 'a': 'gaussian'; type \{\"class\""),
        (lambda: Heads({"a": MonteCarlo(str)}), "without random draws"),
        (lambda: Heads({"a": Heads({"b": GAUSSIAN})}), "for each head"),
        (lambda: Heads({"a": GAUSSIAN}, boxes=("b",)), r"got \['b'\]; type boxes=\('a',\)"),
        (lambda: Heads({"a": GAUSSIAN}, present="kept"), r"heads of boxes, got none"),
        (lambda: Heads({"a": GAUSSIAN}, most=4), r"heads of boxes, got none"),
        (lambda: Heads({"a": GAUSSIAN}, boxes=("a",), most=0), "most >= 1.*got 0"),
        (
            lambda: Heads({"a": GAUSSIAN}, boxes=("a",), present="kept", most=2),
            "present=.* for tensors with a mask, or most=",
        ),
        (
            lambda: Heads({"present": GAUSSIAN}, boxes=("present",), most=2),
            "a mask beside the heads",
        ),
    ],
)
def test_options_are_checked(build: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        build()


BOX = {"box": GAUSSIAN, "class": Categorical()}


@pytest.mark.parametrize(
    ("options", "result", "says"),
    [
        (
            {},
            {"boxes": noise(2, 4)},
            r"returns box, class, got boxes, without box, class;.*out",
        ),
        ({}, {"box": noise(2, 4), "class": noise(3, 4)}, r"same samples.*box: \(2, 4\)"),
        ({}, {"box": [1.0], "class": noise(2, 4)}, r"'box', got list;.*most="),
        ({}, {"box": torch.ones(2, 1).long(), "class": noise(2, 4)}, "'box', got torch.int64"),
        ({"boxes": ("box",)}, {"box": noise(2), "class": noise(2, 4)}, r"axes \(B, Q\)"),
        (
            {"boxes": ("box", "class")},
            {"box": noise(2, 5, 4), "class": noise(2, 4, 3)},
            r"samples and boxes, got box: \(2, 5, 4\), class: \(2, 4, 3\)",
        ),
        (
            {"boxes": ("box",), "present": "kept"},
            {"box": noise(2, 5, 4), "class": noise(2, 3), "kept": torch.ones(2, 4)},
            r"kept: \(2, 4\)",
        ),
        *(
            (
                {"boxes": ("box",), "present": "kept"},
                {"box": noise(2, 5, 4), "class": noise(2, 3), "kept": mask},
                rf"booleans, or of 0 and 1, as 'kept', got {got}; .*out\['kept'\] > 0.5",
            )
            for mask, got in [
                (torch.full((2, 5), 0.25), "0.25"),
                (torch.tensor([[1, -1, 1, 1, 0]] * 2), "-1"),
                ([[True] * 5] * 2, "list"),
            ]
        ),
        (
            {"boxes": ("box", "class"), "most": 3},
            {"box": [noise(4, 4)], "class": [noise(4, 3)]},
            r"at most 3 boxes.*got 4; type Heads\(\.\.\., most=4\)",
        ),
        (
            {"boxes": ("box", "class"), "most": 3},
            {"box": [noise(2, 4)], "class": [noise(1, 3)]},
            r"as many boxes in each head",
        ),
        (
            {"boxes": ("box", "class"), "most": 3},
            {"box": noise(1, 2, 4), "class": noise(1, 2, 3)},
            r"a list with a tensor for each image as 'box', got Tensor; for tensors leave out",
        ),
    ],
)
def test_results_of_another_form_are_refused(
    options: dict[str, Any], result: Any, says: str
) -> None:
    with pytest.raises(BatchError, match=says):
        Heads(BOX, **options).joined(result)


def test_other_shapes_than_before_are_refused() -> None:
    heads = Heads({"a": GAUSSIAN, "b": GAUSSIAN})
    heads.joined({"a": noise(2, 3), "b": noise(2, 1)})
    with pytest.raises(BatchError, match=r"'a': \(3,\).*got.*'a': \(1,\).*another Monitor"):
        heads.joined({"a": noise(2, 1), "b": noise(2, 3)})
    with pytest.raises(BatchError, match="whose shapes are known"):
        Heads({"a": GAUSSIAN}).factor(noise(2, 3))
