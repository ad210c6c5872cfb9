"""What all tests share.

One thread per process: small problems are faster so, and the suite runs two processes.
"""

import os
from pathlib import Path

import pytest
import torch

# before any of them is imported
pytest.register_assert_rewrite("baseline_contracts", "contracts", "engines")
os.environ["OMP_NUM_THREADS"] = "1"  # for processes the tests start
torch.set_num_threads(1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where to save a monitor."""
    return tmp_path / "monitor.scod"
