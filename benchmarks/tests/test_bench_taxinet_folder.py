"""A folder of real TaxiNet frames, as the NASA ULI release has them, made up here."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scodbench.data.errors import FormatError, MissingDataError
from scodbench.data.taxinet_folder import load_taxinet_folder, read_labels
from scodbench.domains import DOMAINS, OPTIONAL_DOMAINS

HEADER = [
    "image_filename",
    "absolute_time_GMT_seconds",
    "relative_time_seconds",
    "distance_to_centerline_meters",
    "distance_to_centerline_NORMALIZED",
    "downtrack_position_meters",
    "downtrack_position_NORMALIZED",
    "heading_error_degrees",
    "heading_error_NORMALIZED",
    "period_of_day",
    "cloud_type",
]


def write_split(
    folder: Path, count: int, *, shade: int = 0, header: list[str] = HEADER
) -> Path:
    folder.mkdir(parents=True)
    path = folder / "labels.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, header, restval="0", extrasaction="ignore")
        table.writeheader()
        for i in range(count):
            name = f"MWH_Runway04_morning_clear_1_{i}.png"
            pixels = np.full((20, 36, 3), (shade + i, 7, 9), np.uint8)
            Image.fromarray(pixels).save(folder / name)
            table.writerow(
                {
                    "image_filename": name,
                    "distance_to_centerline_meters": f"{i - 2.5:.6f}",
                    "heading_error_degrees": f"{3 * i:.6f}",
                }
            )
    return path


@pytest.fixture
def release(tmp_path: Path) -> Path:
    for number, name in enumerate(
        ("morning_train", "morning_validation", "morning_test", "afternoon_test", "night_test")
    ):
        folder = tmp_path / "taxinet" / name.split("_")[0] / name
        write_split(folder, 3 + number, shade=20 * number)
    return tmp_path


class TestFolder:
    def test_frames_and_targets_are_those_of_the_files(self, release: Path) -> None:
        splits = OPTIONAL_DOMAINS["taxinet_xplane"].splits(release)
        parts = (splits.train, splits.selection, splits.test)
        assert [len(p) for p in parts] == [3, 4, 5]
        assert {name: len(s) for name, s in splits.novel.items()} == {
            "afternoon": 6,
            "night": 7,
        }
        for number, part in enumerate((*parts, *splits.novel.values())):
            x, y = part.read()
            assert x.shape == (len(part), 3, 260, 300)
            shades = ((x[:, :, 100, 100] + 1) * 127.5).round()
            own = shades[:, 0] - 20 * number  # the number of the frame in its file
            assert sorted(own.tolist()) == list(range(len(part)))
            assert (shades[:, 1:] == torch.tensor([7.0, 9.0])).all()
            torch.testing.assert_close(y[:, 0] * 10, own - 2.5)
            torch.testing.assert_close(y[:, 1] * 30, 3 * own)

    def test_digests_see_files_and_targets(self, release: Path) -> None:
        splits = OPTIONAL_DOMAINS["taxinet_xplane"].splits
        before = splits(release).train.digest()
        assert splits(release).train.digest() == before
        path = release / "taxinet/morning/morning_train/MWH_Runway04_morning_clear_1_0.png"
        noise = np.random.default_rng(0).integers(0, 256, (20, 36, 3), np.uint8)
        Image.fromarray(noise).save(path)
        assert splits(release).train.digest() != before

    def test_a_domain_of_its_own_that_nobody_has_to_have(self) -> None:
        assert not OPTIONAL_DOMAINS.keys() & DOMAINS.keys()
        domain = OPTIONAL_DOMAINS["taxinet_xplane"]
        assert (
            replace(
                domain,
                name="taxinet",
                title=DOMAINS["taxinet"].title,
                splits=DOMAINS["taxinet"].splits,
            )
            == (DOMAINS["taxinet"])
        )

    def test_a_missing_folder_says_what_goes_where(self, release: Path) -> None:
        with pytest.raises(MissingDataError, match=r"morning/morning_train/labels\.csv .*purl"):
            load_taxinet_folder(release / "elsewhere")
        (release / "taxinet/morning/morning_test/labels.csv").unlink()
        with pytest.raises(MissingDataError, match=r"not there: morning/morning_test/labels"):
            load_taxinet_folder(release)

    def test_mornings_alone_are_not_enough(self, release: Path) -> None:
        for name in ("afternoon", "night"):
            (release / f"taxinet/{name}/{name}_test/labels.csv").unlink()
        with pytest.raises(MissingDataError, match=r"not there: afternoon/.*night/.*overcast/"):
            load_taxinet_folder(release)

    def test_a_missing_image_is_named(self, tmp_path: Path) -> None:
        path = write_split(tmp_path / "some", 3)
        (tmp_path / "some/MWH_Runway04_morning_clear_1_1.png").unlink()
        with pytest.raises(
            FormatError, match=r"1 are not there: .*clear_1_1\.png is the first"
        ):
            read_labels(path)

    def test_a_missing_column_is_named(self, tmp_path: Path) -> None:
        header = [name for name in HEADER if name != "heading_error_degrees"]
        path = write_split(tmp_path / "some", 3, header=header)
        with pytest.raises(FormatError, match="there is no heading_error_degrees"):
            read_labels(path)

    @pytest.mark.parametrize("text", ["", "left", "nan"])
    def test_what_is_no_number_is_shown_with_its_line(self, tmp_path: Path, text: str) -> None:
        path = write_split(tmp_path / "some", 3)
        path.write_text(path.read_text().replace("-1.500000", text))
        with pytest.raises(FormatError, match=f"number in line 3 of .*, got '{text}'"):
            read_labels(path)

    def test_an_empty_table_and_a_broken_image_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="got none"):
            read_labels(write_split(tmp_path / "none", 0))
        frames = read_labels(write_split(tmp_path / "cut", 1))
        frames.files[0].write_bytes(frames.files[0].read_bytes()[:60])
        with pytest.raises(FormatError, match="whole image"):
            frames.read(0, 8, 8)
