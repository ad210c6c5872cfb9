"""Where things are in rendered frames, against an explicit pinhole projection."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from scodbench.runway import AFTERNOON, MORNING, Camera, Condition, render
from scodbench.runway.camera import look_down, rays
from scodbench.runway.markings import (
    CENTRE_LINE_WIDTH_M,
    DASH_M,
    EDGE_LINE_M,
    FIRST_DASH_M,
    GAP_M,
    paint,
)
from scodbench.runway.shadow import from_aircraft, shadow

CPU = torch.device("cpu")
SMALL = Camera(rows=130, columns=150)


def project(camera, pose, point):
    """Row and column (pixel i covers i to i + 1) of a point of the world, and its depth."""
    cross, heading, down_track = pose
    turn, pitch, yaw = map(math.radians, (heading, camera.pitch_deg, camera.yaw_deg))
    # rotations of (forward, left, up): the aircraft on the runway, then the camera on it
    on_runway = np.array(
        [[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0], [0, 0, 1]]
    )
    to_right = np.array(
        [[math.cos(yaw), math.sin(yaw), 0], [-math.sin(yaw), math.cos(yaw), 0], [0, 0, 1]]
    )
    nose_down = np.array(
        [
            [math.cos(pitch), 0, math.sin(pitch)],
            [0, 1, 0],
            [-math.sin(pitch), 0, math.cos(pitch)],
        ]
    )
    mount = np.array([down_track, cross, 0]) + on_runway @ [0, -camera.right_m, camera.height_m]
    forward, left, up = (on_runway @ to_right @ nose_down).T @ (np.asarray(point) - mount)
    wide = math.tan(math.radians(camera.horizontal_fov_deg) / 2)
    tall = math.tan(math.radians(camera.vertical_fov_deg) / 2)
    row = camera.rows * (1 - up / forward / tall) / 2
    column = camera.columns * (1 - left / forward / wide) / 2
    return row, column, forward


def grey(pictures):
    return pictures.mean(dim=1)


def inside(camera, row, column, margin=2):
    return margin < row < camera.rows - margin and margin < column < camera.columns - margin


def column_at(camera, pose, y, row):
    """Column where the line at y crosses a row, by bisection along the line."""
    near, far = 1.0, 3000.0
    for _ in range(80):
        middle = (near + far) / 2
        r, _, depth = project(camera, pose, (pose[2] + middle, y, 0))
        near, far = (middle, far) if depth <= 0 or r > row else (near, middle)
    return project(camera, pose, (pose[2] + near, y, 0))[1]


def peak(profile, expected, reach):
    """Where a profile is bright near a place: the middle of what stands out; i is i + 0.5."""
    places = np.arange(int(expected) - reach, int(expected) + reach + 1)
    values = profile[places]
    around = max(values[:3].mean(), values[-3:].mean())
    weights = np.clip(values - around - 0.3 * (values.max() - around), 0, None)
    return float((weights * places).sum() / weights.sum()) + 0.5


@pytest.mark.parametrize("pose", [(0, 0, 100), (-7.3, 21, 400), (9.5, -30, 2300), (3, 60, 0)])
@pytest.mark.parametrize("camera", [SMALL, Camera(1.3, -4, 30, -12, 50, 70, 40, 64)])
def test_every_pixel_meets_the_ground_where_the_pinhole_says(pose, camera):
    ground = look_down(rays(camera, CPU), camera, torch.tensor([pose], dtype=torch.float64))
    rows = camera.rows - camera.sky_rows
    assert ground.x.shape == (1, rows, camera.columns)
    for r in range(2, rows, 7):
        for c in range(0, camera.columns, 11):
            point = (float(ground.x[0, r, c]), float(ground.y[0, r, c]), 0.0)
            row, column, depth = project(camera, pose, point)
            assert depth > 0
            assert row == pytest.approx(camera.sky_rows + r + 0.5, abs=0.02)
            assert column == pytest.approx(c + 0.5, abs=0.02)


def test_every_pixel_looks_at_the_sky_where_the_pinhole_says():
    seen, heading = rays(SMALL, CPU), 13.0
    azimuth = (seen.sky_azimuth + math.radians(heading)).double()
    elevation = seen.sky_elevation.double()
    level = elevation.cos()
    far = 1e8 * torch.stack([level * azimuth.cos(), level * azimuth.sin(), elevation.sin()])
    for r in range(0, SMALL.sky_rows, 5):
        for c in range(0, SMALL.columns, 11):
            row, column, _ = project(SMALL, (1.0, heading, 300.0), far[:, r, c].numpy())
            assert (row, column) == pytest.approx((r + 0.5, c + 0.5), abs=0.01)


def test_horizon_is_where_a_far_point_is():
    row, _, _ = project(SMALL, (0, 0, 0), (1e7, 0, 0))
    assert SMALL.horizon_row == pytest.approx(row, abs=1e-3)
    assert SMALL.sky_rows - 0.5 <= row <= SMALL.sky_rows + 0.5


def test_pixel_widths_are_distances_to_the_neighbours():
    pose = torch.tensor([[2.0, 17.0, 500.0]], dtype=torch.float64)
    ground = look_down(rays(SMALL, CPU), SMALL, pose)
    for place, width in ((ground.x, ground.width_x), (ground.y, ground.width_y)):
        down = (place[:, 2:, 1:-1] - place[:, :-2, 1:-1]) / 2
        aside = (place[:, 1:-1, 2:] - place[:, 1:-1, :-2]) / 2
        expected = torch.hypot(down, aside)[:, 20:]
        assert torch.allclose(width[:, 1:-1, 1:-1][:, 20:], expected, rtol=0.02)


def test_paint_is_on_the_dashes_and_not_between_them():
    camera = Camera()
    seen, checked = rays(camera, CPU), 0
    for dash, cross, heading in (
        (0, 1.0, 3.0),
        (7, -2.0, 20.0),
        (20, 3.5, -9.0),
        (44, 0.0, 11),
    ):
        begin = FIRST_DASH_M + dash * (DASH_M + GAP_M)
        for place, inward in ((begin, 1), (begin + DASH_M, -1)):
            pose = (cross, heading, place - 6.5)
            ground = look_down(seen, camera, torch.tensor([pose], dtype=torch.float64))
            painted = paint(ground)[0]
            for x, y, share in ((0.6, 0, 1), (-0.6, 0, 0), (0.6, CENTRE_LINE_WIDTH_M, 0)):
                row, column, _ = project(camera, pose, (place + inward * x, y, 0))
                assert inside(camera, row, column)
                value = float(painted[int(row) - camera.sky_rows, int(column)])
                assert value == pytest.approx(share, abs=0.02)
                checked += 1
    assert checked == 24


def test_edge_line_is_a_bright_ridge_at_its_projection():
    poses = torch.tensor([[-8.0, -10, 800], [-6, 5, 1200], [-9, 15, 1000], [8.5, -22, 1100]])
    frames = grey(render(poses, MORNING, torch.arange(4), SMALL)).numpy()
    found = 0
    for pose, frame in zip(poses.tolist(), frames, strict=True):
        y = math.copysign(EDGE_LINE_M, pose[0])
        for row in range(46, 128, 4):
            expected = column_at(SMALL, pose, y, row + 0.5)
            if inside(SMALL, row, expected, margin=18):
                assert abs(peak(frame[row], expected, reach=9) - expected) < 1.0
                found += 1
    assert found > 12


def test_moving_right_moves_the_line_left_by_the_projected_amount():
    row, poses = 62, torch.tensor([[-6.0, 0, 900], [-7.5, 0, 900]])
    frames = grey(render(poses, MORNING, torch.arange(2), SMALL)).numpy()
    before, after = (column_at(SMALL, p, -EDGE_LINE_M, row + 0.5) for p in poses.tolist())
    assert before - after > 10
    moved = peak(frames[0, row], before, 8) - peak(frames[1, row], after, 8)
    assert moved == pytest.approx(before - after, abs=1.0)


def test_heading_turns_the_vanishing_point():
    poses = torch.tensor([[-8.0, heading, 700] for heading in (-12.0, -2.0, 8.0)])
    frames = grey(render(poses, MORNING, torch.arange(3), SMALL)).numpy()
    vanishing = []
    for pose, frame in zip(poses.tolist(), frames, strict=True):
        rows = np.arange(45, 65, 2)
        columns = [
            peak(frame[r], column_at(SMALL, pose, -EDGE_LINE_M, r + 0.5), 9) for r in rows
        ]
        slope, start = np.polyfit(rows + 0.5, columns, 1)
        vanishing.append(slope * SMALL.horizon_row + start)
        _, expected, _ = project(SMALL, pose, (1e7, 0, 0))
        assert vanishing[-1] == pytest.approx(expected, abs=2)
    # positive heading is the nose to the left: the runway's end moves to the right
    assert vanishing == sorted(vanishing)


def test_markings_move_with_the_place_along_the_runway():
    # the near end of the first block beside the centre line
    for down_track in (292.0, 295.0):
        pose = (-6.0, 0.0, down_track)
        frame = grey(render(torch.tensor([pose]), MORNING, torch.tensor([5]), SMALL))[0]
        before, on = (project(SMALL, pose, (300 + dx, -10.4, 0))[:2] for dx in (-0.7, 0.7))
        assert frame[int(on[0]), int(on[1])] > 1.1 * frame[int(before[0]), int(before[1])]


def sun_by_hand(hour, heading):
    """Forward, left, up of the aircraft towards the sun, by azimuth and elevation."""
    latitude, declination = math.radians(47.2), math.radians(15)
    angle = math.radians(15 * (hour - 12))
    elevation = math.asin(
        math.sin(latitude) * math.sin(declination)
        + math.cos(latitude) * math.cos(declination) * math.cos(angle)
    )
    azimuth = math.acos(
        (math.sin(declination) - math.sin(elevation) * math.sin(latitude))
        / (math.cos(elevation) * math.cos(latitude))
    )
    azimuth = azimuth if hour < 12 else 2 * math.pi - azimuth
    # clockwise from the nose, which points to 40 degrees less its heading to the left
    bearing = azimuth - math.radians(40 - heading)
    return (
        math.cos(elevation) * math.cos(bearing),
        -math.cos(elevation) * math.sin(bearing),
        math.sin(elevation),
    )


def shadow_place(sun, part, pose):
    """Where on the runway a part of the aircraft (forward, left, up) hides the sun."""
    forward, left = (part[i] - part[2] * sun[i] / sun[2] for i in (0, 1))
    turn = math.radians(pose[1])
    return (
        pose[2] + forward * math.cos(turn) - left * math.sin(turn),
        pose[0] + forward * math.sin(turn) + left * math.cos(turn),
        0.0,
    )


@pytest.mark.parametrize("hour", [7.0, 9.0, 12.5, 15.5, 17.0, 18.0])
@pytest.mark.parametrize("heading", [-25.0, 0.0, 20.0])
def test_shadow_lies_away_from_the_sun(hour, heading):
    sun, pose = sun_by_hand(hour, heading), (-3.0, heading, 900.0)
    turned = from_aircraft(runway_sun(hour), torch.full((1, 1, 1), math.radians(heading)))
    assert turned.flatten().tolist() == pytest.approx(sun, abs=1e-6)
    hidden = shadow(rays(SMALL, CPU), turned)[0]
    parts = [(-0.4, left, 2.57) for left in np.linspace(-7.5, 7.5, 16)]
    parts += [(forward, 0, 1.6) for forward in np.linspace(-6, 2, 9)]
    for part in parts:
        for away, shaded in ((part, True), ((part[0] + 60, part[1] + 60, part[2]), False)):
            row, column, depth = project(SMALL, pose, shadow_place(sun, away, pose))
            if depth > 0 and inside(SMALL, row, column):
                value = float(hidden[int(row) - SMALL.sky_rows, int(column)])
                assert value > 0.85 if shaded else value == 0


def runway_sun(hour):
    from scodbench.runway.sunlight import sun_direction

    return sun_direction(torch.tensor([hour], dtype=torch.float64))[..., None, None].float()


@pytest.mark.parametrize("heading", [-32.0, -18.0])
def test_the_sun_is_seen_where_it_stands(heading):
    pose = (0.0, heading, 800.0)
    dawn = Condition(hours=(5.75, 5.75), cloud_cover=(0, 0))
    frame = render(torch.tensor([pose]), dawn, torch.tensor([1]), SMALL)[0]
    far = [1e7 * part for part in runway_sun(5.75).flatten().tolist()]
    row, column, _ = project(SMALL, pose, far)
    assert inside(SMALL, row, column)
    green = frame[1, int(row) - 2 : int(row) + 3, 25:].mean(dim=0)
    bright = (green > green.max() - 0.01).nonzero().double().mean() + 25.5
    assert float(bright) == pytest.approx(column, abs=4)


def test_afternoon_frames_show_the_wings_shadow_and_morning_frames_do_not():
    pose, wing = (-7.0, 0.0, 1400.0), (-0.4, -1.0, 2.57)
    row, column, _ = project(SMALL, pose, shadow_place(sun_by_hand(16.25, 0.0), wing, pose))
    assert inside(SMALL, row, column)
    quarter_past_four = Condition(hours=(16.25, 16.25), cloud_cover=(0, 0))
    many = torch.tensor([pose]).expand(3, 3)
    values = []
    for condition in (quarter_past_four, MORNING):
        frames = grey(render(many, condition, torch.arange(3), SMALL))
        spot = frames[:, int(row) - 1 : int(row) + 2, int(column) - 1 : int(column) + 2]
        lit = frames[:, 75:85, 75:100]
        values.append(float(spot.mean() / lit.mean()))
    assert values[0] < 0.75 * values[1]
    assert AFTERNOON.hours[0] <= 16.25 <= AFTERNOON.hours[1]


@pytest.fixture(scope="module")
def real():
    path = (
        Path(os.environ.get("SCODKIT_DATA", "")) / "taxinet/taxinet_xplane_morning_72x128.npz"
    )
    if not path.is_file():
        pytest.skip("no TaxiNet frames: set SCODKIT_DATA")
    with np.load(path) as held:
        return {name: held[name] for name in held.files}


def test_labels_mean_the_same_in_real_frames(real):
    camera, errors = Camera(rows=72, columns=128), []
    for image, label, x in zip(
        real["images"], real["labels"], real["downtrack_m"], strict=True
    ):
        pose = (*map(float, label), float(x))
        if pose[0] < -2:
            frame = image.astype(float).mean(axis=2)
            for row in range(26, 60, 3):
                expected = column_at(camera, pose, -EDGE_LINE_M, row + 0.5)
                if inside(camera, row, expected, margin=12):
                    errors.append(abs(peak(frame[row], expected, 8) - expected))
    assert len(errors) > 100
    assert np.median(errors) < 1.0


def test_mornings_have_the_colours_of_real_ones(real):
    few = slice(0, None, 8)
    images = torch.from_numpy(real["images"][few]).permute(0, 3, 1, 2) / 255.0
    poses = torch.from_numpy(np.c_[real["labels"][few], real["downtrack_m"][few]])
    frames = render(poses, MORNING, torch.arange(len(poses)), Camera(rows=72, columns=128))
    parts = {
        "sky": (slice(4, 15), slice(24, 128)),
        "fields": (slice(18, 20), slice(112, 128)),
        "runway": (slice(30, 72), slice(24, 128)),
        "cowling": (slice(22, 36), slice(2, 9)),
    }
    for name, (rows, columns) in parts.items():
        ours, theirs = (p[:, :, rows, columns].mean(dim=(0, 2, 3)) for p in (frames, images))
        assert torch.allclose(ours, theirs, atol=0.09), (name, ours, theirs)
    ours, theirs = (grey(p).std() for p in (frames, images))
    assert float(ours / theirs) == pytest.approx(1, abs=0.2)
