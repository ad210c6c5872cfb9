"""The same numbers on a GPU; run where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from cases import CASES, Case, conv_batchnorm
from draws import noise
from engines import Uses, close, everything, joined, randomised
from scodkit import Categorical, Monitor, likelihoods
from scodkit.baselines import DeepEnsemble
from scodkit.errors import (
    MergeError,
    NonFiniteError,
    StaleMonitorError,
    SuspiciousInputWarning,
)
from scodkit.factors import pullback
from scodkit.factors.alone import LoopEngine
from scodkit.factors.engine import Engine
from scodkit.factors.hooks import HookEngine
from scodkit.factors.rules import broadcast
from scodkit.fit.data import digests_of
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.numerics import kernels
from scodkit.numerics.matmul import _is_long, add_matmul, matmul
from scodkit.sketch import (
    SRFT,
    Exact,
    Fold,
    FrequentDirections,
    Gaussian,
    Map,
    Nystrom,
    Sketch,
    SparseSign,
    TwoSided,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def data(case: Case, size: int, seed: int) -> object:
    call = case.inputs(size, 4, seed)
    return dict(call.kwargs) if call.kwargs else call.args[0]


@pytest.mark.parametrize("mapping", [Fold(), Gaussian(), SRFT(), SparseSign()], ids=str)
def test_maps_are_the_same_on_every_device(mapping: Map) -> None:
    here = torch.empty(0, dtype=torch.float64)
    shape = (5000, 64)
    on_cpu = mapping.rows(1000, 3000, shape, 7, here)
    on_gpu = mapping.rows(1000, 3000, shape, 7, here.cuda()).cpu()
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-12, atol=1e-14)


def test_inputs_of_another_scale_are_noticed_within_32_calls() -> None:
    x = torch.rand(32, 3, device="cuda")
    for first in (0, 1, 40):
        model = nn.Linear(3, 2).cuda()
        monitor = Monitor(model, likelihoods.Gaussian(), rank=2).fit([x], progress=False)
        assert monitor.fitted.input_range == {"0": (float(x.min()), float(x.max()))}
        for _ in range(first):
            monitor.score(x)
        with pytest.warns(SuspiciousInputWarning, match="divide by 255") as told:
            torch.cat([monitor.score(255 * x) for _ in range(32)])
        assert len(told) == 1


def test_gradients_may_take_an_eighth_of_the_memory() -> None:
    monitor = Monitor(CASES[0].model(4), Categorical())
    assert monitor.memory_budget == 2**30
    monitor.to("cuda")
    whole = torch.cuda.get_device_properties(0).total_memory
    assert monitor.memory_budget == max(2**30, whole // 8)
    monitor.memory_budget = 5
    assert monitor.memory_budget == 5


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize(
    "sketch", [Nystrom(12), TwoSided(16), FrequentDirections(8), Exact()], ids=str
)
def test_scores_agree_with_the_cpu(case: Case, sketch: Sketch, tmp_path: Path) -> None:
    train, test = data(case, 30, 1), data(case, 6, 2)
    model = case.model(4)
    monitor = Monitor(model, Categorical(), rank=6, sketch=sketch)
    expected = monitor.fit([train], progress=False).score(test)
    monitor.save(tmp_path / "cpu.scod")
    other = data(case, 30, 3)
    part = Monitor(model, Categorical(), rank=6, sketch=sketch).fit([other], progress=False)

    model.cuda()  # the monitor follows
    followed = monitor.score(test)
    assert followed.is_cuda
    torch.testing.assert_close(followed.cpu(), expected, rtol=1e-7, atol=1e-12)

    fitted = Monitor(model, Categorical(), rank=6, sketch=sketch).fit([train], progress=False)
    assert fitted.basis.vectors.is_cuda
    torch.testing.assert_close(fitted.score(test).cpu(), expected, rtol=1e-6, atol=1e-12)

    loaded = Monitor.load(tmp_path / "cpu.scod", model)
    assert loaded.basis.vectors.is_cuda
    torch.testing.assert_close(loaded.score(test).cpu(), expected, rtol=1e-7, atol=1e-12)

    if sketch.linear:  # a part fitted on the CPU merges with one fitted here
        both = fitted.merge(part)
        assert both.basis.num_data == 60
        whole = Monitor(model, Categorical(), rank=6, sketch=sketch)
        whole.fit([train, other], progress=False)
        torch.testing.assert_close(both.basis.values, whole.basis.values, rtol=1e-6, atol=1e-9)
    fitted.to("cpu")
    assert not fitted.score(test).is_cuda


def test_half_precision_on_the_gpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    x, test = torch.randn(64, 8), torch.randn(8, 8)
    full = Monitor(model, Categorical(), rank=8).fit([x], progress=False).score(test)
    half = Monitor(model.bfloat16(), Categorical(), rank=8, inputs=lambda b: b.bfloat16())
    scores = half.fit([x], progress=False).score(test)
    assert half.basis.vectors.dtype == torch.float32
    torch.testing.assert_close(scores, full, rtol=0.2, atol=0.02 * float(full.max()))


@pytest.mark.parametrize("likelihood", [Categorical(), Categorical(directions=1)], ids=str)
def test_a_cuda_graph_scores_as_eagerly(likelihood: Likelihood) -> None:
    torch.manual_seed(0)
    model = conv_batchnorm(4).double().eval().cuda()
    train = noise(40, 2, 5, 5).cuda()
    recorded, eager = (
        Monitor(model, likelihood, rank=6).fit([train], progress=False) for _ in range(2)
    )
    recorded.compile(train[:6])

    def check(batch: Tensor) -> Tensor:
        found, expected = recorded(batch), eager(batch)
        torch.testing.assert_close(found.score, expected.score, rtol=1e-8, atol=0)
        torch.testing.assert_close(found.output, expected.output, rtol=1e-8, atol=1e-10)
        bounds, wanted = recorded.certify(batch), eager.certify(batch)
        torch.testing.assert_close(bounds.lower, wanted.lower, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(bounds.upper, wanted.upper, rtol=1e-8, atol=1e-12)
        return found.score

    first = check(noise(6, 2, 5, 5, seed=1).cuda())
    kept = first.clone()
    check(noise(6, 2, 5, 5, seed=2))  # moved to the model
    assert torch.equal(first, kept)
    check(noise(5, 2, 5, 5, seed=3).cuda())
    strided = noise(6, 5, 5, 2, seed=4).cuda().permute(0, 3, 1, 2)
    check(strided)
    bad = noise(6, 2, 5, 5, seed=5).cuda()
    bad[2, 0, 0, 0] = float("nan")
    assert recorded.score(bad).isinf().tolist() == [i == 2 for i in range(6)]
    with torch.no_grad():
        model[0].weight.mul_(2)
        for monitor in (recorded, eager):
            with pytest.raises(StaleMonitorError):
                monitor.score(train[:6])
        model[0].weight.div_(2)
    check(noise(6, 2, 5, 5, seed=6).cuda())
    for monitor in (recorded, eager):
        monitor.prior_scale = 0.1
    check(noise(6, 2, 5, 5, seed=7).cuda())


def rows_of(
    kind: type[Engine], model: nn.Module, call: Inputs, directions: int, *, recorded: bool
) -> Tensor:
    network = Network(model)
    with network.evaluating():
        engine = kind(network, everything(network))
        linear = (engine.for_recording() if recorded else engine).linearize(call)
        rows = noise(call.batch_size, directions, linear.output[0].numel(), seed=2)
        return joined(linear.pull_back(rows.cuda()))


def same_as_the_loop(model: nn.Module, x: Tensor) -> None:
    assert kernels.run_on(x.cuda())
    model, call = randomised(model.cpu()).cuda(), Inputs((x.cuda(),), {})
    for directions in (1, 2, 5):
        expected = rows_of(LoopEngine, model, call, directions, recorded=False)
        assert expected.any()
        for recorded in (False, True):
            found = rows_of(HookEngine, model, call, directions, recorded=recorded)
            close(found, expected, atol=1e-11)


@pytest.mark.parametrize("limit", [0, 1 << 62], ids=["one by one", "in one call"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.batched and c.name != "dict"], ids=lambda c: c.name
)
def test_directions_agree_with_the_loop(
    case: Case, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pullback, "_AT_ONCE", 0)
    monkeypatch.setattr(pullback, "_BATCHED", limit)
    same_as_the_loop(case.model(4), case.inputs(5, 4, seed=1).args[0])


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Uses(lambda m, x: x * m.w, w=(3, 1)), (4, 1, 70)),
        (Uses(lambda m, x: x * m.w + m.b, w=(3, 1, 1), b=(3, 1, 1)), (4, 3, 9, 9)),
        (Uses(lambda m, x: x * m.w, w=(3, 1)), (4, 3, 63)),
        (Uses(lambda m, x: x * m.w, w=(70,)), (4, 3, 70)),
        (Uses(lambda m, x: m.norm(x), norm=nn.BatchNorm2d(3)), (4, 3, 8, 8)),
        (Uses(lambda m, x: m.norm(x), norm=nn.GroupNorm(1, 3)), (4, 3, 8, 9)),
    ],
    ids=["expanded", "scale and shift", "few", "other axis", "batch norm", "group norm"],
)
@pytest.mark.parametrize("limit", [0, 1 << 62], ids=["as a product", "as a sum"])
def test_broadcast_parameters_over_many_positions(
    model: nn.Module, shape, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "_SAMPLES", limit)
    same_as_the_loop(model, noise(*shape, seed=1))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv2d(3, 4, 3, padding=1), (4, 3, 9, 11)),
        (nn.Conv2d(3, 5, (7, 2), stride=(2, 3), padding=(3, 0)), (4, 3, 30, 40)),
        (nn.Conv2d(3, 2, 3, dilation=(2, 1), padding="same"), (2, 3, 6, 5)),
        (nn.Conv2d(3, 2, (2, 4), padding="same"), (2, 3, 6, 5)),
        (nn.Conv2d(2, 3, 1, stride=2), (3, 2, 40, 41)),
        (nn.Conv2d(2, 3, 1), (3, 2, 4, 8)),
        (nn.Conv2d(2, 3, 1), (3, 2, 3, 7)),
        (nn.Conv2d(2, 3, 3), (1, 2, 50, 40)),
        (nn.Conv2d(2, 3, 3), (1, 2, 6, 6)),
        (nn.Conv2d(4, 6, 3, groups=2), (3, 4, 7, 7)),
        (Uses(lambda m, x: m.c(x.flatten(0, 1)).view(len(x), -1), c=nn.Conv2d(2, 3, 3)), ()),
        (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), (4, 3, 9, 11)),
    ],
    ids=[
        "padded",
        "strided",
        "dilated",
        "same",
        "1 x 1",
        "every",
        "every, odd",
        "one image",
        "one small image",
        "groups",
        "frames",
        "channels last",
    ],
)
def test_convolutions_agree_with_the_loop(model: nn.Module, shape: tuple[int, ...]) -> None:
    same_as_the_loop(nn.Sequential(model, nn.Flatten()), noise(*(shape or (3, 2, 2, 5, 6))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_patches_are_those_of_unfold(dtype: torch.dtype, stride: int) -> None:
    x = noise(2, 3, 4, 13, 90).to(dtype).cuda()
    expected = F.unfold(x.flatten(0, 1), (3, 2), 2, 1, stride)
    down, across = 11 // stride + (stride > 1), 90 // stride
    assert expected.shape[-1] == down * across
    fill = 16
    found = kernels.patches(x, (3, 2), (stride, stride), (2, 2), (1, 1), (down, across), fill)
    assert found.shape[-1] % fill == 0
    found, filled = found[..., : down * across], found[..., down * across :]
    assert torch.equal(found.transpose(0, 1).flatten(0, 1), expected)
    assert not filled.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("b", "q", "n", "k"),
    [(1, 1, 1, 1), (1, 2, 3_000_001, 7), (1, 5, 9216, 100), (2, 4, 777, 128), (8, 1, 50, 3)],
)
def test_projections_agree_with_float64(dtype, stored, b: int, q: int, n: int, k: int) -> None:
    rows, matrix = noise(b, q, n).to(dtype).cuda(), noise(n, k, seed=1).to(stored).cuda()
    assert kernels.projects(rows, matrix)
    norms, along = kernels.project(rows, matrix)
    wide, basis = rows.double(), matrix.double()
    torch.testing.assert_close(norms, wide.square().sum((1, 2)), rtol=1e-6, atol=0)
    bound = torch.finfo(torch.float32).eps * (wide.abs() @ basis.abs())
    assert ((along - wide @ basis).abs() <= 8 * bound).all()


def test_gradients_are_dropped_as_soon_as_they_are_used() -> None:
    """Deep and narrow: all the gradients together are far larger than any block of rows."""
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(30)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda().eval()
    x = torch.randn(1, 4, 128, 128).cuda()
    monitor = Monitor(model, Categorical(), rank=4).fit([x.repeat(2, 1, 1, 1)], progress=False)
    one = 4 * x.nbytes  # four directions of a layer's gradients

    def peak(run) -> int:
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before

    forward = peak(lambda: model(x))
    patches = 9 * x.nbytes
    assert peak(lambda: monitor.score(x)) < forward + 2 * patches + 8 * one < 30 * one


@pytest.mark.parametrize("left", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("right", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [300, 4096, 7000])
def test_products_agree_with_float64(left, right, length: int) -> None:
    a, b = noise(5, length).to(left).cuda(), noise(length, 8, seed=1).to(right).cuda()
    found = matmul(a, b)
    assert _is_long(a, b) == (length >= 4096)
    bound = torch.finfo(found.dtype).eps * (a.double().abs() @ b.double().abs())
    assert ((found.double() - a.double() @ b.double()).abs() <= 8 * bound).all()


@pytest.mark.parametrize("right", [torch.float32, torch.bfloat16], ids=str)
def test_adding_a_product_does_not_round_its_second_factor(right: torch.dtype) -> None:
    a = noise(64, 320).bfloat16().cuda()
    b = noise(320, 24, seed=1).to(right).cuda()
    total = torch.zeros(64, 24).cuda()
    add_matmul(total, a, b)
    bound = torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs())
    assert ((total.double() - a.double() @ b.double()).abs() <= 8 * bound).all()


def test_a_half_precision_fit_is_close_to_the_full_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten()
    ).append(nn.Linear(96, 3))
    model = model.eval().cuda()
    batches, test = list(noise(160, 2, 8, 8).float().split(40)), noise(20, 2, 8, 8, seed=1)
    full, half = (
        Monitor(model, Categorical(), rank=8).fit(batches, progress=False, precision=precision)
        for precision in (None, torch.bfloat16)
    )
    assert half.basis.captured == pytest.approx(full.basis.captured, rel=0.03)
    overlap = (full.basis.vectors.mT @ half.basis.vectors).square().sum() / full.basis.rank
    assert float(overlap) > 0.98
    scores = half.score(test.float())
    torch.testing.assert_close(scores, full.score(test.float()), rtol=0.03, atol=0)


@pytest.mark.parametrize("place", range(6))
def test_a_bad_sample_is_named_though_it_is_found_late(place: int) -> None:
    torch.manual_seed(0)
    model = conv_batchnorm(3).double().eval().cuda()
    batches = [noise(4, 2, 5, 5, seed=seed) for seed in range(6)]
    batches[place][1, 0, 0, 0] = float("nan")
    monitor = Monitor(model, Categorical(), rank=6)
    said = rf"sample {4 * place + 1} \(batch {place}, row 1\)"
    with pytest.raises(NonFiniteError, match=said):
        monitor.fit(batches, progress=False)


def test_rounding_to_tf32_does_not_count_against_one_pass_for_all_networks() -> None:
    """A warning that they are run one after the other would be an error here."""
    assert torch.backends.cudnn.allow_tf32
    networks = []
    for seed in range(5):
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(8)]
        ends = nn.Conv2d(3, 64, 3), nn.Sequential(nn.Flatten(), nn.Linear(64 * 14**2, 2))
        networks.append(nn.Sequential(ends[0], *layers, ends[1]).cuda())
    method = DeepEnsemble(networks, likelihoods.Gaussian())
    assert method.score(torch.randn(1, 3, 16, 16, device="cuda")).isfinite().all()
    assert method._weight_sets.works


def test_samples_are_known_again_on_another_device() -> None:
    torch.manual_seed(0)
    images, tokens = torch.randn(20, 1, 8, 8), torch.randint(0, 9, (20, 5))
    for tensors in ((images,), (images.half(), tokens), (tokens.to(torch.uint8),)):
        here = digests_of(Inputs(tensors, {}))
        there = digests_of(Inputs(tuple(t.cuda() for t in tensors), {}))
        assert there.is_cuda
        assert torch.equal(there.cpu(), here)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    monitor = Monitor(model, Categorical(), 4).fit([images], progress=False).to("cuda")
    with pytest.raises(MergeError, match="would count twice"):
        monitor.update([images.flip(0)], progress=False)
