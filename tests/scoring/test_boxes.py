"""Scores of boxes and heads, against dense Jacobians of one box at a time and dense algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from detectors import (
    HELDOUT,
    LIKELIHOODS,
    OF_BOXES,
    QUERIES,
    TEST,
    TRAIN,
    OneOutput,
    detector,
    monitor_of,
)
from oracles import dense_factors, dense_fisher, dense_score
from scodkit import Categorical, Heads, Monitor, Projected
from scodkit.errors import BatchError, OptionError
from scodkit.model.inputs import Inputs

FORMS = ["all", "mask", "lists"]
pytestmark = pytest.mark.filterwarnings(
    # lists of other lengths in each image can be followed by plain autograd only
    "ignore:Detector is left to LoopEngine:scodkit.errors.EngineFallbackWarning"
)


def rows_of(x: Tensor, form: str) -> dict[tuple[str, int | None], Tensor]:
    """``L^T`` of each head and box, ``(B, p, N)``, zero where there is no box."""
    model = detector("mask")  # the same weights
    kept = model(x)["kept"] if form != "all" else torch.ones(len(x), QUERIES)
    rows = {}
    for name, likelihood in LIKELIHOODS.items():
        for box in range(QUERIES) if name in OF_BOXES else [None]:
            one = OneOutput(model, name, box)
            rows[name, box] = dense_factors(one, Inputs((x,), {}), likelihood)
            if box is not None:
                rows[name, box] *= kept[:, box, None, None]
    return rows


def expected(form: str) -> dict[tuple[str, int | None], Tensor]:
    """The score of each head and box of the test inputs, ``(B,)``."""
    known = torch.cat(list(rows_of(TRAIN, form).values()), 1)
    fisher = dense_fisher(known)
    return {
        which: dense_score(fisher, len(TRAIN), rows, 1.0)
        for which, rows in rows_of(TEST, form).items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_dense_algebra(form: str) -> None:
    monitor, dense = monitor_of(form), expected(form)
    found, explained = monitor.boxes(TEST), monitor.explain(TEST)
    for name in OF_BOXES:
        each = torch.stack([dense[name, box] for box in range(QUERIES)], 1)
        if form == "lists":  # the boxes there are come first
            each = each.gather(1, (each == 0).long().argsort(dim=1, stable=True))
        torch.testing.assert_close(found.heads[name], each, rtol=1e-8, atol=1e-10)
    boxes = sum(found.heads.values())
    torch.testing.assert_close(found.score, boxes, rtol=1e-12, atol=0.0)
    whole = torch.stack(list(dense.values())).sum(0)
    torch.testing.assert_close(monitor.score(TEST), whole, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(
        found.score.sum(1) + dense["scene", None], monitor.score(TEST), rtol=1e-8, atol=1e-10
    )
    assert explained.heads is not None
    assert explained.heads.names == tuple(LIKELIHOODS)
    for i, name in enumerate(LIKELIHOODS):
        of_head = sum(score for (head, _), score in dense.items() if head == name)
        torch.testing.assert_close(explained.heads.values[:, i], of_head, rtol=1e-8, atol=1e-10)


def test_lists_score_as_masks_do() -> None:
    lists, mask = monitor_of("lists").boxes(TEST), monitor_of("mask").boxes(TEST)
    assert [len(each) for each in lists.lists()] == [len(each) for each in mask.lists()]
    assert 0 < int(mask.present.sum()) < mask.present.numel()
    for one, other in zip(lists.lists(), mask.lists(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    assert (lists.score[~lists.present] == 0).all()


def test_pieces_score_as_the_whole() -> None:
    whole, cut = monitor_of("mask"), monitor_of("mask")
    cut.memory_budget = 1  # a row at a time
    one, other = whole.boxes(TEST), cut.boxes(TEST)
    torch.testing.assert_close(one.score, other.score, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cut.score(TEST), whole.score(TEST), rtol=1e-10, atol=1e-12)


def test_a_batch_scores_as_its_images() -> None:
    monitor = monitor_of("mask")
    whole = monitor.boxes(TEST)
    for i in torch.randperm(len(TEST), generator=torch.Generator().manual_seed(0)).tolist():
        alone = monitor.boxes(TEST[i : i + 1])
        torch.testing.assert_close(alone.score[0], whole.score[i], rtol=1e-10, atol=1e-12)


class Turned(nn.Module):
    """A detector whose queries come in another order, with places that nobody is at."""

    def __init__(self, model: nn.Module, order: list[int], places: int) -> None:
        super().__init__()
        self.model, self.order, self.places = model, order, places

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.model(x)
        for name in (*OF_BOXES, "kept"):
            tensor = found[name][:, self.order]
            anything = torch.full_like(tensor[:, :1], 1.0).expand(
                -1, self.places, *tensor.shape[2:]
            )
            if name == "kept":
                anything = torch.zeros_like(anything)
            found[name] = torch.cat([tensor, anything], 1)
        return found


def test_order_and_padding_do_not_matter() -> None:
    order = [2, 0, 3, 1]
    plain = monitor_of("mask")
    turned = Monitor(Turned(detector("mask"), order, 2), plain.likelihood, rank=300)
    turned.fit([TRAIN], progress=False)
    one, other = plain.boxes(TEST), turned.boxes(TEST)
    assert other.score.shape == (len(TEST), QUERIES + 2)
    torch.testing.assert_close(one.score[:, order], other.score[:, :QUERIES], rtol=1e-6, atol=0)
    assert (other.score[:, QUERIES:] == 0).all()
    torch.testing.assert_close(turned.score(TEST), plain.score(TEST), rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_boxes_have_what_projections_leave_out(form: str) -> None:
    monitor = monitor_of(form, parameters=Projected(rank=2))
    found = monitor.boxes(TEST)
    model = detector("mask")
    kept = model(TEST)["kept"] if form != "all" else torch.ones(len(TEST), QUERIES)
    fresh = {  # without any data: eps^2 |L|^2
        which: rows.square().sum((1, 2)) for which, rows in rows_of(TEST, form).items()
    }
    monitor.prior_scale = 1e-7  # data adds nothing
    prior = monitor.boxes(TEST).score * 1e14
    each = torch.stack([sum(fresh[n, q] for n in OF_BOXES) for q in range(QUERIES)], 1)
    if form == "lists":
        each = each.gather(1, (~kept).long().argsort(dim=1, stable=True))
    torch.testing.assert_close(prior, each, rtol=1e-8, atol=1e-10)
    monitor.prior_scale = 1.0
    scene = monitor.explain(TEST).heads
    assert scene is not None
    whole = found.score.sum(1) + scene.values[:, 2]
    torch.testing.assert_close(whole, monitor.score(TEST), rtol=1e-8, atol=1e-10)


def test_an_image_without_boxes_has_nothing_to_doubt() -> None:
    likelihoods = {name: LIKELIHOODS[name] for name in OF_BOXES}
    heads = Heads(likelihoods, boxes=OF_BOXES, present="kept")
    monitor = Monitor(detector("mask"), heads, rank=50).fit([TRAIN], progress=False)
    monitor.calibrate([HELDOUT], progress=False)
    found = monitor.boxes(HELDOUT)
    empty = ~found.present.any(1)
    assert 0 < int(empty.sum()) < len(HELDOUT)
    scored = monitor(HELDOUT)
    assert (scored.score[empty] == 0).all()
    assert scored.p_value is not None
    assert found.p_value is not None
    assert (scored.p_value[empty] == 1).all()
    assert (found.p_value[~found.present] == 1).all()
    assert (found.worst[empty] == 0).all()


def test_an_image_that_is_not_finite_is_alarming_throughout() -> None:
    monitor = monitor_of("mask").calibrate([HELDOUT], progress=False)
    broken = TEST.clone()
    broken[2, 0] = torch.nan
    found, before = monitor.boxes(broken), monitor.boxes(TEST)
    assert (found.score[2] == torch.inf).all()
    assert found.p_value is not None
    assert (found.p_value[2] == 1 / (len(HELDOUT) + 1)).all()
    others = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(found.score[others], before.score[others])


def test_p_values_are_those_of_the_worst_held_out_boxes() -> None:
    monitor = monitor_of("mask").calibrate([HELDOUT[:25], HELDOUT[25:]], progress=False)
    found, worst = monitor.boxes(TEST), monitor.boxes(HELDOUT).worst
    above = (worst[None, None, :] >= found.score[:, :, None]).sum(2)
    assert found.p_value is not None
    torch.testing.assert_close(found.p_value, (1 + above).double() / (len(HELDOUT) + 1))


@pytest.mark.parametrize("rate", [0.1, 0.25])
def test_few_good_images_have_any_box_flagged(rate: float) -> None:
    """Over splits of one pool, on average: images in which any box is flagged."""
    monitor = monitor_of("mask")
    pool = torch.randn(400, 3, generator=torch.Generator().manual_seed(9)).double()
    found = monitor.boxes(pool)
    generator, shares = torch.Generator().manual_seed(0), []
    for _ in range(300):
        order = torch.randperm(len(pool), generator=generator)
        held_out, new = order[:60], order[60:]
        worst = found.worst[held_out].sort().values
        above = len(worst) - torch.searchsorted(worst, found.score[new])
        p_value = (1 + above) / (len(worst) + 1)
        shares.append(float((p_value <= rate).any(1).double().mean()))
    mean = sum(shares) / len(shares)
    spread = torch.tensor(shares).std().item() / len(shares) ** 0.5
    assert rate - 1.5 / 61 - 4 * spread < mean <= rate + 4 * spread


def test_groups_are_of_images() -> None:
    monitor = monitor_of("mask")
    by_count = lambda output: output["kept"].sum(1).clamp_max(1)  # noqa: E731
    monitor.calibrate([HELDOUT], by=by_count, progress=False)
    found, held_out = monitor.boxes(TEST), monitor.boxes(HELDOUT)
    assert found.p_value is not None
    same = by_count(found.output)[:, None] == by_count(held_out.output)[None, :]
    above = (held_out.worst >= found.score[:, :, None]) & same[:, None, :]
    expected_p = (1 + above.sum(2)).double() / (1 + same.sum(1, keepdim=True))
    torch.testing.assert_close(found.p_value, expected_p)


def test_loaders_and_arrays_come_back_in_kind() -> None:
    monitor = monitor_of("mask").calibrate([HELDOUT], progress=False)
    whole, parts = (
        monitor.boxes(TEST),
        monitor.boxes(iter([TEST[:3], TEST[3:]]), progress=False),
    )
    torch.testing.assert_close(parts.score, whole.score, rtol=1e-10, atol=1e-12)
    assert parts.output["box"].shape == (len(TEST), QUERIES, 2)
    arrays = monitor.boxes(TEST.numpy())
    assert type(arrays.score).__name__ == type(arrays.output["box"]).__name__ == "ndarray"
    assert type(monitor(TEST.numpy()).output["scene"]).__name__ == "ndarray"


def test_boxes_of_a_model_without_any_are_refused() -> None:
    plain = Monitor(detector("mask"), {"scene": Categorical()}, rank=5)
    plain.fit([TRAIN], progress=False)
    with pytest.raises(OptionError, match=r"a monitor of boxes.*boxes=\(\"class\", \"box\"\)"):
        plain.boxes(TEST)
    with pytest.raises(BatchError, match="got none"):
        monitor_of("mask").boxes(TEST[:0])
