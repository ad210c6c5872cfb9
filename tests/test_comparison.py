"""Comparisons of methods, against scikit-learn, the methods' own scores and plain counting."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scodkit
from scodkit import Categorical, Fused, Monitor, compare, metrics
from scodkit.baselines import KNN, DeepEnsemble, Energy, MaxSoftmax
from scodkit.errors import BatchError, EmptyLoaderError, NotFittedError, OptionError


def drawn(seed: int = 0, ties: bool = False) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    known, near, far = draw.normal(size=90), draw.normal(1, 1, 60), draw.normal(3, 2, 150)
    if ties:
        known, near, far = ((2 * part).round() for part in (known, near, far))
    return known, {"near": near, "far": far}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_figures_are_those_of_scikit_learn(seed: int, ties: bool) -> None:
    known, unknown = drawn(seed, ties)
    found = compare({"mine": (known, unknown)}, resamples=20).separations["mine"]
    assert list(found) == ["near", "far", "pooled"]
    for name, theirs in {**unknown, "pooled": np.concatenate(list(unknown.values()))}.items():
        truth, both = np.repeat([0, 1], [90, len(theirs)]), np.append(known, theirs)
        weights = np.repeat([1 / 90, 1 / len(theirs)], [90, len(theirs)])
        expected = average_precision_score(truth, both, sample_weight=weights)
        false, true, _ = roc_curve(truth, both, drop_intermediate=False)
        assert found[name].auroc == pytest.approx(roc_auc_score(truth, both))
        assert found[name].aupr == pytest.approx(expected)
        assert found[name].fpr95 == pytest.approx(false[np.argmax(true >= 0.95 - 1e-12)])


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: torch.from_numpy(x),
        lambda x: torch.from_numpy(x).requires_grad_(),
        list,
        lambda x: x.astype(object).astype(np.float64)[::-1][::-1],
    ],
)
def test_scores_of_any_kind_have_the_same_figures(kind) -> None:
    known, unknown = drawn()
    there = {name: kind(part) for name, part in unknown.items()}
    found = compare({"a": (known, unknown), "b": (kind(known), there)}, resamples=20)
    assert found.separations["a"] == found.separations["b"]
    assert metrics.separation(kind(known), kind(unknown["far"])) == metrics.separation(
        known, unknown["far"]
    )


def test_scores_in_half_precision_and_infinite_ones() -> None:
    known = torch.tensor([0.0, 1.0, 2.0], dtype=torch.bfloat16)
    found = compare({"a": (known, torch.tensor([math.inf, 3.0]))}, resamples=20)
    assert found.separations["a"]["unknown"].auroc == 1.0


# --- A real network ------------------------------------------------------------------------


class Digits:
    """A small network that knows the digits 0-4, data for it, and fitted methods."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
        known = y < 5
        self.train, self.heldout, self.test = x[known].split([500, 200, 201])
        self.labels, self.novel = y[known][:500], x[~known]
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))
        optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.net(self.train), self.labels).backward()
            optimizer.step()
        likelihood = Categorical()
        self.methods = {
            "SCOD": Monitor(self.net, likelihood, 20).fit(self.train, progress=False),
            "Fused": Fused(self.net, likelihood).fit(self.train, progress=False),
            "KNN": KNN(self.net, likelihood).fit(self.train, progress=False),
            "Energy": Energy(self.net, likelihood),
        }
        self.methods["Fused"].calibrate(self.heldout, progress=False)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits()


@pytest.fixture(scope="module")
def comparison(digits: Digits) -> scodkit.Comparison:
    noise = torch.rand(50, 64, generator=torch.Generator().manual_seed(0))
    unknown = {"digits 5-9": digits.novel, "noise": noise}
    methods = {**digits.methods, "margin": lambda x: -digits.net(x).amax(1)}
    return compare(methods, known=digits.test, unknown=unknown, resamples=100, progress=False)


def test_a_comparison_is_of_the_methods_own_scores(digits, comparison) -> None:
    assert list(comparison.scores) == [*digits.methods, "margin"]
    for name, method in digits.methods.items():
        known, novel = method.score(digits.test), method.score(digits.novel)
        scores = comparison.scores[name]
        np.testing.assert_allclose(scores.known, known.double(), rtol=1e-4)
        np.testing.assert_allclose(scores.unknown["digits 5-9"], novel.double(), rtol=1e-4)
        truth = np.repeat([0, 1], [len(known), len(novel)])
        expected = roc_auc_score(truth, torch.cat([known, novel]).numpy())
        found = comparison.separations[name]["digits 5-9"]
        assert found.auroc == pytest.approx(expected, abs=1e-4)
        assert found.auroc_low < found.auroc < found.auroc_high
    assert comparison.separations["Fused"]["digits 5-9"].auroc > 0.8
    pooled = np.concatenate(list(comparison.scores["KNN"].unknown.values()))
    again = metrics.separation(comparison.scores["KNN"].known, pooled, resamples=100)
    assert again == comparison.separations["KNN"]["pooled"]


def test_costs_are_measured_and_counted(digits, comparison) -> None:
    costs = comparison.costs
    assert {cost.batch for cost in costs.values()} == {64}
    assert costs["SCOD"].kept_bytes == 4 * (
        20 * digits.methods["SCOD"].basis.vectors.shape[0] + 20
    )
    assert costs["KNN"].kept_bytes == sum(digits.methods["KNN"].memory().values()) > 0
    assert costs["Fused"].kept_bytes == sum(digits.methods["Fused"].memory().values())
    assert costs["Energy"].kept_bytes == 0
    assert (costs["margin"].kept_bytes, costs["margin"].forward_passes) == (None, None)
    # a score holds a forward pass
    assert costs["SCOD"].forward_passes > 1
    assert costs["SCOD"].seconds > costs["Energy"].seconds > 0


def test_networks_of_an_ensemble_are_kept_but_the_first(digits) -> None:
    torch.manual_seed(1)
    ensemble = DeepEnsemble([nn.Linear(64, 5) for _ in range(3)], Categorical())
    found = compare([ensemble], known=digits.test, unknown=digits.novel, resamples=10)
    assert found.costs["DeepEnsemble"].kept_bytes == 2 * 4 * (64 * 5 + 5)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=50),
        lambda x: iter(x.split(30)),
        lambda x: [(x, torch.zeros(len(x)))],
        lambda x: (x, torch.zeros(len(x))),
    ],
    ids=["array", "rows", "loader", "iterator", "list of batches", "batch"],
)
def test_inputs_of_any_kind_have_the_same_figures(form, digits) -> None:
    methods = {name: digits.methods[name] for name in ("SCOD", "Energy")}
    options = {"resamples": 10, "progress": False}
    plain = compare(methods, known=digits.test, unknown=digits.novel, **options)
    found = compare(methods, known=form(digits.test), unknown=form(digits.novel), **options)
    for name in methods:
        expected = plain.separations[name]["unknown"].auroc
        assert found.separations[name]["unknown"].auroc == pytest.approx(expected, abs=1e-4)


def test_scores_and_methods_side_by_side(digits, comparison) -> None:
    """An earlier comparison's scores go on into another."""
    earlier = comparison.scores["KNN"]
    found = compare(
        {"earlier": (earlier.known, earlier.unknown["noise"]), "now": digits.methods["Energy"]},
        known=digits.test,
        unknown=torch.rand(50, 64),
        resamples=100,
        progress=False,
    )
    assert (
        found.separations["earlier"]["unknown"].auroc
        == comparison.separations["KNN"]["noise"].auroc
    )
    assert list(found.costs) == ["now"]
    again = compare(comparison.scores, resamples=100)
    assert again.separations == comparison.separations
    assert again.costs == {}


def test_a_comparison_leaves_the_model_alone(digits) -> None:
    digits.net.train()
    weights = [p.clone() for p in digits.net.parameters()]
    method = digits.methods["Energy"]
    compare([method], known=digits.test, unknown=digits.novel, progress=False)
    assert digits.net.training
    assert all(map(torch.equal, digits.net.parameters(), weights))
    digits.net.eval()


# --- What people read ----------------------------------------------------------------------


def test_the_table_has_a_row_for_each_method_and_set(comparison) -> None:
    lines = str(comparison).splitlines()
    assert lines[0].split() == ["method", "unknown", "AUROC", "AUPR", "FPR95", "time", "memory"]
    assert [line.split()[0] for line in lines[1:16:3]] == [*comparison.scores]
    one = comparison.separations["KNN"]["noise"]
    (line,) = [line for line in lines if line.startswith("KNN") and "noise" in line]
    assert f"{one.auroc:.3f} ({one.auroc_low:.3f}-{one.auroc_high:.3f})" in line
    assert f"{comparison.costs['KNN'].forward_passes:.3g} x" in line
    assert "at batch 64" in str(comparison)


def test_rows_are_plain_data(comparison) -> None:
    rows = json.loads(json.dumps(comparison.rows))
    assert len(rows) == 5 * 3
    assert rows[0]["method"] == "SCOD"
    assert rows[0]["auroc"] == comparison.separations["SCOD"]["digits 5-9"].auroc
    assert rows[2] | {"unknown": "pooled"} == rows[2]
    assert {"aupr_low", "fpr95_high", "forward_passes", "kept_bytes"} <= rows[0].keys()


def test_the_plot_shows_every_figure_with_its_interval(comparison, tmp_path) -> None:
    figure = comparison.plot()
    assert [axes.get_xlabel().split()[0] for axes in figure.axes] == ["AUROC", "AUPR", "FPR95"]
    labels = [label.get_text().split("\n")[0] for label in figure.axes[0].get_yticklabels()]
    assert labels == [*comparison.scores]
    for axes, name in zip(figure.axes, ("auroc", "aupr", "fpr95"), strict=True):
        for bars, unknown in zip(
            axes.containers, ("digits 5-9", "noise", "pooled"), strict=True
        ):
            by_method = [by_set[unknown] for by_set in comparison.separations.values()]
            values = [getattr(one, name) for one in by_method]
            assert bars.lines[0].get_xdata() == pytest.approx(values)
            ends = [segment[:, 0] for segment in bars.lines[2][0].get_segments()]
            expected = [[getattr(o, f"{name}_{e}") for e in ("low", "high")] for o in by_method]
            np.testing.assert_allclose(ends, expected, atol=1e-12)
    figure.savefig(tmp_path / "plot.png")


def test_inverted_scores_are_named() -> None:
    known, unknown = drawn()
    found = compare(
        {"good": (known, unknown), "bad": (-known, {k: -v for k, v in unknown.items()})}
    )
    (note,) = found.notes
    assert "bad: near" in note
    assert "good" not in note
    assert "pass minus scores" in note
    swapped = compare({"good": (unknown["far"], known)})
    assert "were known and unknown swapped?" in swapped.notes[0]
    assert compare({"good": (known, unknown)}).notes == ()


def test_chance_is_not_called_inverted() -> None:
    draw = np.random.default_rng(0)
    found = [
        compare({"a": (draw.random(200), draw.random(200))}, resamples=200) for _ in range(40)
    ]
    assert sum(bool(one.notes) for one in found) <= 4  # 2.5 % are to be, by chance


def test_an_interval_holds_its_figure_even_of_inverted_scores() -> None:
    known, unknown = drawn(ties=True)
    for sign in (1, -1):
        one = metrics.separation(sign * known, sign * unknown["far"], resamples=50)
        for name in ("auroc", "aupr", "fpr95"):
            low, high = getattr(one, f"{name}_low"), getattr(one, f"{name}_high")
            assert low <= getattr(one, name) <= high
    inverted = metrics.separation([3.0, 4.0], [1.0, 2.0])
    assert (inverted.auroc, inverted.auroc_low) == (0.0, 0.0)
    assert inverted.auroc_high == pytest.approx(1 - 0.05**0.5)  # both pairs wrong, 1 in 20
    curve = metrics.curves([3.0, 4.0], [1.0, 2.0]).roc
    assert curve.area_high == pytest.approx(inverted.auroc_high)


def test_known_inputs_of_the_fit_are_named(digits, comparison) -> None:
    methods = {name: digits.methods[name] for name in ("SCOD", "Fused", "Energy")}
    found = compare(methods, known=digits.train, unknown=digits.novel, progress=False)
    assert found.notes[0].startswith("500 of 500 known inputs are in the fit of SCOD")
    assert found.notes[1].startswith("500 of 500 known inputs are in the fit of Fused")
    assert not any("in the fit" in note for note in comparison.notes)


def test_small_sets_and_constant_scores_are_named() -> None:
    found = compare({"a": (np.zeros(50), np.zeros(7))}, resamples=20)
    assert "a gives all inputs the same score" in found.notes[0]
    assert "(unknown 7)" in found.notes[1]
    assert found.separations["a"]["unknown"].auroc == 0.5


def test_intervals_of_the_fpr95_of_few_inputs_miss_as_the_note_says() -> None:
    generator = torch.Generator().manual_seed(0)
    misses = {}
    for count in (10, 160):
        missed = 0
        for seed in range(100):
            known = torch.randn(count, generator=generator)
            unknown = torch.randn(count, generator=generator) + 1.5
            one = metrics.separation(known, unknown, resamples=100, seed=seed)
            missed += not one.fpr95_low <= 0.5575 <= one.fpr95_high  # P(N(0, 1) > 1.5 - 1.645)
        misses[count] = missed
    assert misses[10] >= 12
    assert misses[160] <= 12


# --- What is refused -----------------------------------------------------------------------


def test_methods_that_are_not_fitted_are_named_before_long(digits) -> None:
    asked = []

    def ask(x):
        asked.append(len(x))
        return x.sum(1)

    data = {"known": digits.test, "unknown": digits.novel, "progress": False}
    for method, says in (
        (Monitor(digits.net, Categorical()), r"'new' on 'known': .*\.fit\("),
        (KNN(digits.net, Categorical()), r"'new' on 'known': .*fit\(train_loader\) first"),
        (
            Fused(digits.net, Categorical()).fit(digits.train, progress=False),
            r"'new' on 'known': .*calibrate\(heldout_loader\) first",
        ),
    ):
        with pytest.raises(NotFittedError, match=says):
            compare({"ask": ask, "new": method}, **data)
    assert asked == [64] * 3  # no other batch was scored


GOOD = np.arange(9.0)
PAIR = (GOOD, GOOD)


@pytest.mark.parametrize(
    ("methods", "options", "says"),
    [
        ({}, {}, "expected methods by name, got dict without any"),
        (None, {}, "expected methods by name, got NoneType"),
        ([PAIR], {}, "in a list, got a tuple; type compare"),
        ({"a": GOOD}, {}, "expected for 'a' a fitted method"),
        ({"a": KNN}, {}, "got the class KNN"),
        (
            {"a": (np.append(GOOD, np.nan), GOOD)},
            {},
            r"'a' on 'known': .*10 of which 1 are NaN",
        ),
        ({"a": (GOOD, {"b": np.append(GOOD, np.nan)})}, {}, "'a' on 'b': .*the first at 9"),
        ({"a": (GOOD, GOOD[:0])}, {}, "'a' on 'unknown': .*at least one input"),
        ({"a": (GOOD[:, None], GOOD)}, {}, r"float64 of shape \(9, 1\)"),
        ({"a": (GOOD.astype(str), GOOD)}, {}, "real numbers"),
        ({"a": (GOOD, {"pooled": GOOD, "b": GOOD})}, {}, "'pooled' not among them"),
        ({"a": PAIR, "b": (GOOD, {"c": GOOD})}, {}, "expected scores of 'unknown' from 'b'"),
        ({"a": PAIR, "b": np.sum}, {}, "expected inputs for 'b' to score, got none"),
        ({"b": np.sum}, {"known": GOOD, "unknown": {}}, "expected unknown sets by name"),
        ({"b": np.sum}, {"known": GOOD, "unknown": GOOD}, r"'b' on 'known': .*shape \(\)"),
        (
            {"b": np.sum},
            {"known": {"x": GOOD}, "unknown": {"x": GOOD}},
            r"unknown=\[other_batch\]",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(methods, options, says) -> None:
    with pytest.raises(OptionError, match=says):
        compare(methods, progress=False, **options)


def test_scores_of_other_inputs_are_refused() -> None:
    with pytest.raises(BatchError, match="got for 'unknown' 9 from 'a', 8 from 'b'"):
        compare({"a": PAIR, "b": (GOOD, GOOD[1:])})
    with pytest.raises(BatchError, match="got for 'known' 9 from 'a', 3 from 'b'"):
        compare({"a": PAIR, "b": lambda x: x}, known=GOOD[:3], unknown=GOOD, progress=False)


def test_two_of_a_class_need_names_and_empty_data_is_refused(digits) -> None:
    same = [MaxSoftmax(digits.net, Categorical()) for _ in range(2)]
    with pytest.raises(OptionError, match="got MaxSoftmax, MaxSoftmax"):
        compare(same, known=digits.test, unknown=digits.novel)
    with pytest.raises(EmptyLoaderError):
        compare(same[:1], known=iter([]), unknown=digits.novel, progress=False)
    with pytest.raises(BatchError, match="DataLoader"):
        compare(same[:1], known=TensorDataset(digits.test), unknown=digits.novel)


def test_what_is_no_fitted_method_is_named_as_it_was_typed() -> None:
    class Outliers:
        """What has no ``score``, as detectors of scikit-learn."""

    x = torch.zeros(4, 2)
    for wrong, says in (
        (Energy, r"got the class Energy; type Energy\(model, likelihood\)"),
        (Outliers(), r"score\(batch\) in a list, got a Outliers; .*{'mine': lambda x: scores"),
    ):
        with pytest.raises(OptionError, match=says):
            compare([wrong], known=x, unknown=x)  # type: ignore[list-item]
