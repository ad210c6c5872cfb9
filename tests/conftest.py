"""What all tests share.

One thread per process: small problems are faster so, and the suite runs two processes.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# before any of them is imported
pytest.register_assert_rewrite("baseline_contracts", "contracts", "engines")
os.environ["OMP_NUM_THREADS"] = "1"  # for processes the tests start
torch.set_num_threads(1)

PLACES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where to save a monitor."""
    return tmp_path / "monitor.scod"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium: Debian's, or playwright's own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, PLACES)), None)
    with sync_api.sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        if found is None and not own.exists():
            pytest.skip("no Chromium found: apt-get install chromium, or CHROMIUM=/path/to/it")
        # a container often runs as root, where Chromium's sandbox does not start
        opened = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield opened
        opened.close()
