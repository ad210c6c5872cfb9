"""Monitors of several heads do what those of one output do, or say why not."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import together
from detectors import HEADS, HELDOUT, QUERIES, TEST, TRAIN, OneOutput, detector, monitor_of
from engines import close
from oracles import dense_factors, dense_fisher, dense_score
from scodkit import (
    Categorical,
    Fused,
    Gaussian,
    Heads,
    Monitor,
    Task,
    predicted_class,
)
from scodkit.baselines import MaxSoftmax
from scodkit.cli.loading import load_monitor
from scodkit.errors import BatchError, CorruptArtifactError, EngineFallbackWarning, OptionError
from scodkit.model.inputs import Inputs
from scodkit.numerics import artifact
from scodkit.report import ScoredSet
from scodkit.sharded import ShardedMonitor
from scodkit.sketch import Exact


class TwoHeads(nn.Module):
    """A class and an angle, as a dict or as a tuple."""

    def __init__(self, as_tuple: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.body, self.name, self.angle = nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(5, 1)
        for weight in self.parameters():
            nn.init.normal_(weight, generator=generator)
        self.as_tuple = as_tuple
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        features = self.body(x).tanh()
        found = {"class": self.name(features), "angle": self.angle(features), "body": features}
        return tuple(found.values()) if self.as_tuple else found


class Side(nn.Module):
    """Both heads beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TwoHeads()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.model(x)
        return torch.cat([found["class"], found["angle"]], 1)


BY_NAME = {"class": Categorical(), "angle": Gaussian(0.1)}


def two_heads(**options: Any) -> Monitor:
    monitor = Monitor(TwoHeads(), BY_NAME, rank=100, sketch=Exact(), **options)
    return monitor.fit([TRAIN], progress=False)


def test_the_score_is_the_sum_over_heads() -> None:
    parts = {}
    for name, likelihood in BY_NAME.items():
        head = OneOutput(TwoHeads(), name, None)
        known = dense_factors(head, Inputs((TRAIN,), {}), likelihood)
        parts[name] = known, dense_factors(head, Inputs((TEST,), {}), likelihood)
    fisher = dense_fisher(torch.cat([known for known, _ in parts.values()], 1))
    scores = [dense_score(fisher, len(TRAIN), rows, 1.0) for _, rows in parts.values()]
    monitor = two_heads()
    close(monitor.score(TEST), sum(scores), atol=1e-10)
    shares = monitor.explain(TEST).heads
    assert shares is not None
    torch.testing.assert_close(shares.values, torch.stack(scores, 1), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(shares.values.sum(1), monitor.explain(TEST).score)


def test_a_tuple_is_as_a_dict() -> None:
    of_tuple = Monitor(TwoHeads(as_tuple=True), (Categorical(), Gaussian(0.1), None), rank=100)
    of_tuple.fit([TRAIN], progress=False)
    assert list(of_tuple(TEST).output) == ["0", "1"]
    close(of_tuple.score(TEST), two_heads().score(TEST), atol=1e-9)


def test_outputs_come_by_name() -> None:
    output = two_heads()(TEST).output
    assert list(output) == ["class", "angle"]  # the body is not scored
    close(output["angle"], TwoHeads()(TEST)["angle"])


def test_a_function_may_pick_the_heads() -> None:
    def picked(found: dict[str, Any]) -> dict[str, Any]:
        return {"angle": found["angle"], "class": found["class"]}

    monitor = Monitor(TwoHeads(), BY_NAME, rank=100, outputs=picked).fit(
        [TRAIN], progress=False
    )
    close(monitor.score(TEST), two_heads().score(TEST), atol=1e-9)


def test_explanations_are_in_words() -> None:
    monitor = two_heads().calibrate([HELDOUT], progress=False)
    told = monitor.explain(TEST, classes=["cat", "dog", "cow"], saliency=True)
    assert told.directions.names == (
        "class: cat",
        "class: dog",
        "class: cow",
        "angle: output 0",
    )
    assert "class: " in told.predictions[0]
    assert "; angle: " in told.predictions[0]
    assert "heads: " in told.words(0)
    assert set(told.output) == {"class", "angle"}
    assert told.saliency is not None
    told.plot(0)
    boxes = monitor_of("mask").explain(TEST)
    assert boxes.directions.names[0] == "box 0, class: class 0"
    assert boxes.predictions[0].endswith(("box", "boxes"))


def test_groups_see_the_heads() -> None:
    def by_class(output: dict[str, Any]) -> torch.Tensor:
        return predicted_class(output["class"])

    monitor = two_heads().calibrate([HELDOUT], by=by_class, progress=False)
    assert monitor.calibration is not None
    assert monitor.calibration.groups is not None
    groups = by_class(TwoHeads()(HELDOUT))
    assert monitor.calibration.groups.tolist() == sorted(groups.tolist())
    assert monitor(TEST).p_value is not None
    assert monitor.flag(TEST, 0.5).shape == (len(TEST),)


def test_bounds_hold_the_exact_score() -> None:
    exact = two_heads().score(TEST)
    few = Monitor(TwoHeads(), BY_NAME, rank=8).fit([TRAIN], progress=False)
    bounds = few.certify(TEST)
    assert (bounds.lower <= exact * (1 + 1e-9)).all()
    assert (exact <= bounds.upper * (1 + 1e-9)).all()


def test_products_fit_what_rows_fit() -> None:
    rows = Monitor(detector("mask"), HEADS["mask"], rank=40).fit([TRAIN], progress=False)
    products = Monitor(detector("mask"), HEADS["mask"], rank=40)
    products.fit([TRAIN], progress=False, products=True)
    torch.testing.assert_close(products.score(TEST), rows.score(TEST), rtol=1e-6, atol=1e-9)


def test_parts_of_the_data_add_up() -> None:
    def fitted(x: torch.Tensor) -> Monitor:
        monitor = Monitor(detector("mask"), HEADS["mask"], rank=40)
        return monitor.fit([x], progress=False)

    whole = fitted(TRAIN).score(TEST)
    merged = fitted(TRAIN[:12]).merge(fitted(TRAIN[12:]))
    updated = fitted(TRAIN[:12]).update([TRAIN[12:]], progress=False)
    for monitor in (merged, updated):
        torch.testing.assert_close(monitor.score(TEST), whole, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("form", HEADS)
@pytest.mark.filterwarnings(
    "ignore:Detector is left to LoopEngine:scodkit.errors.EngineFallbackWarning"
)
def test_a_file_holds_heads_and_boxes(form: str, path: Path) -> None:
    monitor = monitor_of(form).calibrate([HELDOUT], progress=False)
    monitor.save(path)
    loaded = Monitor.load(path, detector(form))
    assert loaded.likelihood == monitor.likelihood
    one, other = monitor.boxes(TEST), loaded.boxes(TEST)
    assert torch.equal(one.score, other.score)
    assert one.p_value is not None
    assert other.p_value is not None
    assert torch.equal(one.p_value, other.p_value)
    assert torch.equal(monitor.score(TEST), loaded.score(TEST))
    again = Monitor.load(path, detector(form), likelihood=HEADS[form])
    assert torch.equal(again.score(TEST), loaded.score(TEST))
    with pytest.raises(OptionError, match=r"several heads \(class, box, scene\); use it in Py"):
        load_monitor(path, detector(form), None)


def test_heads_may_be_named_in_another_order_when_a_file_is_loaded(path: Path) -> None:
    monitor = two_heads()
    monitor.save(path)
    turned = Heads(dict(reversed(BY_NAME.items())))
    loaded = Monitor.load(path, TwoHeads(), likelihood=turned)
    assert torch.equal(loaded.score(TEST), monitor.score(TEST))
    assert torch.equal(loaded(TEST).output["angle"], monitor(TEST).output["angle"])


def test_a_file_with_other_shapes_is_refused(path: Path) -> None:
    monitor_of("mask").save(path)
    header, tensors = artifact.read(path, "monitor")
    for heads in ({"class": [3]}, {}):
        changed = {
            name: value for name, value in header.items() if name not in ("kind", "format")
        }
        artifact.write(path, "monitor", {**changed, "heads": heads}, tensors)
        with pytest.raises(CorruptArtifactError, match="the shapes of class, box, scene"):
            Monitor.load(path, detector("mask"))


def test_groups_are_asked_about_when_a_file_is_loaded(path: Path) -> None:
    def count(output: dict[str, Any]) -> torch.Tensor:
        return output["kept"].sum(1)

    monitor = monitor_of("mask").calibrate([HELDOUT], by=count, progress=False)
    monitor.save(path)
    assert Monitor.load(path, detector("mask"), by=count).calibration is not None


def test_copies_are_monitors_of_their_own() -> None:
    monitor = monitor_of("mask").calibrate([HELDOUT], progress=False)
    close(copy.deepcopy(monitor).boxes(TEST).score, monitor.boxes(TEST).score)


def test_two_models_may_share_a_likelihood() -> None:
    heads = Heads({"0": Gaussian()})
    for width in (1, 2):
        monitor = Monitor(nn.Linear(3, width).double(), heads, rank=3)
        assert monitor.fit([TRAIN], progress=False).score(TEST).shape == (len(TEST),)
    assert not heads.shapes


def test_plans_and_evidence_and_self_tests_work() -> None:
    monitor = monitor_of("mask")
    assert monitor.plan([TRAIN]).directions == QUERIES * 4 + 1
    assert monitor.selftest(TEST).ok
    assert monitor.evidence(TEST).unexplained_share.shape == (len(TEST),)
    assert monitor.features(TEST).shape[:2] == (len(TEST), QUERIES * 5 + 2)
    assert "nothing looks wrong" in str(monitor.summary(TEST))
    assert monitor.score(TEST[:0]).shape == (0,)
    assert monitor(TEST[:0]).output["box"].shape == (0, QUERIES, 2)


def test_weights_may_be_divided() -> None:
    sharded = ShardedMonitor(TwoHeads(), BY_NAME, rank=100).fit([TRAIN], progress=False)
    close(sharded.score(TEST), two_heads().score(TEST), atol=1e-9)


def _fit_the_first_alone(rank: int, _: int, folder: Path) -> None:
    """The second process has no data, and scores what the first has fitted."""
    monitor = Monitor(detector("mask"), HEADS["mask"], rank=300, sketch=Exact())
    monitor.fit([TRAIN] if rank == 0 else [], progress=False)
    torch.save(monitor.boxes(TEST).score, folder / f"scores.{rank}")


@pytest.mark.slow  # a process group
def test_a_process_without_data_learns_the_shapes(tmp_path: Path) -> None:
    together.run(2, _fit_the_first_alone, tmp_path)
    for rank in range(2):
        close(torch.load(tmp_path / f"scores.{rank}"), monitor_of("mask").boxes(TEST).score)


@pytest.mark.slow  # compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_a_recording_scores_the_same() -> None:
    monitor = monitor_of("mask")
    before = monitor(TEST)
    after = monitor.compile(TEST)(TEST)
    close(after.score, before.score, atol=1e-10)
    close(after.output["box"], before.output["box"])


# --- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Monitor(TwoHeads(), BY_NAME, task=Task(lambda out: out)), "no task for sev"),
        (lambda: Fused(TwoHeads(), BY_NAME), r"likelihood of one output.*outputs=lambda"),
        (
            lambda: MaxSoftmax(TwoHeads(), Heads(BY_NAME)),
            "for MaxSoftmax, got those of several heads",
        ),
        (lambda: ScoredSet.of(two_heads(), "new", TEST, known=True), "one output for a report"),
        (lambda: Monitor(TwoHeads(), {}), "a likelihood.*for each head"),
        (
            lambda: Monitor(TwoHeads(), "class"),
            "or {'class': Categorical\\(\\), ...} for heads",
        ),
    ],
)
def test_what_heads_are_not_for_is_refused(build: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        build()


def test_a_missing_head_is_named() -> None:
    monitor = Monitor(TwoHeads(), {"class": Categorical(), "pose": Gaussian()})
    with pytest.raises(
        BatchError, match=r"returns class, pose, got class, angle, body, without pose; name"
    ):
        monitor.fit([TRAIN], progress=False)


def test_one_likelihood_for_several_heads_is_refused() -> None:
    with pytest.raises(BatchError, match=r"got dict; .*give each a likelihood.*'class': Cat"):
        Monitor(TwoHeads(), Categorical()).fit([TRAIN], progress=False)


def test_too_many_boxes_are_refused() -> None:
    heads = replace(HEADS["lists"], most=2)
    with pytest.raises(BatchError, match=r"at most 2 boxes an image, got 4; type Heads"):
        Monitor(detector("lists"), heads).fit([TRAIN], progress=False)


def test_lists_say_that_they_are_slow() -> None:
    with pytest.warns(EngineFallbackWarning, match="left to LoopEngine"):
        Monitor(detector("lists"), HEADS["lists"], rank=5).fit([TRAIN], progress=False)


def test_many_variables_of_a_head_are_one_box_each() -> None:
    """Positions of a map, as boxes, score as the map does."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (4, 2))).double()
    nn.init.normal_(net[0].weight, generator=torch.Generator().manual_seed(1))
    of_map = Monitor(net, Categorical(class_dim=-1), rank=50).fit([TRAIN], progress=False)
    boxes = Heads({"0": Categorical()}, boxes=("0",))
    of_boxes = Monitor(net, boxes, rank=50).fit([TRAIN], progress=False)
    close(of_boxes.score(TEST), of_map.score(TEST), atol=1e-9)
    close(of_boxes.boxes(TEST).score.sum(1), of_map.score(TEST), atol=1e-9)
