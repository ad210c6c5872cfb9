"""A sample's score is its own: the same in every batch as alone, or there is none.

Models that reorder, route, pack, pad or couple their samples are drawn, with data that hides
it from whoever looks at the first samples only. ``python tests/factors/test_ownership.py 2000``
draws so many cases and prints what became of them.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

if __name__ == "__main__":  # pytest finds helpers by itself
    sys.path.append(str(Path(__file__).parents[1] / "support"))

from dense_reference import OddModel, Reference, Verdict, difference, engine_of, judged
from drawn_models import COUPLINGS, INPUT_PICKS, ORDERS, PACKS, PADS, PICKS, ROUTES, WHENS
from odd_layers import Net
from scodkit import Categorical, Gaussian, Monitor
from scodkit.sketch import Exact, Nystrom

NAN = float("nan")
RANK = 200  # more than there are rows: the score keeps all of the data

# --- Models --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What a drawn model does with the samples of its batch.

    Args:
        family: "reorder", "route", "pack", "pad" or "couple".
        how: Which way, of `drawn_models`.
        back: Reordering: the way back.
        order: Reordering: in which order.
        when: Coupling: in which batches.
        late: Whether that is behind the first layer, not before it.
        bias: Whether layers have biases.
        strength: Of a coupling.
        chosen: Parameters that count.
    """

    family: str
    how: str
    back: str = "index"
    order: str = "by value"
    when: str = "always"
    late: bool = False
    bias: bool = True
    strength: float = 1.0
    chosen: tuple[str, ...] = ("*",)

    def __str__(self) -> str:
        words = {"reorder": f", {self.order}", "couple": f", {self.when}"}
        return f"{self.family}: {self.how}{words.get(self.family, '')}"

    @property
    def shape(self) -> tuple[int, ...]:
        return (3, 4) if self.family == "pack" else (4,)

    def odd(self) -> OddModel:
        def build() -> nn.Module:
            layers = {n: nn.Linear(4, 3 if n == "b" else 4, bias=self.bias) for n in "abc"}
            return Net(_FORWARDS[self.family](self), **layers)

        likelihood = Categorical() if self.bias else Gaussian((1.0, 1.7, 0.6))
        return OddModel(str(self), build, lambda size: None, likelihood, chosen=self.chosen)


def reordering(model: Model) -> Callable[..., Tensor]:
    pick = (PICKS if model.late else INPUT_PICKS)[model.how]
    back = PICKS[model.back]

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        order = ORDERS[model.order](x)
        if model.late:
            return back(m.b(torch.tanh(pick(m.a(x), order))), order.argsort())
        return m.b(back(torch.tanh(m.a(pick(x, order))), order.argsort()))

    return forward


def padding(model: Model) -> Callable[..., Tensor]:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        if model.late:
            room, own = PADS[model.how](torch.tanh(m.a(x)))
            return m.b(room)[own]
        room, own = PADS[model.how](x)
        return m.b(torch.tanh(m.a(room))[own])

    return forward


def coupling(model: Model) -> Callable[..., Tensor]:
    def mixed(x: Tensor) -> Tensor:
        return x + model.strength * (COUPLINGS[model.how](x) - x)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        now = WHENS[model.when](x)
        h = torch.tanh(m.a(mixed(x) if now and not model.late else x))
        return m.b(mixed(h) if now and model.late else h)

    return forward


def routing(model: Model) -> Callable[..., Tensor]:
    return lambda m, x: m.b(torch.tanh(ROUTES[model.how](m, x)))


def packing(model: Model) -> Callable[..., Tensor]:
    return lambda m, x: m.b(PACKS[model.how](m, x))


_FORWARDS: dict[str, Callable[[Model], Callable[..., Tensor]]] = {
    "reorder": reordering,
    "route": routing,
    "pack": packing,
    "pad": padding,
    "couple": coupling,
}

# --- Data ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """What a monitor is fitted on, and asked.

    Args:
        fitted: Sizes of batches.
        first: What the first samples are: "plain", or alike in what matters.
        count: How many first samples.
        scored: Sizes of batches.
        asked: What one of the scored samples is: "plain", "outlier" or "nan".
        reload: Whether the monitor is saved and loaded before it is asked.
        products: Whether it is fitted by products.
        seed: Of all numbers.
    """

    fitted: tuple[int, ...] = (4, 4, 4)
    first: str = "tied"
    count: int = 4
    scored: tuple[int, ...] = (6,)
    asked: str = "plain"
    reload: bool = False
    products: bool = False
    seed: int = 0

    def batches(self, shape: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """Batches to fit, and batches to score."""
        generator = torch.Generator().manual_seed(self.seed)
        total = sum(self.fitted) + sum(self.scored)
        x = torch.randn(total, *shape, generator=generator, dtype=torch.float64)
        keys = torch.randint(-1, 4, x.shape[:-1], generator=generator)
        keys = torch.where(keys == 0, 2, keys)
        # what a negative key does is not told by the fit
        keys[: sum(self.fitted)] = keys[: sum(self.fitted)].abs()
        x[..., 0] = keys
        _make_alike(x[: self.count], self.first)
        if self.first == "all tied":
            x[: sum(self.fitted), ..., 0] = 1.0
        last = x[sum(self.fitted) :][-1]
        if self.asked == "outlier":
            last[..., 1:] *= 50.0
        elif self.asked == "nan":
            last[..., 1] = NAN
        parts = x.split([*self.fitted, *self.scored])
        return list(parts[: len(self.fitted)]), list(parts[len(self.fitted) :])


def _make_alike(x: Tensor, first: str) -> None:
    if first == "tied":
        x[..., 0] = 1.0
    elif first == "closed":
        x[..., 0] = -1.0
    elif first == "blank":
        x.zero_()
    elif first == "repeated":
        x[:] = x[0].clone()
    elif first == "nan":
        x[..., 1] = NAN


def verdict(model: Model, data: Data) -> Verdict:
    odd = model.odd()
    fitted, scored = data.batches(model.shape)

    def work() -> tuple[str, str]:
        sketch = Nystrom() if data.products else Exact()
        selection = "all" if model.chosen == ("*",) else list(model.chosen)
        monitor = Monitor(
            odd.model(), odd.likelihood, RANK, sketch=sketch, parameters=selection
        )
        on_bad: Any = "skip" if data.first == "nan" else "raise"
        asked_for = True if data.products else None
        monitor.fit(
            [x.clone() for x in fitted], progress=False, on_bad=on_bad, products=asked_for
        )
        if data.reload:
            with tempfile.TemporaryDirectory() as folder:
                monitor.save(Path(folder) / "monitor.scod")
                monitor = Monitor.load(Path(folder) / "monitor.scod", odd.model())
        reference = Reference(odd, fitted, None)
        wrong = ""
        for batch in scored:
            found = monitor(batch.clone())
            wrong = wrong or difference(found.score, found.output, batch, reference)
        return engine_of(monitor), wrong

    return judged(work)


# --- Draws ---------------------------------------------------------------------------------

BOOLEANS = st.booleans()
FAMILIES = {
    "reorder": st.builds(
        lambda late, how, how_late, **rest: Model(
            "reorder", how_late if late else how, late=late, **rest
        ),
        late=BOOLEANS,
        how=st.sampled_from(list(INPUT_PICKS)),
        how_late=st.sampled_from(list(PICKS)),
        back=st.sampled_from(list(PICKS)),
        order=st.sampled_from(["by value", "by value", "reversed", "evens first"]),
        bias=BOOLEANS,
        chosen=st.sampled_from([("*",), ("*",), ("a.*",), ("b.*",)]),
    ),
    "route": st.builds(Model, st.just("route"), st.sampled_from(list(ROUTES)), bias=BOOLEANS),
    "pack": st.builds(Model, st.just("pack"), st.sampled_from(list(PACKS)), bias=BOOLEANS),
    "pad": st.builds(
        Model, st.just("pad"), st.sampled_from(list(PADS)), late=BOOLEANS, bias=BOOLEANS
    ),
    "couple": st.builds(
        Model,
        st.just("couple"),
        st.sampled_from(list(COUPLINGS)),
        when=st.sampled_from(list(WHENS)),
        late=BOOLEANS,
        bias=BOOLEANS,
        strength=st.sampled_from([1.0, 0.1, 1e-3, 1e-6]),
    ),
}
DATA = st.builds(
    Data,
    fitted=st.sampled_from([(4, 4, 4), (1,) * 8, (8, 3), (3, 3, 3), (2, 5, 1, 3), (1, 6, 4)]),
    first=st.sampled_from(["plain", "tied", "blank", "repeated", "closed", "nan", "all tied"]),
    count=st.integers(3, 6),
    scored=st.sampled_from([(6,), (1, 8), (4, 4), (3, 8, 2), (1, 1, 5), (2, 3)]),
    asked=st.sampled_from(["plain", "plain", "outlier", "nan"]),
    reload=BOOLEANS,
    products=st.sampled_from([False, False, False, True]),
    seed=st.integers(0, 9999),
)


def fails(found: Verdict) -> bool:
    return found.kind in ("wrong", "crashed")


def fixed(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # a case is small as it is
        suppress_health_check=list(HealthCheck),
    )


NAMED = [
    *(Model("reorder", how, back=how) for how in PICKS),
    *(Model("reorder", how) for how in INPUT_PICKS if how not in PICKS),
    *(Model("route", how) for how in ROUTES),
    *(Model("pack", how, bias=False) for how in PACKS),
    *(Model("pad", how) for how in PADS),
    *(Model("couple", how) for how in COUPLINGS),
    *(Model("couple", "mean", when=when) for when in WHENS if when != "always"),
    *(Model("couple", "count", when=when) for when in WHENS if when != "always"),
]
# what has hidden most from a look at the first samples
HIDING = {
    "reorder": Data((6, 6), "tied", scored=(6,)),
    "route": Data((1,) * 8, "plain", scored=(1, 8), reload=True),
    "pack": Data((6, 6), "blank", count=3, scored=(5,)),
    "pad": Data((4, 4), "repeated", scored=(6,)),
    "couple": Data((1,) * 8, "plain", scored=(1, 6), asked="outlier"),
}


@pytest.mark.parametrize("model", NAMED, ids=str)
def test_each_way_with_data_that_hides_it(model: Model) -> None:
    found = verdict(model, HIDING[model.family])
    assert not fails(found), f"{found.kind} by {found.engine}: {found.detail}"


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_belong_to_their_samples(family: str) -> None:
    @fixed(15)
    @given(FAMILIES[family], DATA)
    def property_of(model: Model, data: Data) -> None:
        found = verdict(model, data)
        assert not fails(found), f"{found.kind} by {found.engine}: {found.detail}"

    property_of()


ORDINARY = [
    Model("pack", "sample major"),
    Model("route", "dense"),
    Model("route", "where", bias=False),
]


@fixed(12)
@given(st.sampled_from(ORDINARY), DATA)
def test_ordinary_models_are_scored_by_the_fast_engine(model: Model, data: Data) -> None:
    assume(not data.products or data.first != "nan")  # nothing to try products on
    found = verdict(model, data)
    assert found.column == "HookEngine", f"{found.kind} by {found.engine}: {found.detail}"


def test_a_weak_coupling_is_noticed_in_single_precision() -> None:
    """As far as rounding goes: what is left unnoticed moves no score by a ten-thousandth."""

    def work() -> tuple[str, str]:
        model = Model("couple", "mean", strength=5e-4).odd().model().float()
        fitted, (batch,) = Data((8, 8), "plain", scored=(8,)).batches((4,))
        monitor = Monitor(model, Gaussian(), RANK, sketch=Exact())
        monitor.fit([x.float() for x in fitted], progress=False)
        together = monitor.score(batch.float())
        alone = torch.cat([monitor.score(x[None].float()) for x in batch])
        off = float(((together - alone) / alone).abs().max())
        return engine_of(monitor), f"{off:.1e} apart" if off > 1e-4 else ""

    found = judged(work)
    assert not fails(found), found.detail


def main(examples: int) -> None:
    """Draw cases, and print what became of them."""
    torch.set_num_threads(1)
    found: dict[tuple[Model, Data], Verdict] = {}

    @fixed(2 * examples)  # some come more than once
    @given(st.one_of(*FAMILIES.values()), DATA)
    def draw(model: Model, data: Data) -> None:
        if len(found) < examples and (model, data) not in found:
            found[model, data] = verdict(model, data)

    draw()
    for (model, data), one in found.items():
        if fails(one):
            sys.stdout.write(f"{one.kind}: {model!r} {data!r}: {one.detail[:160]}\n")
    for title, names in (
        ("by family", lambda model: model.family),
        ("silent or not ours", str),
    ):
        only_bad = title != "by family"
        counts = Counter(
            (names(model), one.column)
            for (model, _), one in found.items()
            if fails(one) or not only_bad
        )
        sys.stdout.write(f"{title}\n")
        for (name, column), count in sorted(counts.items()):
            sys.stdout.write(f"  {name:45} {column:18} {count}\n")
    counts = Counter(one.column for one in found.values())
    sys.stdout.write(f"{len(found)} cases: {dict(counts.most_common())}\n")
    sys.exit(any(map(fails, found.values())))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
