"""Ray actors: each sketches a part of the data, and the parts are added up.

In ``../own_model``, after ``python model.py`` and ``pip install ray``:
``PYTHONPATH=$PWD python ../many_machines/ray_actors.py``. On a cluster the folder must be one
that all machines see.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import ray
import torch
from model import net
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from scodkit import Gaussian, Monitor
from scodkit.parts import Shard

ACTORS = 4


def new_monitor(folder: Path) -> Monitor:
    """Return a monitor of the trained network, not fitted yet."""
    network = net()
    network.load_state_dict(load_file(folder / "weights.safetensors"))
    return Monitor(network, Gaussian(0.3), rank=30)


@ray.remote
class Site:
    """Whoever holds a part of the data; only its sketch leaves the place."""

    def fit(self, folder: Path, index: int) -> Path:
        """Return where the fit of one part is."""
        rows = np.loadtxt(folder / "train.csv", delimiter=",", skiprows=1, dtype=np.float32)
        part = Shard(TensorDataset(torch.from_numpy(rows)), index, ACTORS)
        monitor = new_monitor(folder).fit(DataLoader(part, batch_size=64), progress=False)
        path = folder / f"ray-{index}.scod"
        monitor.save(path)
        return path


def main() -> None:
    """Fit all parts at once, and add them up."""
    ray.init()
    folder = Path.cwd()
    sites = [Site.remote() for _ in range(ACTORS)]
    paths = ray.get([site.fit.remote(folder, i) for i, site in enumerate(sites)])
    network = new_monitor(folder).model
    whole, *others = [Monitor.load(path, network) for path in paths]
    for other in others:
        whole.merge(other)
    whole.save("monitor.scod")
    print(whole)


if __name__ == "__main__":
    main()
