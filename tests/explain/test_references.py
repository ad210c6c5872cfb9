"""Nearest references against brute force; and all of an explanation in one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cases import conv_batchnorm, mlp
from engines import INF, NAN
from peaks import peak_of
from scodkit import Categorical, Gaussian, Monitor
from scodkit import explain as explain_module
from scodkit.errors import BatchError, OptionError
from scodkit.explain import Nearest, References


def brute_force(known: Tensor, asked: Tensor, count: int) -> tuple[list, list]:
    """Places and distances, in Python: sorted by distance, then by place."""
    index, distance = [], []
    for one in asked.double().flatten(1).tolist():
        pairs = sorted(
            (sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5, i)
            for i, other in enumerate(known.double().flatten(1).tolist())
        )[:count]
        index.append([i for _, i in pairs])
        distance.append([far for far, _ in pairs])
    return index, distance


@settings(deadline=None, max_examples=60)
@given(
    known=st.integers(1, 30),
    asked=st.integers(0, 9),
    shape=st.tuples(st.integers(1, 3), st.integers(0, 4)),
    at_a_time=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    data=st.data(),
)
def test_nearest_is_brute_force(known, asked, shape, at_a_time, dtype, data) -> None:
    count = data.draw(st.integers(1, known))
    generator = torch.Generator().manual_seed(known + asked)
    # few whole numbers: many are equally far, and sums of squares are exact
    samples = torch.randint(-2, 3, (known + asked, *shape), generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain_module, "_DISTANCES", at_a_time)
        found = References(samples[:known]).nearest(samples[known:], count)
    index, distance = brute_force(samples[:known], samples[known:], count)
    assert found.index.dtype == torch.int64
    assert found.distance.dtype == dtype
    assert found.index.shape == found.distance.shape == (asked, count)
    assert found.index.tolist() == index
    expected = torch.tensor(distance, dtype=dtype).view(asked, count)
    torch.testing.assert_close(found.distance, expected, rtol=1e-6, atol=0)


def test_near_samples_are_told_apart_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    base = 1e4 * torch.randn(1, 2, 20, generator=generator)
    known = base + torch.randn(50, 2, 20, generator=generator)
    asked = known[:9] + 0.1 * torch.randn(9, 2, 20, generator=generator)
    found = References(known).nearest(asked, count=5)
    index, distance = brute_force(known, asked, 5)
    assert found.index.tolist() == index
    torch.testing.assert_close(found.distance, torch.tensor(distance), rtol=1e-5, atol=0)


def test_dtype_and_graph_of_the_asked_do_not_matter() -> None:
    known = References(torch.randn(9, 2, 3).requires_grad_())
    asked = torch.randn(4, 2, 3, dtype=torch.float64).requires_grad_()
    found = known.nearest(asked)
    assert found.distance.dtype == torch.float32
    assert not found.distance.requires_grad
    assert found.index.tolist() == brute_force(known.features, asked, 3)[0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_samples_with_a_nan_are_near_nothing(bad: float) -> None:
    known, asked = torch.randn(9, 2, 3), torch.randn(4, 2, 3)
    expected = References(known).nearest(asked, 2)
    broken = asked.clone()
    broken[2, 1, 0] = bad
    found = References(known).nearest(broken, 2)
    good = torch.tensor([0, 1, 3])
    assert torch.equal(found.index[good], expected.index[good])
    assert torch.equal(found.distance[good], expected.distance[good])
    assert found.index[2].tolist() == [-1, -1]
    assert found.distance[2].tolist() == [INF, INF]


def test_what_is_refused() -> None:
    known = References(torch.zeros(5, 2, 3))
    assert (len(known), repr(known)) == (5, "References(5 samples, 2 directions, rank 3)")
    for count in (0, 6):
        with pytest.raises(OptionError, match=rf"expected 1 <= count <= 5, .* got {count}"):
            known.nearest(torch.zeros(1, 2, 3), count)
    for shape in ((1, 3, 2), (2, 3)):
        with pytest.raises(BatchError, match=r"shape \(B, 2, 3\).*got .*monitor.features"):
            known.nearest(torch.zeros(shape))
    for features in (torch.zeros(5, 6), torch.zeros(0, 2, 3), torch.zeros(5, 2, 3).int()):
        with pytest.raises(OptionError, match=r"features \(n, p, k\).*References\(torch.cat"):
            References(features)
    with pytest.raises(OptionError, match="a NaN or an infinity in 2 of 5 samples; leave"):
        References(torch.zeros(5, 2, 3).index_fill(0, torch.tensor([1, 4]), INF))


def test_many_references_take_little_memory() -> None:
    features = torch.randn(50_000, 2, 4)
    references = References(features)
    found: list[Nearest] = []
    peak = peak_of(lambda: found.append(references.nearest(features[:300])))
    assert found[0].index[:, 0].tolist() == list(range(300))
    assert peak < 40e6  # all distances with their order: 180 MB


def test_pictures_of_the_nearest() -> None:
    images, known = torch.rand(2, 1, 4, 5), torch.rand(7, 1, 4, 5)
    nearest = Nearest(torch.tensor([[6, 2], [-1, -1]]), torch.tensor([[0.5, 1.5], [INF, INF]]))
    figure = nearest.plot(images, known)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["asked", "reference 6, at 0.5", "reference 2, at 1.5"]
    for axes, image in zip(figure.axes, (images[0, 0], known[6, 0], known[2, 0]), strict=True):
        shown = torch.tensor(axes.images[0].get_array().data, dtype=image.dtype)
        torch.testing.assert_close(shown, (image - image.min()) / (image.max() - image.min()))
    with pytest.raises(BatchError, match="finite score"):
        nearest.plot(images, known, sample=1)
    with pytest.raises(OptionError, match="expected a sample from 0 to 3, got 6"):
        nearest.plot(images, known[:4])
    with pytest.raises(BatchError, match=r"expected an image .* got shape \(4,\)"):
        nearest.plot(torch.zeros(1, 4), known)


# --- All of it -----------------------------------------------------------------------------


def test_a_training_sample_is_nearest_to_itself() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    monitor = Monitor(mlp(3), Categorical(), rank=8).fit([x], progress=False)
    known = monitor.references(x.split(7), progress=False)
    nearest = monitor.explain(x[:9], references=known).nearest
    assert nearest is not None
    assert nearest.index.shape == (9, 3)
    assert nearest.index[:, 0].tolist() == list(range(9))
    size = known.features[:9].flatten(1).norm(dim=1)
    assert (nearest.distance[:, 0] <= 1e-5 * size).all()
    broken = x[:2].index_fill(0, torch.tensor([1]), NAN)
    index = monitor.explain(broken, references=known).nearest.index
    assert index[0, 0] == 0
    assert index[1].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(("there", "named"), [(2, 2), (9, 3)])
def test_three_are_named_if_there_are_so_many(there: int, named: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 3)
    monitor = Monitor(mlp(3), Categorical(), rank=4).fit([x], progress=False)
    known = monitor.references([x[:there]], progress=False)
    assert monitor.explain(x, references=known).nearest.index.shape == (9, named)


@pytest.mark.parametrize("saliency", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("build", [mlp, conv_batchnorm, "sequence of images"])
def test_an_explanation_is_drawn_whole(build, saliency: bool, known: bool) -> None:
    torch.manual_seed(0)
    shape = {mlp: (3,), conv_batchnorm: (2, 5, 5)}.get(build, (2, 1, 3, 3))
    model = (
        nn.Sequential(nn.Flatten(), nn.Linear(18, 3)) if isinstance(build, str) else build(3)
    )
    x = torch.randn(20, *shape)
    monitor = Monitor(model, Gaussian(), rank=4).fit([x], progress=False)
    references = monitor.references([x], progress=False) if known else None
    told = monitor.explain(x[:4], saliency=saliency, references=references)
    assert (told.saliency is not None) == saliency
    assert (told.nearest is not None) == known
    if told.saliency is not None:
        assert torch.equal(told.saliency.input, x[:4])
        assert told.saliency.gradient.shape == x[:4].shape
    # rows of a table have columns; slopes of an image come beside it, with a bar of colours; of
    # other shapes, not at all
    panels = 2 + (build is mlp) + known + saliency * {mlp: 1, conv_batchnorm: 3}.get(build, 0)
    assert len(told.plot(sample=2).axes) == panels
    with pytest.raises(OptionError, match="expected a sample from 0 to 3, got 4"):
        told.plot(4)
