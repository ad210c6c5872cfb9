"""Rendered runway frames: repeatable, varied, lit as the hour says, and readable."""

import math

import pytest
import torch

from scodbench.runway import (
    AFTERNOON,
    CLOUDY,
    EVENING,
    MORNING,
    Camera,
    Condition,
    all_day,
    render,
    sample_poses,
)
from scodbench.runway.clouds import opacity, thickness, towards_sun
from scodbench.runway.conditions import draw
from scodbench.runway.noise import fractal, hashed, value_noise, visible
from scodbench.runway.sunlight import sun_direction
from scodkit.errors import BatchError, OptionError, ScodError

SMALL = Camera(rows=65, columns=75)
TINY = Camera(rows=26, columns=30)


def hash_by_hand(x, y, seed):
    """One number of `hashed`, with Python's integers cut to 32 bits."""

    def wrapped(value):
        value &= 0xFFFFFFFF
        return value - (1 << 32) if value >> 31 else value

    bits = wrapped(x * 0x27D4EB2D) ^ wrapped(y * 0x165667B1) ^ wrapped(seed * 0x1B873593)
    bits = wrapped((bits ^ (bits >> 15)) * 0x2C1B3C6D)
    bits = wrapped((bits ^ (bits >> 12)) * 0x297A2D39)
    return ((bits ^ (bits >> 15)) & 0xFFFFFF) / 2**24


def test_hash_is_the_same_everywhere():
    rng = torch.Generator().manual_seed(0)
    x, y, seed = torch.randint(-(2**31), 2**31 - 1, (3, 200), generator=rng, dtype=torch.int32)
    expected = [hash_by_hand(*map(int, point)) for point in zip(x, y, seed, strict=True)]
    assert hashed(x, y, seed).tolist() == expected


def test_hashed_numbers_are_even_and_unrelated():
    x = torch.arange(400, dtype=torch.int32)
    numbers = hashed(x, x[:, None], 3)
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.004)
    assert float(numbers.var()) == pytest.approx(1 / 12, rel=0.01)
    others = (numbers.roll(1, 0), numbers.roll(1, 1), hashed(x, x[:, None], 4))
    for other in others:
        pair = torch.stack([numbers.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.01


def test_value_noise_passes_through_the_hashed_points_smoothly():
    x = torch.arange(-20, 20, dtype=torch.float32)[:, None].expand(40, 40)
    y = x.T
    assert torch.equal(value_noise(x, y, 9), hashed(x.to(torch.int32), y.to(torch.int32), 9))
    fine = torch.linspace(-3, 3, 6001)
    line = value_noise(fine, torch.full_like(fine, 0.4), 9)
    assert float(line.diff().abs().max()) < 0.002


def test_noise_finer_than_a_pixel_is_left_out():
    rng = torch.Generator().manual_seed(1)
    x, y = torch.rand(2, 1, 50, 60, generator=rng) * 500
    spreads = [float(fractal(x, y, torch.full_like(x, w), 1, 4).std()) for w in (0, 0.2, 1.0)]
    assert spreads[0] > spreads[1] > spreads[2] == 0


@pytest.mark.parametrize("nearer", ["up", "down"])
def test_fractal_is_the_sum_over_all_rows(nearer):
    rng = torch.Generator().manual_seed(4)
    x, y = torch.rand(2, 2, 30, 20, generator=rng) * 90
    width = torch.linspace(0, 1.2, 30)[:, None].expand_as(x)
    width = width if nearer == "up" else width.flip(1)
    expected = torch.zeros_like(x)
    for i, strength in enumerate((1.0, 0.7, 0.49)):
        noise = value_noise(x * 2**i + 7.3 * i, y * 2**i + 3.1 * i, 11 + i) - 0.5
        expected += noise * visible(width * 2**i) * strength / 2.19
    assert torch.allclose(fractal(x, y, width, 11, 3, roughness=0.7), expected, atol=1e-6)


def test_clouds_cover_the_share_they_should():
    rng = torch.Generator().manual_seed(2)
    x, y = torch.rand(2, 1, 300, 300, generator=rng) * 1e6
    for cover in (0.05, 0.3, 0.6, 0.95):
        thick = thickness(x, y, torch.zeros_like(x), torch.tensor(cover), torch.tensor(5))
        assert float((thick > 0).float().mean()) == pytest.approx(cover, abs=0.04)
        assert float(opacity(thick).mean()) == pytest.approx(cover, abs=0.05)


def test_cloud_shadows_come_from_the_clouds_before_the_sun():
    sun = torch.tensor([0.48, -0.36, 0.8])[None, :, None, None]
    x, y = towards_sun(torch.full((1, 2, 2), 10.0), torch.full((1, 2, 2), 5.0), sun)
    # 1500 m up along the sun's direction is 900 m ahead and 675 m to the right
    assert torch.allclose(x, torch.tensor(910.0))
    assert torch.allclose(y, torch.tensor(-670.0))


def test_frames_have_the_papers_form():
    # towards the rising sun, which is brighter than the sensor can tell
    poses = torch.tensor([[0.0, -30, 100], [-5, 0, 900], [10, -20, 2400]])
    frames = render(poses, Condition(hours=(5.75, 5.75)), torch.arange(3))
    assert frames.shape == (3, 3, 260, 300)
    assert frames.dtype == torch.float32
    assert 0 <= float(frames.min()) < 0.2
    assert float(frames.max()) == 1


@pytest.mark.parametrize(
    "camera",
    [
        TINY,
        Camera(pitch_deg=60, vertical_fov_deg=20, rows=26, columns=30),  # no sky
        Camera(pitch_deg=22, rows=26, columns=30),  # hardly any
        Camera(pitch_deg=0, rows=26, columns=30),
    ],
)
def test_frames_at_the_limits_are_finite(camera):
    poses = torch.tensor([[14.0, 60, -100], [-14, -60, 3148], [0, 0, 0], [0, -40, 3048]])
    for condition in (
        Condition(hours=(5.5, 5.5), cloud_cover=(1, 1), visibility_km=(1, 1)),
        Condition(hours=(18.75, 18.75), cloud_cover=(0, 0)),
    ):
        frames = render(poses, condition, torch.arange(4), camera)
        assert frames.isfinite().all()
        assert frames.std(dim=(1, 2, 3)).min() > 0.02


@pytest.mark.parametrize("condition", [MORNING, AFTERNOON, EVENING, CLOUDY, all_day()])
def test_a_frame_depends_on_nothing_but_itself(condition):
    poses, seeds = sample_poses(4, seed=2), torch.arange(4) * 10**12
    torch.manual_seed(0)
    together = render(poses, condition, seeds, SMALL)
    torch.manual_seed(1)
    assert torch.equal(together, render(poses, condition, seeds, SMALL))
    order = torch.tensor([3, 1])
    assert torch.equal(together[order], render(poses[order], condition, seeds[order], SMALL))
    again = render(poses.double(), condition, seeds.to(torch.int64), SMALL)
    assert torch.equal(together, again)


def test_frames_rendered_together_are_those_rendered_alone(monkeypatch):
    # as on a GPU; a CPU takes one at a time, to agree to the last bit
    poses, seeds = sample_poses(5, seed=3), torch.arange(5)
    alone = render(poses, CLOUDY, seeds, SMALL)
    monkeypatch.setattr("scodbench.runway.rendering._CPU_CHUNK", 3)
    assert torch.allclose(render(poses, CLOUDY, seeds, SMALL), alone, atol=1e-5)


def test_rendering_leaves_the_random_numbers_of_others_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    render(sample_poses(1, seed=0), MORNING, torch.tensor([3]), TINY)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("condition", [MORNING, EVENING, CLOUDY])
def test_gpu_agrees_with_cpu(condition):
    poses, seeds = sample_poses(60, seed=4), torch.arange(60)
    ours = render(poses, condition, seeds, SMALL)
    theirs = render(poses, condition, seeds, SMALL, device="cuda")
    assert theirs.device.type == "cuda"
    off = (ours - theirs.cpu()).abs()
    assert float(off.mean()) < 1e-5
    # a rounded coordinate may fall into the next cell of a row of trees
    assert float((off > 0.01).float().mean()) < 1e-4
    few = render(poses[7:9].cuda(), condition, seeds[7:9].cuda(), SMALL)
    assert torch.allclose(few, theirs[7:9], atol=1e-6)


def test_frames_of_one_pose_vary_within_a_condition():
    same = sample_poses(1, seed=7).expand(6, 3)
    for condition in (MORNING, AFTERNOON, EVENING, CLOUDY):
        frames = render(same, condition, torch.arange(6), SMALL)
        smooth = torch.nn.functional.avg_pool2d(frames, 5)  # without sensor noise
        assert float(smooth.std(dim=0).mean()) > 0.005
        assert len({float(m) for m in frames.mean(dim=(1, 2, 3))}) == 6


def test_each_draw_fills_its_range_and_is_unrelated_to_the_others():
    drawn = draw(CLOUDY, torch.arange(4000))
    ranges = {
        "hour": (8.5, 9.5),
        "cloud_cover": (0.8, 1.0),
        "visibility_m": (8e3, 25e3),
        "exposure": (0.92, 1.08),
        "warmth": (-0.02, 0.02),
    }
    shares = []
    for name, (low, high) in ranges.items():
        share = (getattr(drawn, name) - low) / (high - low)
        assert 0 <= float(share.min()) < 0.01
        assert 0.99 < float(share.max()) <= 1
        shares.append(share)
    related = torch.corrcoef(torch.stack([*shares, drawn.pattern.double()])) - torch.eye(6)
    assert float(related.abs().max()) < 0.06
    assert len(drawn.pattern.unique()) > 3990


def test_seeds_use_all_their_bits():
    drawn = draw(MORNING, torch.tensor([1, 1 + 2**31, 1 + 2**40, 1 + 2**62]))
    assert len(drawn.hour.unique()) == 4


@pytest.fixture(scope="module")
def by_condition():
    poses, seeds = sample_poses(16, seed=11), torch.arange(16)
    conditions = {
        "morning": MORNING,
        "afternoon": AFTERNOON,
        "evening": EVENING,
        "cloudy": CLOUDY,
    }
    return {name: render(poses, c, seeds, SMALL) for name, c in conditions.items()}


def test_conditions_differ_in_brightness_as_they_should(by_condition):
    light = {name: float(frames.mean()) for name, frames in by_condition.items()}
    assert light["morning"] > light["afternoon"] > light["evening"]
    assert light["morning"] > light["cloudy"]


def test_conditions_differ_in_warmth_as_they_should(by_condition):
    # far ahead, where the aircraft's bluish shadow seldom is
    ground = {name: f[:, :, 18:28, 20:].mean(dim=(0, 2, 3)) for name, f in by_condition.items()}
    warmth = {name: float(colour[0] / colour[2]) for name, colour in ground.items()}
    assert warmth["evening"] > 1.05 * warmth["morning"]
    assert warmth["cloudy"] < 0.98 * warmth["morning"]
    # a cloudy sky is grey, a clear one blue
    sky = {name: f[:, :, :12, 20:].mean(dim=(0, 2, 3)) for name, f in by_condition.items()}
    blue = {name: float(colour[2] / colour[0]) for name, colour in sky.items()}
    assert blue["cloudy"] < 0.95 * blue["morning"]


def test_morning_sun_is_on_the_right_and_evening_sun_behind():
    hours = torch.tensor([9.0, 12.0, 15.0, 18.0], dtype=torch.float64)
    sun = sun_direction(hours)
    assert torch.allclose(sun.norm(dim=1), torch.ones(4, dtype=torch.float64))
    ahead, left, up = sun.T
    assert left[0] < 0 < ahead[0]
    assert (ahead[1:] < 0).all()
    assert left[3] > 0
    assert float(up[1]) == pytest.approx(math.sin(math.radians(90 - 47.2 + 15)))
    assert float(up[0]) == pytest.approx(float(up[2]))


def test_cross_track_and_heading_can_be_read_off_the_frames():
    poses = sample_poses(300, seed=21)
    frames = render(poses, MORNING, torch.arange(300), TINY).flatten(1).double()
    inputs = torch.cat([frames - frames[:220].mean(dim=0), torch.ones(300, 1)], dim=1)
    labels = poses[:, :2].double()
    train, test = inputs[:220], inputs[220:]
    # ridge regression, in its dual form
    gram = train @ train.T + 3.0 * torch.eye(220)
    predicted = test @ (train.T @ torch.linalg.solve(gram, labels[:220]))
    error = (predicted - labels[220:]).square().mean(dim=0)
    explained = 1 - error / labels[220:].var(dim=0, unbiased=False)
    assert (explained > 0.8).all(), explained


def test_poses_are_drawn_evenly_from_their_ranges():
    poses = sample_poses(4000, seed=0)
    assert poses.dtype == torch.float32
    assert torch.equal(poses, sample_poses(4000, seed=0))
    assert not torch.equal(poses, sample_poses(4000, seed=1))
    for column, (low, high) in zip(poses.T, ((-10, 10), (-30, 30), (50, 2450)), strict=True):
        share = (column - low) / (high - low)
        assert 0 <= float(share.min()) < 0.01
        assert 0.99 < float(share.max()) <= 1
        assert float(share.mean()) == pytest.approx(0.5, abs=0.02)


def test_no_poses_give_no_frames():
    frames = render(torch.empty(0, 3), MORNING, torch.empty(0, dtype=torch.int64), TINY)
    assert frames.shape == (0, 3, 26, 30)


BAD_POSES = [
    torch.zeros(3),
    torch.zeros(2, 2),
    torch.zeros(2, 3, dtype=torch.int64),
    torch.tensor([[0.0, 0, 100], [0, float("nan"), 100]]),
    torch.tensor([[0.0, 0, 100], [15, 0, 100]]),
    torch.tensor([[0.0, 61, 100], [0, 0, 100]]),
    torch.tensor([[0.0, 0, 100], [0, 0, 4000]]),
]


@pytest.mark.parametrize("poses", BAD_POSES)
def test_bad_poses_are_refused(poses):
    with pytest.raises(BatchError, match="expected"):
        render(poses, MORNING, torch.arange(len(poses)), TINY)


@pytest.mark.parametrize(
    "seeds", [torch.arange(3), torch.zeros(2), torch.tensor([0, -1]), torch.zeros(2, 1).long()]
)
def test_bad_seeds_are_refused(seeds):
    with pytest.raises(BatchError, match=r"type torch.arange\(2\)"):
        render(sample_poses(2, seed=0), MORNING, seeds, TINY)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Condition(hours=(9, 8)),
        lambda: Condition(hours=(3, 8)),
        lambda: Condition(hours=(8, 23)),
        lambda: Condition(hours=(8, 9), cloud_cover=(0, 1.1)),
        lambda: Condition(hours=(8, 9), visibility_km=(0, 1)),
        lambda: Condition(hours=(8, 9), visibility_km=(1,)),
        lambda: Condition(hours=(8, float("nan"))),
        lambda: all_day(2, 3),
        lambda: Camera(height_m=-1),
        lambda: Camera(pitch_deg=80),
        lambda: Camera(rows=0),
        lambda: Camera(vertical_fov_deg=float("nan")),
        lambda: sample_poses(0, seed=0),
        lambda: sample_poses(1, seed=-1),
    ],
)
def test_bad_options_are_refused(make):
    with pytest.raises(OptionError, match="expected"):
        make()
    assert issubclass(OptionError, ScodError)
