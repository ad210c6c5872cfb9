"""The columns of a table in explanations, with a real one: patients, one of them of age 580."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from saved_monitors import Saved
from scodkit import Categorical, Fused, Gaussian, Monitor
from scodkit.errors import OptionError
from scodkit.explain import Columns
from scodkit.explain.words import Names
from scodkit.model.input_range import InputRange
from scodkit.model.inputs import Inputs
from scodkit.sharded import ShardedMonitor

TRAINED = 300


class Standardised(nn.Module):
    """Patients as they come, in years and mmHg; the network looks at standardised numbers."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("spread", x.std(0))
        self.first, self.last = nn.Linear(10, 12), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first((x - self.mean) / self.spread)))


@cache
def patients() -> pd.DataFrame:
    return load_diabetes(as_frame=True, scaled=False).data


def numbers(frame: pd.DataFrame) -> Tensor:
    return torch.tensor(frame.to_numpy()).float()


def net() -> Standardised:
    torch.manual_seed(0)
    return Standardised(numbers(patients()[:TRAINED]))


@cache
def monitor() -> Monitor:
    fitted = Monitor(net(), Gaussian(), rank=20).fit(patients()[:TRAINED], progress=False)
    return fitted.calibrate(patients()[TRAINED:], progress=False)


def with_a_slip(age: float = 580) -> pd.DataFrame:
    rows = patients()[TRAINED : TRAINED + 5].copy()
    rows.iloc[2, 0] = age
    return rows


def test_of_a_patient_of_580_years_the_age_comes_first() -> None:
    told = monitor().explain(with_a_slip(), saliency=True)
    train = patients()[:TRAINED].to_numpy().astype(np.float32).astype(np.float64)
    age = train[:, 0]
    beyond, distance = (580 - age.max()) / age.std(), (580 - age.mean()) / age.std()
    assert float(told.columns.outside[2, 0]) == pytest.approx(beyond, rel=1e-9)
    assert float(told.columns.distance[2, 0]) == pytest.approx(distance, rel=1e-9)
    first, second, *others = told.words(2).splitlines()
    assert first == (
        f"age = 580 is far outside the training data: {beyond:.3g} spreads above its largest "
        f"value, {age.max():.5g}"
    )
    p_value = monitor()(with_a_slip()).p_value[2]
    assert second.startswith(f"score {float(told.score[2]):.3g} nats, p-value {p_value:.3g}")
    assert others[0].startswith("layers: ")
    assert told.columns.names == tuple(patients().columns)
    assert told.saliency.unit == "nats per spread"
    slopes = (told.saliency.gradient[2].double().numpy() * train.std(0)).tolist()
    by_name = dict(zip(patients().columns, slopes, strict=True))
    steepest = sorted(by_name, key=lambda name: -abs(by_name[name]))[:5]
    assert list(told.saliency.steepest(2)) == steepest
    for name, slope in told.saliency.steepest(2).items():
        assert slope == pytest.approx(by_name[name], rel=1e-9)


def test_of_a_known_patient_the_farthest_column_comes_last() -> None:
    told = monitor().explain(patients()[:4])
    for i in range(4):
        assert "outside the training data" not in told.words(i).splitlines()[0]
        away = told.columns.distance[i]
        name = told.columns.names[int(away.abs().argmax())]
        last = told.words(i).splitlines()[-1]
        assert last.startswith(
            f"no column is outside the training data; farthest from its mean is {name} = "
        )
        assert last.endswith(f"at {float(away[away.abs().argmax()]):+.3g} spreads")


def test_all_that_is_drawn_says_which_sample(tmp_path: Path) -> None:
    told = monitor().explain(with_a_slip(), saliency=True)
    for figure in (told.plot(2), told.columns.plot(2), told.saliency.plot(2)):
        figure.savefig(tmp_path / "figure.svg")
        title = figure._suptitle or figure.subfigs[0]._suptitle
        assert title.get_text().startswith("sample 2 of 5")
    assert told.layers.plot(-1).axes[0].get_title() == "sample 4 of 5"
    labels = [text.get_text() for text in told.columns.plot(2).axes[0].get_yticklabels()]
    assert labels[0] == "age = 580"
    headline = told.plot(2, "Ann").subfigs[0]._suptitle.get_text()
    assert headline.startswith("Ann: score ")
    assert "p-value" in headline


def test_a_fused_score_names_the_column_too() -> None:
    fused = Fused(net(), Gaussian(), rank=10).fit(patients()[:TRAINED], progress=False)
    fused.calibrate(patients()[TRAINED:], progress=False)
    told = fused.explain(with_a_slip())
    assert told.words(2).startswith("age = 580 is far outside the training data: ")
    assert told.words(0).startswith("score ")
    named = fused.explain(numbers(with_a_slip()), columns=[f"c{i}" for i in range(10)])
    assert named.words(2).startswith("c0 = 580 is far outside")


def test_columns_that_are_not_numbers_come_first() -> None:
    told = monitor().explain(with_a_slip(float("nan")))
    assert told.words(2).splitlines() == [
        "age is nan: not a finite number",
        f"score inf nats: a NaN or an infinity in its inputs or outputs, p-value "
        f"{float(told.p_value[2]):.3g}, predicted not finite",
    ]


@pytest.mark.parametrize("count", [1, 5])
def test_names_come_from_whoever_gives_them(count: int) -> None:
    x, own = numbers(with_a_slip())[:count], [f"own {i}" for i in range(10)]
    assert monitor().explain(x).columns.names[0] == "age"  # as in the fit
    assert monitor().explain(x, columns=own).columns.names == tuple(own)
    assert monitor().explain(with_a_slip(), columns=own).columns.names == tuple(own)
    assert monitor().explain((with_a_slip(), [0] * 5)).columns.names[0] == "age"
    known = Monitor(net(), Gaussian(), rank=5).fit(numbers(patients())[:50], progress=False)
    assert known.explain(x).columns.names[0] == "column 0"
    known.notes["columns"] = own
    assert known.explain(x).columns.names == tuple(own)
    known.notes = {"inputs": {"columns": own[::-1]}}  # as the command line notes them
    assert known.explain(x).columns.names == tuple(own[::-1])
    assert known.explain(with_a_slip()).columns.names[0] == "age"


def test_a_frame_with_more_columns_than_the_model_takes_names_none() -> None:
    picked = Monitor(net(), Gaussian(), rank=5, inputs=lambda f: numbers(f.iloc[:, :10]))
    frame = patients().assign(target=1.0)
    picked.fit([frame[:50]], progress=False)
    assert picked.explain(frame[:3]).columns.names[0] == "column 0"


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (["age", "sex"], "a list of 10 different names, one for each column, got 2"),
        (["age"] * 10, "a list of 10 different names"),
        ("abcdefghij", "a list of 10 different names"),
    ],
)
def test_names_that_do_not_fit_are_refused(columns, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        monitor().explain(with_a_slip(), columns=columns)


def test_images_have_no_columns() -> None:
    images = torch.randn(20, 1, 4, 4)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    fitted = Monitor(flat, Categorical(), rank=3).fit([images], progress=False)
    assert fitted.fitted.columns.pack() == {}
    assert fitted.explain(images[:2]).columns is None
    with pytest.raises(OptionError, match=r"a table .* of at most 64 columns to name"):
        fitted.explain(images[:2], columns=["a"])


def test_several_tables_follow_one_another() -> None:
    seen, call = InputRange(), Inputs((torch.rand(9, 2),), {"z": torch.rand(9, 3)})
    seen.add(call, tables_only=True)
    table = Columns.of(seen, call, Names(columns=list("abcde")))
    assert table.values.shape == table.distance.shape == (9, 5)
    assert not table.outside.any()


# --- What a fit keeps ---


def kept(one: Monitor) -> dict[str, Tensor]:
    return one.fitted.columns.pack()


def expected(frame: pd.DataFrame) -> dict[str, Tensor]:
    x = numbers(frame).double()
    scatter = (x - x.mean(0)).square().sum(0)
    count = torch.full((10,), float(len(x)), dtype=torch.float64)
    return {"0:10": torch.stack([count, x.mean(0), scatter, x.amin(0), x.amax(0)])}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-9)


def test_spreads_are_those_of_all_data(tmp_path: Path) -> None:
    first, second = patients()[:100], patients()[100:150]
    one = Monitor(net(), Gaussian(), rank=5).fit(first, progress=False)
    same(kept(one), expected(first))
    other = Monitor(net(), Gaussian(), rank=5).fit(second, progress=False)
    same(kept(Monitor(net(), Gaussian(), rank=5).fit(first, progress=False).merge(other)),
         expected(patients()[:150]))  # fmt: skip
    one.update(second, progress=False)
    same(kept(one), expected(patients()[:150]))
    one.save(tmp_path / "m.scod", sketch=False)
    torch.testing.assert_close(
        kept(Monitor.load(tmp_path / "m.scod", net())), kept(one), rtol=0, atol=0
    )
    sharded = ShardedMonitor(net(), Gaussian(), rank=5).fit([numbers(first)], progress=False)
    sharded.save(tmp_path / "s.scod")
    same(kept(Monitor.load(tmp_path / "s.scod", net())), expected(first))


def test_a_fit_that_goes_on_has_them_whole(tmp_path: Path) -> None:
    batches = numbers(patients()[:90]).split(30)

    def breaks_off() -> Iterator[Tensor]:
        yield from batches[:2]
        raise KeyError

    options = {"checkpoint": tmp_path / "c", "every": 1, "progress": False}
    with pytest.raises(KeyError):
        Monitor(net(), Gaussian(), rank=5).fit(breaks_off(), **options)
    resumed = Monitor(net(), Gaussian(), rank=5).fit(iter(batches), **options)
    same(kept(resumed), expected(patients()[:90]))


@pytest.mark.filterwarnings("ignore::scodkit.errors.NoProbesWarning")
@pytest.mark.filterwarnings("ignore::scodkit.errors.RepeatedDataWarning")
def test_files_of_earlier_versions_say_that_spreads_are_not_known() -> None:
    saved = Saved("gaussian")
    loaded, query = saved.loaded(), saved.values["query"]
    assert loaded.fitted.columns.pack() == {}
    told = loaded.explain(query, saliency=True)
    assert told.columns.distance.isnan().all()
    last = told.words(0).splitlines()[-1]
    assert last.startswith("how far columns are from the training data is not known")
    assert told.saliency.unit == "nats per unit"
    assert told.plot(0).axes
    loaded.update([torch.randn_like(query)], progress=False)
    assert loaded.fitted.columns.pack() == {}  # of a part of the data nothing is said


def test_of_one_unknown_part_nothing_is_said() -> None:
    one = Monitor(net(), Gaussian(), rank=5).fit(patients()[:60], progress=False)
    other = Monitor(net(), Gaussian(), rank=5).fit(patients()[60:90], progress=False)
    other._scorer.fitted = replace(other.fitted, columns=InputRange())
    assert kept(one.merge(other)) == {}
