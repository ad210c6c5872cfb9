"""TaxiNet: rendered frames, real tiny ones, and training in bfloat16."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from scodbench.data import load
from scodbench.domain import Splits
from scodbench.domains import DOMAINS, taxinet
from scodbench.domains import taxinet_frames as tiny
from scodbench.domains.taxinet import SCALE, RenderedSamples
from scodbench.runway import MORNING, render
from scodbench.samples import TensorSamples
from scodbench.training import Recipe, train
from scodkit import Gaussian

FOLDER = Path(os.environ.get("SCODKIT_DATA", "nowhere"))
DATA = pytest.mark.skipif(
    not (FOLDER / "taxinet" / "tinytaxinet_8x16_3504.npz").is_file(),
    reason="SCODKIT_DATA names no folder with taxinet",
)
GAP = 10  # metres of the runway between two splits


class TestRendered:
    def test_frames_are_those_of_the_renderer(self) -> None:
        samples = RenderedSamples.of(6, MORNING, seed=3)
        which = torch.tensor([4, 1])
        x, y = samples.take(which).read()
        seeds = samples.first_seed + which
        wanted = render(samples.poses[which], MORNING, seeds) * 2 - 1
        assert (x - wanted).abs().max() <= 1 / 255 + 1e-6
        torch.testing.assert_close(y * torch.tensor(SCALE), samples.poses[which, :2])
        assert y.abs().max() <= 1

    def test_what_is_rendered_once_is_kept_and_shared(self) -> None:
        samples = RenderedSamples.of(4, MORNING, seed=3)
        first, _ = samples.take(torch.tensor([2])).read()
        (kept,) = samples.kept.values()
        assert kept.there.tolist() == [False, False, True, False]
        kept.frames[2] += 1  # so that another rendering would be seen
        again, _ = samples.take(torch.tensor([3, 2])).read()
        torch.testing.assert_close(again[1:], first + 1 / 127.5)

    def test_each_device_keeps_its_own_under_one_name(self) -> None:
        """A GPU has two names, "cuda" and "cuda:0"; so has the CPU."""
        samples = RenderedSamples.of(2, MORNING, seed=3).take(slice(0, 1))
        here, _ = samples.read(torch.device("cpu"))
        samples.read("cpu:0")
        assert list(samples.kept) == [torch.device("cpu")]
        if torch.cuda.is_available():
            for name in ("cuda", "cuda:0"):
                there, _ = samples.read(name)
                assert (there.cpu() - here).abs().max() <= 2 / 127.5
            assert len(samples.kept) == 2

    def test_digests_tell_sets_apart(self) -> None:
        samples = RenderedSamples.of(4, MORNING, seed=3)
        others = [samples.take(slice(0, 3)), RenderedSamples.of(4, MORNING, seed=4)]
        assert len({s.digest() for s in (samples, *others)}) == 3
        assert RenderedSamples.of(4, MORNING, seed=3).digest() == samples.digest()

    def test_sets_are_drawn_from_seeds_of_their_own(self) -> None:
        splits = taxinet.splits()
        assert splits.mixed is not None
        sets = [splits.train, splits.selection, splits.test, *splits.novel.values()]
        sets.append(splits.mixed)
        assert [len(s) for s in sets] == [20_000, 1000] + [2000] * 5
        assert len({s.first_seed for s in sets}) == len(sets)
        frames = [set(range(s.first_seed, s.first_seed + len(s))) for s in sets]
        assert len(set.union(*frames)) == sum(map(len, frames))
        poses = [{row.numpy().tobytes() for row in s.poses} for s in sets]
        assert len(set.union(*poses)) == sum(map(len, poses))

    def test_the_mixed_set_is_a_clear_day_that_has_the_mornings_in_it(self) -> None:
        splits = taxinet.splits()
        day, morning = splits.mixed.condition, splits.train.condition
        afternoon = splits.novel["afternoon"].condition
        assert day.cloud_cover == morning.cloud_cover
        assert day.hours == (morning.hours[0], afternoon.hours[1])


@pytest.fixture(scope="module")
def splits() -> Splits:
    return tiny.splits()


@pytest.fixture(scope="module")
def held() -> dict[str, Tensor]:
    return load.taxinet_tiny()


@DATA
class TestTiny:
    def numbers(self, part: TensorSamples, held: dict[str, Tensor]) -> list[int]:
        """Return where the frames of a part are in the file."""
        where = {frame.numpy().tobytes(): i for i, frame in enumerate(held["images"])}
        assert len(where) == len(held["images"])
        return [where[frame.contiguous().numpy().tobytes()] for frame in part.inputs]

    def test_parts_are_so_many_metres_apart(self, splits: Splits, held) -> None:
        metre, count, metres = [], 0, []
        for before, after in zip(held["labels"][:-1], held["labels"][1:], strict=True):
            metre.append(count)
            count += bool(after[0] < before[0])
        metre.append(count)
        assert count == 193
        for part in (splits.train, splits.selection, splits.test):
            numbers = self.numbers(part, held)
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            metres.append((metre[numbers[0]], metre[numbers[-1]]))
        for (_, last), (first, _) in pairwise(metres):
            assert first - last > GAP
        assert [len(p) for p in (splits.train, splits.selection, splits.test)] == [
            1909,
            585,
            595,
        ]

    def test_what_frames_share_beyond_their_pose_ends_within_the_gap(self, held) -> None:
        """Less what frames of like pose have, frames of a place are alike; 10 m on, not."""
        frames = held["images"].flatten(1).double()
        pose = held["labels"].double() / torch.tensor([11.0, 30.0])
        near = torch.cdist(pose, pose).topk(13, largest=False).indices[:, 1:]
        own = nn.functional.normalize(frames - frames[near].mean(1), dim=1)
        metre = tiny.places(held["labels"])
        apart = (metre[:, None] - metre).abs()
        alike = own @ own.T
        alike.fill_diagonal_(torch.nan)
        same = [float(alike[apart == metres].nanmean()) for metres in (0, 1, GAP, 2 * GAP)]
        assert min(same[:2]) > 0.05
        assert max(same[2:]) < 0.01

    def test_targets_are_scaled_metres_and_degrees(self, splits: Splits, held) -> None:
        _, y = splits.test.read()
        numbers = self.numbers(splits.test, held)
        torch.testing.assert_close(y * torch.tensor([10.0, 30.0]), held["labels"][numbers])

    def test_damage_is_the_same_every_time_and_leaves_the_frames_alone(
        self, splits: Splits
    ) -> None:
        frames = splits.test.inputs.clone()
        for damage in (
            tiny.noisy,
            tiny.foggy,
            tiny.glaring,
            tiny.with_dead_rows,
            tiny.mirrored,
        ):
            first, second = damage(frames), damage(frames)
            assert torch.equal(first, second)
            assert first.shape == frames.shape
            assert (first.mean((1, 2)) - 0.5).abs().max() < 1e-3
            assert 0 <= first.min() < first.max() <= 1
            assert not torch.equal(first, frames)
            # a frame's own damage, whatever follows it
            assert (first != frames).flatten(1).any(1).all()
        assert torch.equal(frames, splits.test.inputs)

    def test_damage_is_as_severe_as_it_says(self, splits: Splits) -> None:
        frames = splits.test.inputs
        assert (tiny.noisy(frames) - frames).std() == pytest.approx(0.05, rel=0.02)
        assert tiny.foggy(frames).std() == pytest.approx(0.4 * float(frames.std()), rel=0.01)
        change = tiny.glaring(frames) - frames
        patch = change - change.flatten(1).median(1).values[:, None, None] > 0.1
        assert (patch.flatten(1).sum(1) == 12).float().mean() > 0.97  # some are cut at white
        assert patch.any(0).all()  # anywhere
        rows = (tiny.with_dead_rows(frames).diff(dim=2).abs() < 1e-6).all(2)
        assert (rows.sum(1) == 2).all()
        assert rows.any(0).all()
        assert (tiny.with_dead_rows(frames).flatten(1).argmin(1) // 16).unique().numel() == 7
        assert torch.equal(tiny.mirrored(tiny.mirrored(frames)), frames)

    def test_unknown_sets_are_of_the_test_frames_and_of_another_stretch(
        self, splits: Splits
    ) -> None:
        sizes = {name: len(samples) for name, samples in splits.novel.items()}
        names = ("noise", "fog", "glare", "dead_rows", "mirrored")
        assert sizes == {**dict.fromkeys(names, len(splits.test)), "other_stretch": 158 + 96}
        assert torch.equal(splits.novel["mirrored"].targets, -splits.test.targets)
        assert torch.equal(splits.novel["fog"].inputs, tiny.foggy(splits.test.inputs))

    def test_the_tiny_recipe_learns_something_at_once(self, splits: Splits) -> None:
        domain = DOMAINS["taxinet_tiny"]
        recipe = replace(domain.recipe, epochs=4)
        parts = (splits.train, splits.selection)
        found = train(domain.build, domain.likelihood, recipe, parts, 0, progress=False)
        assert found.loss < 0.1 * splits.selection.targets.var(0).mean()


def plainly_reduced(image: Tensor) -> np.ndarray:
    """Return an image of the size the reduction was made for, reduced square by square."""
    picture = Image.fromarray(image.numpy()).convert("L").convert("F")
    box = (55, 5, 360, 135)
    seen = picture.transform((256, 128), Image.Transform.EXTENT, box, Image.BILINEAR)
    pixels = np.asarray(seen) / 255
    found = np.zeros((8, 16))
    for i in range(8):
        for j in range(16):
            square = pixels[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
            found[i, j] = np.sort(square.ravel())[-16:].mean()
    return found - found.mean() + 0.5


class TestReduction:
    # Pillow's grey of colours is in whole numbers
    @pytest.mark.parametrize(("channels", "rounding"), [(1, 1e-5), (3, 0.004)])
    def test_it_is_the_plain_one(self, channels: int, rounding: float) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (200, 360, channels)
        image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        image = image.expand(200, 360, 3).contiguous()
        found = tiny.reduced(image[None])[0].numpy()
        assert np.abs(found - plainly_reduced(image)).max() < rounding

    def test_what_is_above_is_cut_off(self) -> None:
        below = torch.randint(0, 256, (2, 73, 128, 3), dtype=torch.uint8)
        whole = torch.cat([torch.full((2, 23, 128, 3), 255, dtype=torch.uint8), below], dim=1)
        torch.testing.assert_close(tiny.reduced(whole, 230 / 960), tiny.reduced(below))

    @DATA
    def test_real_frames_come_out_much_like_the_tiny_ones(self) -> None:
        frames = tiny.splits().novel["other_stretch"].inputs
        spread = frames.flatten(1).std(1).median()
        assert 0.7 < spread / load.taxinet_tiny()["images"].flatten(1).std(1).median() < 2
        assert (frames.mean((1, 2)) - 0.5).abs().max() < 1e-5


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


class TestMixedPrecision:
    RECIPE = Recipe(torch.optim.Adam, 0.01, 8, 6, anneal=True)

    def pictures(self, count: int, seed: int) -> TensorSamples:
        generator = torch.Generator().manual_seed(seed)
        level = torch.randn(count, 3, 1, 1, generator=generator)
        x = level + 0.1 * torch.randn(count, 3, 10, 12, generator=generator)
        return TensorSamples(x, level[:, :2, 0, 0])

    def test_bfloat16_comes_to_much_the_same_loss(self) -> None:
        data = (self.pictures(64, 0), self.pictures(32, 1))
        plain, mixed = (
            train(
                small,
                Gaussian(),
                replace(self.RECIPE, mixed_precision=on),
                data,
                0,
                progress=False,
            )
            for on in (False, True)
        )
        first, second = plain.model.state_dict(), mixed.model.state_dict()
        assert any(not torch.equal(first[name], second[name]) for name in first)
        assert all(value.dtype != torch.bfloat16 for value in second.values())
        assert mixed.loss == pytest.approx(plain.loss, rel=0.05)

    def test_full_precision_is_the_plain_loop(self) -> None:
        """Weight for weight: nothing of what a GPU wants may change the other networks."""
        data = (self.pictures(20, 0), self.pictures(8, 1))
        recipe = replace(self.RECIPE, epochs=1, anneal=False)
        found = train(small, Gaussian(), recipe, data, 3, progress=False).model
        torch.manual_seed(3)
        model = small().to(memory_format=torch.channels_last)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        x, y = data[0].shuffled(3 * 1_000_003 + 1).read()
        for some, targets in zip(x.split(8), y.split(8), strict=True):
            optimiser.zero_grad()
            nn.functional.mse_loss(model(some), targets).backward()
            optimiser.step()
        for one, other in zip(found.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)

    def test_recipes_tell_the_precision(self) -> None:
        mixed = replace(self.RECIPE, mixed_precision=True)
        assert mixed.describe() != self.RECIPE.describe()
        assert [d.name for d in DOMAINS.values() if d.recipe and d.recipe.mixed_precision] == [
            "taxinet"
        ]
