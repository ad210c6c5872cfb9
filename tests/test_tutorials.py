"""The tutorials run, what they say is so, and their pages are theirs."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import betabinom, binom

from printed_pages import assert_alike

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "tutorials"
SCRIPTS = sorted((ROOT / "examples" / "tutorials").glob("*.py"))
OUTPUT = re.compile(r"\n\n(?:```text\n(.*?)\n```|!\[([^]]*)\]\((images/\w+\.png)\))", re.DOTALL)


def loaded() -> Any:
    path = ROOT / "examples" / "render_tutorials.py"
    spec = importlib.util.spec_from_file_location("render_tutorials", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "render_tutorials", module)
        spec.loader.exec_module(module)
    return module


render = loaded()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Return a function that runs a tutorial in an empty folder and returns its names."""
    monkeypatch.chdir(tmp_path)

    def names_of(name: str, compare: bool = True) -> SimpleNamespace:
        names, cells = render.run(ROOT / "examples" / "tutorials" / f"{name}.py")
        printed = [cell.printed.rstrip() for cell in cells if cell.printed]
        told = [text for text, *_ in OUTPUT.findall((PAGES / f"{name}.md").read_text()) if text]
        assert len(printed) == len(told)
        for ours, page in zip(printed, told, strict=True) if compare else ():
            assert_alike(ours, page)
        return SimpleNamespace(**names)

    return names_of


def as_promised(false_alarms: float, count: int, held_out: int, rate: float = 0.05) -> bool:
    """Whether so many false alarms are likely, where the rate is one over held-out sets."""
    rank = int(rate * (held_out + 1))
    low, high = betabinom.ppf([0.0005, 0.9995], count, rank, held_out + 1 - rank)
    return bool(low <= false_alarms <= high)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_pages_have_text_and_code_of_their_scripts(script: Path) -> None:
    title, cells = render.cells_of(script)
    page = (PAGES / f"{script.stem}.md").read_text()
    head, note, rest = OUTPUT.sub("", page).split("\n\n", 2)
    assert head == f"# {title}"
    assert (
        f"[`examples/tutorials/{script.name}`](../../examples/tutorials/{script.name})" in note
    )
    sources = [c.source if c.is_text else f"```python\n{c.source}\n```" for c in cells]
    assert rest == "\n\n".join(sources) + "\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_figures_are_small_and_described(script: Path) -> None:
    page = (PAGES / f"{script.stem}.md").read_text()
    figures = [(alt, PAGES / path) for _, alt, path in OUTPUT.findall(page) if path]
    assert figures
    for alt, path in figures:
        assert len(alt) > 20
        assert "\n" not in alt
        assert path.stat().st_size < 80_000
    kept = {path.name for path in (PAGES / "images").glob(f"{script.stem}_*.png")}
    assert kept == {path.name for _, path in figures}


def test_all_tutorials_are_listed() -> None:
    index = (PAGES / "index.md").read_text()
    assert set(re.findall(r"\]\((\w+\.md)\)", index)) == {f"{path.stem}.md" for path in SCRIPTS}


def test_regressor(run: Any) -> None:
    told = run("regressor")
    inside = ((told.grid > -1.9) & (told.grid < -0.9)) | ((told.grid > 0.5) & (told.grid < 1.5))
    gap_and_ends = ((told.grid > -0.7) & (told.grid < 0.3)) | (told.grid.abs() > 2.1)
    assert not told.alarm[inside[:, 0]].any()
    assert told.alarm[gap_and_ends[:, 0]].all()
    assert len(told.entropy.unique()) == 1
    known, sugar, swapped = (told.rates[name] for name in told.slips)
    assert as_promised(round(102 * known[0]), 102, 100)
    assert sugar[0] > 0.95
    assert swapped[0] > 0.95
    assert swapped[1] < 0.8  # columns out of range
    assert min(sugar[2], swapped[2]) > 1.2 * known[2]  # errors
    predicted = told.monitor(told.slips["blood sugar in mmol/l"]).output[:, 0]
    like_patients = (predicted > float(told.y.min())) & (predicted < float(told.y.max()))
    assert like_patients.mean() > 0.6
    assert as_promised(round(102 * told.alarms), 102, 100)
    assert told.error < 1.1 * known[2]  # of the slip that does not matter
    words = told.monitor.explain(told.slips["blood sugar in mmol/l"]).words(0)
    assert words.startswith("s6 = ")


def test_image_classifier(run: Any) -> None:
    told = run("image_classifier")
    assert told.right > 0.97
    assert told.sure > 0.25
    assert binom.ppf([0.025, 0.975], 201, 0.05).tolist() == [4, 16]  # as the page says
    assert as_promised(int(told.alarms.sum()), 201, 150)
    assert told.new_alarms.float().mean() > 0.75
    apart = {row["method"]: row for row in told.found.rows}
    assert apart["Fused"]["auroc_low"] < apart["ViM"]["auroc"] < apart["Fused"]["auroc_high"]
    worse = {name: apart[name]["auroc"] for name in ("SCOD", "MaxSoftmax")}
    assert min(apart["Fused"]["auroc"], apart["ViM"]["auroc"]) > worse["SCOD"]
    assert worse["SCOD"] > worse["MaxSoftmax"]
    assert apart["SCOD"]["forward_passes"] == max(
        row["forward_passes"] for row in apart.values()
    )
    assert told.fused.flag(told.bright).all()
    assert told.methods["SCOD"].flag(told.bright).float().mean() < 0.1


def check_topics(told: SimpleNamespace, monitor: Any, caught: float) -> None:
    known, new = (monitor.flag(told.loader(asked)) for asked in (told.test, told.new))
    assert as_promised(int(known.sum()), len(known), len(told.held_out))
    assert new.float().mean() > caught


def test_text_classifier(run: Any) -> None:
    told = run("text_classifier")
    assert told.right > 0.97
    assert told.sure > 0.5
    texts = [
        {tuple(m["input_ids"].tolist()) for m in part}
        for part in (told.train_set, told.held_out, told.test)
    ]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 3 * 420
    aurocs = {}
    for name, monitor in told.monitors.items():
        scores = (monitor.score(told.loader(asked)) for asked in (told.test, told.new))
        aurocs[name] = told.separation(*scores).auroc
        check_topics(told, monitor, caught=0.7)
    assert aurocs["Projected(rank=8)"] == pytest.approx(aurocs["all weights"], abs=0.01)
    assert told.separation(*told.softmax).auroc == pytest.approx(
        aurocs["all weights"], abs=0.03
    )
    known_words = {n for m in told.train_set for n in m["input_ids"].tolist()}
    for i in told.new_score.argsort()[:3].tolist():  # those that pass
        asked = told.new[i]["input_ids"].unique()
        assert sum(n in known_words for n in asked.tolist()) > 0.7 * len(asked)
    bases = [monitor.basis.nbytes for monitor in told.monitors.values()]
    assert bases[0] > 30 * bases[1]


@pytest.mark.hosts
@pytest.mark.filterwarnings("ignore")  # of the host
def test_text_classifier_of_hugging_face(run: Any) -> None:
    pytest.importorskip("transformers")
    told = run("text_classifier")
    (block,) = re.findall(
        r"```python\n(from transformers.*?)```",
        (PAGES / "text_classifier.md").read_text(),
        re.DOTALL,
    )
    names = vars(told)
    exec(block, names)
    monitor = told.Monitor(
        names["model"], told.Categorical(), rank=40, parameters=told.Projected(rank=8)
    )
    monitor.fit(told.loader(told.train_set)).calibrate(told.loader(told.held_out))
    check_topics(told, monitor, caught=0.5)


@pytest.mark.slow
def test_segmentation(run: Any) -> None:
    told = run("segmentation")
    assert told.right > 0.97
    assert told.share[2] > 0.5  # squares
    assert told.separation(told.known.score, told.new.score).auroc > told.by_entropy.auroc
    assert as_promised(int((told.known.p_value <= 0.05).sum()), 200, 200)
    assert told.in_map == pytest.approx(told.in_entropy, abs=0.05)
    assert told.in_map > 0.85


@pytest.mark.slow
def test_drifting_camera(run: Any) -> None:
    told = run("drifting_camera")
    assert told.alarmed_at["clear"] is None
    assert told.CLEAR < told.alarmed_at["fogging up"] < 450
    assert told.false_alarms <= binom.ppf(0.999, 200, 0.01)
    medians = [torch.tensor(delays).median() for delays in told.delays.values()]
    assert medians == sorted(medians, reverse=True)
    assert all(len(delays) == 40 for delays in told.delays.values())
    late = told.errors["fogging up"][-50:].mean()
    assert late > 3 * told.errors["clear"].mean()


def test_robot_rollout(run: Any) -> None:
    told = run("robot_rollout")
    known, bent, wind, longer = told.WORLDS
    assert as_promised(told.alarms[known], 60, 60)
    assert told.falls[known] == told.falls[bent] == 0
    assert told.alarms[bent] == told.alarms[wind] == 60
    assert told.alarms[longer] > 50
    assert min(told.falls[wind], told.falls[longer]) > 0
    assert not any(told.too_late.values())
    _, true = told.rollouts(told.policy, 60, **told.WORLDS[bent])
    assert true[:, -1, 0].abs().min() > told.states[:, 0].abs().max()  # where the cart ends


@pytest.mark.slow
def test_many_machines(run: Any) -> None:
    told = run("many_machines", compare=False)  # how much was read before the kill differs
    assert told.merged.basis.num_data == told.alone.basis.num_data == len(told.x)
    assert told.apart < 1e-3
    assert told.same
    assert len(told.read) > len(told.x)


@pytest.mark.slow
def test_right_score(run: Any) -> None:
    told = run("right_score")
    means = {name: told.mean(runs) for name, (runs, _) in told.tasks.items()}
    on_new = {name: aurocs for name, (_, aurocs) in told.tasks.items()}
    classifier, dense, convolutional = means
    for method in ("ViM", "Fused"):
        assert means[classifier][method] > means[classifier]["SCOD"]
    assert means[classifier]["SCOD"] > means[classifier]["MaxSoftmax"]
    assert next(iter(means[dense])) == "SCOD"
    assert means[dense]["SCOD"] > means[dense]["Mahalanobis"] + 0.05
    assert next(iter(means[convolutional])) == "Fused"
    for name, least in {classifier: 0.01, dense: 0.0, convolutional: 0.06}.items():
        chosen = next(iter(means[name]))
        assert on_new[name][chosen] >= max(on_new[name].values()) - least
    assert max(on_new[convolutional].values()) < means[convolutional]["Fused"]
