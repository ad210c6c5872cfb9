"""Spark's TorchDistributor: the processes of one fit, each with a part of the data.

In ``../own_model``, after ``python model.py`` and ``pip install pyspark``:
``PYTHONPATH=. python ../many_machines/spark_distributor.py``. ``local_mode=False`` has Spark's
executors do it; the folder must then be one that all of them see.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

PROCESSES = 2


def fit(folder: str) -> str:
    """Fit in the group that TorchDistributor has started; the first process saves."""
    # in here, as Spark sends the function to its processes
    import numpy as np
    import torch
    from model import net
    from safetensors.torch import load_file
    from torch import distributed
    from torch.utils.data import DataLoader, TensorDataset

    from scodkit import Gaussian, Monitor
    from scodkit.parts import Shard

    distributed.init_process_group("gloo")
    rank, count = distributed.get_rank(), distributed.get_world_size()
    network = net()
    network.load_state_dict(load_file(Path(folder, "weights.safetensors")))
    rows = np.loadtxt(Path(folder, "train.csv"), delimiter=",", skiprows=1, dtype=np.float32)
    part = Shard(TensorDataset(torch.from_numpy(rows)), rank, count)
    monitor = Monitor(network, Gaussian(0.3), rank=30)
    monitor.fit(DataLoader(part, batch_size=64), progress=False)
    if rank == 0:
        monitor.save(Path(folder, "monitor.scod"))
    distributed.destroy_process_group()
    return repr(monitor)


def main() -> None:
    """Start the processes and show what they have found."""
    SparkSession.builder.master(f"local[{PROCESSES}]").getOrCreate()
    distributor = TorchDistributor(num_processes=PROCESSES, local_mode=True, use_gpu=False)
    print(distributor.run(fit, str(Path.cwd())))


if __name__ == "__main__":
    main()
