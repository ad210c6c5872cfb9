"""``scod report`` and ``scod demo`` as their users run them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score

from command_line import own_folder, said_in_three_lines, scod
from report_pages import ReadPage
from scodkit import Categorical, Monitor
from scodkit.cli import demo
from scodkit.report import Report, ScoredSet, read_numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder, with a fitted and a calibrated monitor."""
    own = own_folder(tmp_path_factory.mktemp("user") / "own")
    fit = "fit model.py:net train.npy -o bare.scod --likelihood categorical --rank 10"
    assert scod(*fit.split(), cwd=own).code == 0
    calibrate = "calibrate bare.scod model.py:net heldout.npy -o m.scod"
    assert scod(*calibrate.split(), cwd=own).code == 0
    np.save(own / "far.npy", 6 * np.load(own / "heldout.npy")[:40])
    np.save(own / "nan.npy", np.full((4, 3), np.nan, np.float32))
    np.save(own / "wide.npy", np.ones((4, 7), np.float32))
    both = np.concatenate([np.load(own / "train.npy"), np.load(own / "far.npy")])
    np.save(own / "stream.npy", both)
    return own


def test_a_report_says_what_scoring_says(folder):
    words = "report m.scod model.py:net --known quiet=new.csv --unknown far.npy -o r.html"
    run = scod(*words.split(), "--stream", "stream.npy", "--title", "A <b> title", cwd=folder)
    assert run.code == 0, run.err
    assert str(folder / "r.html") in run.out
    page = ReadPage((folder / "r.html").read_text(encoding="utf-8"))
    assert "A <b> title" in page.words
    rows = {row[0]: row for row in page.table("Scores of the sets")[1:]}
    assert {name: row[1] for name, row in rows.items()} == {"quiet": "known", "far": "unknown"}
    assert "AUROC, far" in page.facts
    for name, data in (("quiet", "new.csv"), ("far", "far.npy")):
        scored = scod("score", "m.scod", "model.py:net", data, "--json", cwd=folder).documents
        share = sum(answer["alarm"] for answer in scored) / len(scored)
        assert rows[name][2] == str(len(scored))
        assert rows[name][-1].startswith(f"{100 * share:.1f}\xa0% (")
        samples = [row for row in page.table("Inputs of each set")[1:] if row[0] == name]
        for _, prediction, score, *_, place, _ in samples:
            answer = scored[int(place)]
            assert float(score) == pytest.approx(answer["score"], rel=6e-3)
            assert prediction.startswith(f"class {answer['prediction']} (")
    assert "The alarm rose at sample" in page.words
    assert sum(", sample" in name for name in page.tables) == 6 + 20
    settings = {row[0]: row[1] for row in page.table("What made this page")}
    assert "train.npy" in settings["note, fit"]
    assert settings["data, held out"] == "heldout.npy"
    assert settings["command"].startswith("scod report m.scod model.py:net --known quiet=new")
    saved = read_numbers(folder / "r.json")
    assert saved["data"]["far"] == "far.npy"
    assert saved["sets"]["far"]["inputs"] == 40
    # beside itself nothing is beyond noise
    again = scod(*words.split(), "--compare", "r.json", "-o", "again.html", cwd=folder)
    assert again.code == 0, again.err
    rows = ReadPage((folder / "again.html").read_text()).table("Numbers of both")[1:]
    assert {row[-1] for row in rows} == {"the same", "within noise", "only in the other"}


def test_a_target_gives_mistakes(folder):
    train = np.load(folder / "train.npy")
    rng = np.random.default_rng(0)
    for name, words in (("t", ("0", "1")), ("named", ("cat", "dog"))):
        cells = [f"{a},{b},{c},{words[rng.integers(2)]}" for a, b, c in train[:40]]
        (folder / f"{name}.csv").write_text("\n".join(["a,b,c,y", *cells]))
        fit = f"fit model.py:net {name}.csv -o {name}.scod --likelihood categorical --target y"
        assert scod(*fit.split(), cwd=folder).code == 0
        report = f"report {name}.scod model.py:net --known {name}.csv -o {name}.html"
        run = scod(*report.split(), cwd=folder)
        assert run.code == 0, run.err
        assert ("the target is left out" in run.err) == (name == "named")
        found = read_numbers(folder / f"{name}.json")["sets"][name]["mistakes"]
        assert (found is None) == (name == "named")
        run = scod(*report.split(), "--classes", ",".join(words), cwd=folder)
        scored = scod(
            "score", f"{name}.scod", "model.py:net", f"{name}.csv", "--json", cwd=folder
        )
        pairs = [(words[answer["prediction"]], answer["target"]) for answer in scored.documents]
        found = read_numbers(folder / f"{name}.json")["sets"][name]["mistakes"]
        assert found["count"] == sum(own != right for own, right in pairs)


def test_pictures_keep_the_names_of_their_files(folder):
    shots = folder / "photos"
    shots.mkdir()
    for i in range(8):
        values = np.random.default_rng(i).integers(0, 255, (4, 5, 3), dtype=np.uint8)
        Image.fromarray(values).save(shots / f"shot{i}.png")
    fit = "fit model.py:pictures photos -o p.scod --likelihood categorical --rank 4"
    assert scod(*fit.split(), cwd=folder).code == 0
    words = "report p.scod model.py:pictures --known photos --json"
    run = scod(*words.split(), cwd=folder)
    sets = {"photos": 8}
    assert run.document == {"report": "report.html", "numbers": "report.json", "sets": sets}
    page = ReadPage((folder / "report.html").read_text(encoding="utf-8"))
    assert sorted(row[1] for row in page.table("Inputs of each set")[1:]) == [
        f"shot{i}.png" for i in range(8)
    ]
    assert sum(e.tag == "img" for e in page.elements) == 2 * 8


@pytest.mark.parametrize(("data", "pictured"), [("items", True), ("batches", True)])
def test_data_from_the_users_own_code(folder, data, pictured):
    words = f"report bare.scod model.py:net --known model.py:{data} -o own.html"
    run = scod(*words.split(), cwd=folder)
    assert run.code == 0, run.err
    assert "not calibrated" in run.err
    page = ReadPage((folder / "own.html").read_text(encoding="utf-8"))
    assert page.table("Scores of the sets")[1][:3] == [data, "known", "96"]
    assert any(", sample" in name for name in page.tables) == pictured


GOOD = "report m.scod model.py:net --known heldout.npy --force -o out.html"
BAD = [
    ("heldout.npy=nowhere.npy", "expected a file or folder at nowhere.npy, got no file"),
    ("heldout.npy=nan.npy", "in sample 0"),
    ("heldout.npy=wide.npy", "expected inputs that the model can be run on"),
    ("heldout.npy=model.py:number", "to return a tensor"),
    ("heldout.npy=heldout.npy --unknown heldout.npy", "'heldout' twice"),
    ("m.scod=absent.scod", "absent.scod"),
    ("m.scod=train.npy", "train.npy"),
    ("model.py:net=model.py:other", "weights"),
    ("out.html=no/folder/out.html", "mkdir -p no/folder"),
    ("out.html=photos", "expected the name of a file to write, got a folder"),
    ("out.html=out.html --false-alarm 0.001", "calibrate with at least 999 samples"),
    ("out.html=out.html --false-alarm 2", "expected 0 < false_alarm < 1, got 2"),
    ("m.scod=bare.scod --stream new.npy", "expected a calibrated monitor to watch"),
    ("out.html=out.html --compare train.npy", "got something else"),
    ("out.html=out.html --compare none.json", "none.json"),
    ("-o out.html=-o out.json", "where its numbers go"),
    ("out.html=out.html --colour red", ", got --colour; scod report --help"),
]


@pytest.mark.parametrize(("change", "says"), BAD)
def test_bad_input_is_one_message_and_changes_nothing(folder, change, says):
    (folder / "photos").mkdir(exist_ok=True)
    (folder / "out.html").write_text("before")
    there = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
    run = scod(*GOOD.replace(*change.split("=", 1)).split(), cwd=folder)
    assert run.code == 2
    assert says in said_in_three_lines(run.err)
    assert "Traceback" not in run.err
    assert run.out == ""
    assert (folder / "out.html").read_text() == "before"
    after = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
    assert after == there


def test_a_full_disk_leaves_the_old_page(folder):
    (folder / "out.html").write_text("before")
    run = scod(*GOOD.split(), cwd=folder, largest_file=100_000)
    assert run.code == 2
    assert "nothing was changed" in run.err
    assert (folder / "out.html").read_text() == "before"
    assert not list(folder.glob(".out.html*"))


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    place = tmp_path_factory.mktemp("demo")
    run = scod("demo", "-o", "demo.html", cwd=place)
    assert run.code == 0, run.err
    return run, place / "demo.html"


@pytest.fixture(scope="module")
def trained():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    digits = demo.load_digits()
    yield demo.train(digits.train_x, digits.train_y), digits
    torch.set_num_threads(before)


def test_the_demo_compares_methods_and_writes_the_report(demo_run, trained):
    run, path = demo_run
    net, digits = trained
    assert f"The report: {path}" in run.out
    lines = run.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("score "))
    table = {line[:21].strip(): line[21:].split() for line in lines[start + 1 : start + 10]}
    assert list(table)[:3] == ["Fused", "SCOD", "SCOD, last two layers"]
    assert {"KNN", "Energy", "Mahalanobis"} <= table.keys()
    monitor = Monitor(net, Categorical(), rank=50).fit([digits.train_x], progress=False)
    monitor.calibrate([digits.heldout_x], progress=False)
    scores = torch.cat([monitor.score(digits.test_x), monitor.score(digits.novel_x)])
    truth = np.repeat([0, 1], [len(digits.test_x), len(digits.novel_x)])
    auroc, _, known, novel, cost, _ = table["SCOD"]
    assert float(auroc) == pytest.approx(roc_auc_score(truth, scores.numpy()), abs=2e-3)
    for share, x in ((known, digits.test_x), (novel, digits.novel_x)):
        flagged = 100 * float(monitor.flag(x).double().mean())
        assert float(share.rstrip("%")) == pytest.approx(flagged, abs=0.6)
    assert float(cost) > 1
    page = ReadPage(path.read_text(encoding="utf-8"))
    assert [row[0] for row in page.table("Methods, with")[1:]] == list(table)
    assert path.stat().st_size < 5_000_000
    assert "The stream changed after sample 150; the alarm rose at sample" in run.out
    assert "The stream changed after sample 150; the alarm rose at sample" in page.words


def test_the_results_show_all_that_the_demo_prints(demo_run):
    run, _ = demo_run
    page = Path(__file__).parents[2] / "docs" / "results" / "tables.md"
    lines = (
        page.read_text(encoding="utf-8")
        .partition("| score | AUROC")[2]
        .partition("\n\n")[0]
        .splitlines()
    )
    heading = ["score", "AUROC", *(cell.strip() for cell in lines[0].split("|")[1:-1])]
    told = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    printed = run.out.partition("score ")[2].partition("\n\n")[0].splitlines()
    assert " ".join(heading[1:]).split() == printed[0].split()
    assert [row[0] for row in told] == [line[:21].strip() for line in printed[1:]]
    for row, line in zip(told, printed[1:], strict=True):
        figures = [float(cell.rstrip("%")) for cell in row[1:5]]
        found = [float(cell.rstrip("%")) for cell in line[21:].split()[:4]]
        # processors round in their own ways while they train; times are of the day
        assert figures[:2] == pytest.approx(found[:2], abs=0.01), row[0]
        assert figures[2:] == pytest.approx(found[2:], abs=2.5), row[0]


def test_the_three_lines_of_the_demo_do_the_same(demo_run, trained, tmp_path, monkeypatch):
    run, _ = demo_run
    net, digits = trained
    code = textwrap.dedent(run.out.partition("The same in Python:")[2]).strip()
    assert len(code.splitlines()) == 3
    monkeypatch.chdir(tmp_path)
    given = {
        "net": net,
        "x": digits.novel_x,
        "train_loader": [digits.train_x],
        "heldout_loader": [digits.heldout_x],
    }
    ours = {"Monitor": Monitor, "Categorical": Categorical}
    exec(code, given | ours | {"ScoredSet": ScoredSet, "Report": Report})
    page = ReadPage((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.table("Scores of the sets")[1][0] == "new inputs"


def test_the_demo_refuses_a_place_it_cannot_write_to(tmp_path):
    run = scod("demo", "-o", "none/demo.html", cwd=tmp_path)
    assert run.code == 2
    assert "mkdir -p none" in run.err
    assert list(tmp_path.iterdir()) == []
