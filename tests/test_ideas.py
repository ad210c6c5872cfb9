"""What ``docs/ideas`` says of its figures is so, in the scripts that draw them."""

from __future__ import annotations

import importlib
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from scodkit.metrics import separation

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text("utf-8") for path in (ROOT / "docs/ideas").glob("*.md")}
FIGURES = (
    "weight_space",
    "regressor",
    "moons",
    "certificate",
    "sketches",
    "directions",
    "conformal",
    "classes",
)

Finding = Callable[[str], Any]


@pytest.fixture(scope="module")
def found() -> Iterator[Finding]:
    """Return what a script has found; it is run once."""
    threads, cache = torch.get_num_threads(), {}
    torch.set_num_threads(1)

    def find(name: str) -> Any:
        if name not in cache:
            cache[name] = importlib.import_module(name).find()
        return cache[name]

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.syspath_prepend(str(ROOT / "examples" / "ideas"))
        yield find
    torch.set_num_threads(threads)


def told(page: str, pattern: str) -> list[float]:
    """Return the numbers that a page says where it says so; ``#`` stands for each."""
    text = " ".join(PAGES[page].split())
    escaped = re.escape(pattern).replace(r"\#", r"(-?[\d,]+(?:\.\d+)?)")
    (match,) = re.finditer(escaped, text)
    return [float(number.replace(",", "")) for number in match.groups()]


def near(number: float) -> Any:
    """Return a number as others may have it on another processor, whose training differs."""
    return pytest.approx(number, rel=0.35)


# -- the score -------------------------------------------------------------------------------


def test_two_weights(found: Finding) -> None:
    space = found("weight_space")
    inside, outside = space.shares.tolist()
    (said,) = told("score", "among the data, # % of the squared gradient")
    assert 100 * inside == pytest.approx(said, abs=0.2)
    (said,) = told("score", "Only # % of the squared gradient")
    assert 100 * outside == pytest.approx(said, abs=5)
    assert float(space.scores[0]) == near(told("score", "the score is # nats. - At")[0])
    assert float(space.scores[1]) == near(told("score", "The score is # nats, some")[0])
    assert float(space.scores[1] / space.scores[0]) == near(told("score", "some # times")[0])


def test_the_score_is_the_largest_change_on_the_ellipse(found: Finding) -> None:
    space = found("weight_space")
    steps = space.around - space.weights
    for slope, score in zip(space.slopes, space.scores, strict=True):
        largest = float((steps @ slope).square().max()) / 0.1**2
        assert largest == pytest.approx(float(score), rel=1e-3)
    assert float((steps @ space.kept).abs().max()) < 0.1 * float(steps.norm(dim=1).max())


def test_a_regressor_has_one_entropy_and_many_scores(found: Finding) -> None:
    line = found("regressor")
    assert line.entropy.unique().numel() == 1
    assert float(line.entropy[0]) == pytest.approx(
        told("score", "The entropy is # nats everywhere")[0], abs=0.005
    )
    median, least = told("score", "a median of # nats inside the two intervals, and at least #")
    assert float(line.score[line.inside].median()) == near(median)
    assert float(line.score[line.gap].min()) > 0.5 * least
    assert (line.score[line.gap] > 10 * line.threshold).all()
    assert (line.score[line.inside] > line.threshold).float().mean() < 0.11
    (threshold,) = told("score", "5 % false alarms, sits at #.")
    assert line.threshold == near(threshold)


def test_a_high_score_is_not_a_large_error(found: Finding) -> None:
    line = found("regressor")
    error, middle = (line.mean - line.truth).abs(), (line.at[:, 0] - 0.25).abs().argmin()
    assert float(error[middle]) < 0.2 * float(error[0])
    assert float(line.score[middle]) > 0.2 * float(line.score[0])


def test_where_entropy_is_low_and_the_score_is_high(found: Finding) -> None:
    moons = importlib.import_module("moons")
    two = found("moons")
    drawn = two.maps[moons.DECAYS[0]]
    at = {letter: int(two.place(letter)) for letter in "ABC"}
    alarms = {
        letter: [name for name, p in drawn.p_values.items() if p[place] <= 0.05]
        for letter, place in at.items()
    }
    assert alarms == {
        "A": ["Entropy", "Max logit", "Fused"],
        "B": ["SCOD", "Fused"],
        "C": ["Fused"],
    }
    assert float(drawn.entropy[at["B"]]) < 0.15
    assert float(drawn.p_values["Entropy"][at["B"]]) > 0.3
    assert float(drawn.upper[at["C"]]) < 1e-5  # the exact score, whatever the sketch
    assert float(drawn.score[two.far].median()) < float(drawn.score[~two.far].median())


def test_shares_of_the_plane(found: Finding) -> None:
    moons = importlib.import_module("moons")
    two = found("moons")
    maps = [two.maps[decay] for decay in moons.DECAYS]
    text = "SCOD raises alarms on # % of the plane outside the data, entropy on # %"
    scod, entropy = told("score", text)
    other_scod, other_entropy = told("score", "the shares are # % and # %.")
    fused, other_fused = told("score", "and raises alarms on # % and # %.")
    said = {
        "SCOD": (scod, other_scod),
        "Entropy": (entropy, other_entropy),
        "Fused": (fused, other_fused),
    }
    for name, shares in said.items():
        for one, share in zip(maps, shares, strict=True):
            assert 100 * one.flagged(name, two.far) == pytest.approx(share, abs=10)
    drawn = maps[0]
    assert drawn.flagged("SCOD", two.far) > 2 * drawn.flagged("Entropy", two.far)
    assert drawn.flagged("Fused", two.far) > 2 * drawn.flagged("SCOD", two.far)
    assert maps[1].flagged("SCOD", two.far) < 0.5 * drawn.flagged("SCOD", two.far)


# -- the certificate, the sketches, the method -----------------------------------------------


def test_bounds_enclose_the_exact_score_at_every_rank(found: Finding) -> None:
    bounds = found("certificate")
    assert bounds.lower.shape == (len(bounds.ranks), 400)
    assert (bounds.lower <= bounds.exact).all()
    assert (bounds.exact <= bounds.upper).all()
    assert (bounds.score <= bounds.upper).all()
    assert (bounds.upper / bounds.score).max() < 1 + 1e-6
    width = (bounds.upper / bounds.lower).median(1).values
    assert (width.diff() < 0).all()
    assert (bounds.score.median(1).values.diff() < 0).all()


def test_numbers_of_the_certificate(found: Finding) -> None:
    bounds = found("certificate")
    middle = {
        rank: [float(part[i, :200].median()) for part in (bounds.lower, bounds.score)]
        for i, rank in enumerate(bounds.ranks)
    }
    exact = float(bounds.exact[:200].median())
    score, true, lower = told(
        "certificate", "a score of # nats, an exact score of # and a lower bound of #."
    )
    assert [*middle[50], exact] == [near(lower), near(score), near(true)]
    assert middle[500] == [near(n) for n in told("certificate", "the interval is # to #.")]
    for rank in (50, 500):
        i = bounds.ranks.index(rank)
        known, far = bounds.score[i].tensor_split(2)
        assert separation(known, far, resamples=10).auroc > 0.98
    rows = dict(re.findall(r"^\| (.*?) \| (.*) \|$", PAGES["method"], re.MULTILINE))
    medians = [float(cell) for cell in rows["median score of held-out inputs, nats"].split("|")]
    assert [middle[r][1] for r in (50, 200, 500)] == [near(n) for n in medians[:3]]
    assert exact == near(medians[3])
    captured = [float(cell) for cell in rows["captured curvature"].split("|")]
    of_ranks = [bounds.captured[bounds.ranks.index(rank)] for rank in (50, 200, 500)]
    assert of_ranks == pytest.approx(captured[:3], abs=0.005)


def test_only_the_sketch_of_the_paper_overshoots(found: Finding) -> None:
    kept = found("sketches").kept
    for name, by_size in kept.items():
        for one in by_size.values():
            assert one.certified == (name != "TwoSided")
            if one.certified:
                assert one.above < 1e-12
                assert float(one.ratio.max()) < 1 + 1e-9
            else:
                assert one.above > 1e-5
    over = 100 * (max(float(one.ratio.max()) for one in kept["TwoSided"].values()) - 1)
    assert over == pytest.approx(told("sketches", "by up to # %")[0], abs=2)
    assert 0.7 < float(kept["Nystrom"][208].ratio.min()) < 1


def test_errors_of_the_sketches(found: Finding) -> None:
    result = found("sketches")
    for size, best in result.best.items():
        error = {name: by_size[size].error for name, by_size in result.kept.items()}
        assert best < error["shrink=False"] < 1.1 * best
        assert error["shrink=False"] < error["Nystrom"] < 1.6 * best
        assert error["Nystrom"] < error["FrequentDirections"] < error["TwoSided"]
        assert 4 < error["TwoSided"] / error["Nystrom"] < 15
    medians = told("sketches", "has # nats with Nystrom, # with FrequentDirections and # with")
    names = ("Nystrom", "FrequentDirections", "TwoSided")
    assert [result.kept[n][208].score for n in names] == [near(n) for n in medians]


def test_the_table_of_the_sketches_is_that_of_the_rows() -> None:
    rows = [
        json.loads(line)
        for line in (ROOT / "benchmarks/results/sketch_accuracy.jsonl").read_text().splitlines()
    ]
    families = ("Nystrom, k=T/2", "two-sided, k=(T-4)/6", "FD, k=T/2", "FD unshrunk, k=T/2")
    exact = {row["net"]: row["auroc"] for row in rows if row["family"] == "exact"}
    lines = re.findall(r"^\| (mnist 0-4|wine) \| (\d+) \| (.*) \|$", PAGES["sketches"], re.M)
    assert len(lines) == 6
    for net, size, cells in lines:
        for family, cell in zip(families, cells.split(" | "), strict=True):
            errors = [
                row["nuclear"]
                for row in rows
                if (row["net"], row["family"], row["size"]) == (net, family, int(size))
            ]
            assert float(f"{mean(errors):.2g}") == float(cell), (net, size, family)
    gaps = {
        net: max(
            abs(row["auroc"] - exact[net])
            for row in rows
            if row["net"] == net and row["family"] in families
        )
        for net in exact
    }
    said = told("sketches", "at most # on MNIST and by # on Wine")
    assert [round(gaps["mnist 0-4"], 4), round(gaps["wine"], 3)] == said


def test_scores_add_up_over_directions(found: Finding) -> None:
    parts = found("directions")
    for one, scores in zip((parts.held, parts.far), parts.scores, strict=True):
        torch.testing.assert_close(one.sum(1), scores, rtol=1e-6, atol=1e-9)
        inside = one[:, :-1].sum(1)
        assert float((inside / scores).median()) < 0.1  # nearly all of it from outside
    assert float(parts.values[-1]) > 10 * parts.prior
    assert 1e-7 < float(parts.open[0]) < 1e-5
    assert 1e-3 < float(parts.open[-1]) < 0.1


# -- conformal alarms --------------------------------------------------------------------------


def test_realised_rates_are_those_asked_for_on_average(found: Finding) -> None:
    for (size, confidence), rates in found("conformal").rates.items():
        if confidence is not None:
            continue
        error = float(rates.std()) / len(rates) ** 0.5
        above = importlib.import_module("conformal").allowed(size, None)
        assert float(rates.mean()) == pytest.approx((above + 1) / (size + 1), abs=4 * error)
        assert float(rates.mean()) < 0.05 + 4 * error
    text = "# ± # % with 100 held-out samples and # ± # % with 1,000"
    few, few_error, many, many_error = told("conformal", text)
    for size, said, half in ((100, few, few_error), (1000, many, many_error)):
        rates = found("conformal").rates[size, None]
        assert 100 * float(rates.mean()) == pytest.approx(said, abs=3 * half)
        assert 200 * float(rates.std()) / len(rates) ** 0.5 == pytest.approx(half, abs=0.01)


def test_with_a_confidence_most_sets_keep_the_rate(found: Finding) -> None:
    rates = found("conformal").rates
    said = told("conformal", "in # % of the draws with $n = 100$ and in # % with $n = 1000$")
    for size, percent in zip((100, 1000), said, strict=True):
        kept = (rates[size, 0.9] <= 0.05).double()
        error = 4 * (0.09 / len(kept)) ** 0.5
        assert float(kept.mean()) > 0.9 - error
        assert 100 * float(kept.mean()) == pytest.approx(percent, abs=100 * error)
        without = float((rates[size, None] <= 0.05).double().mean())
        assert without < 0.7  # which an average does not promise


def test_spreads_and_least_numbers_of_samples() -> None:
    from scipy import stats

    from scodkit import Calibration
    from scodkit.errors import CalibrationError

    text = "lies between # % and # % in 95 % of draws, with $n = 1000$ between # % and # %"
    said = told("conformal", text)
    theory = [*stats.beta(5, 96).ppf([0.025, 0.975]), *stats.beta(50, 951).ppf([0.025, 0.975])]
    assert [round(100 * rate, 1) for rate in theory] == said
    bounds = told("conformal", "# % for 100 samples and # % for 1,000")
    for size, bound in zip((100, 1000), bounds, strict=True):
        calibration = Calibration(torch.arange(float(size)))
        assert round(100 * calibration.false_alarm_bound(0.05), 1) == bound
    rows = re.findall(r"^\| a rate of (\d) %, (.*?) \| (\d+) \|$", PAGES["conformal"], re.M)
    assert len(rows) == 5
    for rate, words, least in rows:
        level = re.search(r"confidence=([\d.]+)", words)
        confidence = None if level is None else float(level[1])
        options = {"false_alarm": int(rate) / 100, "confidence": confidence}
        Calibration(torch.arange(float(least))).threshold(**options)
        with pytest.raises(CalibrationError):
            Calibration(torch.arange(float(least) - 1)).threshold(**options)


def test_under_drift_the_rate_goes_either_way(found: Finding) -> None:
    mean_rate = found("conformal").drifted.mean(1)
    assert (mean_rate.diff() > 0).all()
    assert float(mean_rate[0]) < 0.02
    assert 0.35 < float(mean_rate[-1]) < 0.65
    assert float(mean_rate[2]) == pytest.approx(0.05, abs=0.015)  # at scale 1


def test_by_class_no_class_pays_for_another(found: Finding) -> None:
    rates = found("classes")
    pooled, own = rates.pooled.mean(0), rates.by_class.mean(0)
    error = rates.by_class.std(0) / len(rates.by_class) ** 0.5
    assert (own < 0.05 + 4 * error).all()
    assert float(pooled.min()) < 0.02
    assert float(pooled.max()) > 0.09
    (said,) = told("conformal", "0 % in one class and # % in another")
    assert 100 * float(pooled.max()) == pytest.approx(said, abs=4)


# -- the figures and the pages -----------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_figures_say_what_they_show(name: str, found: Finding) -> None:
    figure = importlib.import_module(name).draw(found(name))
    figure.savefig(io.BytesIO(), dpi=40)
    for axes in figure.axes:
        if axes.get_lines() or axes.patches:
            assert axes.get_ylabel() or axes.collections, "a quantity or a map"
    assert (ROOT / f"docs/images/ideas_{name}.png").exists()


def test_every_figure_is_on_a_page_with_a_description() -> None:
    shown = re.findall(
        r"!\[([^\]]*)\]\(\.\./images/ideas_(\w+)\.png\)", "".join(PAGES.values())
    )
    assert sorted(name for _, name in shown) == sorted(FIGURES)
    assert all(len(description) > 60 for description, _ in shown)
