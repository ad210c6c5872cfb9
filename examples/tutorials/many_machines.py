"""Many machines, one fit."""

# %% [markdown]
# Training data may lie on several machines, and jobs get killed. A monitor's fit is a sum
# over samples, so neither matters:
#
# - every machine fits its own part of the data, and the parts **merge** into the fit of all
#   of it, the same one up to rounding;
# - a fit that is killed **resumes from its checkpoint** and ends with the same numbers, bit
#   for bit.
#
# You need not believe either: this page starts real processes, kills one, and compares.

# %%
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from safetensors.torch import save_file

from scodkit import Categorical, Monitor

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# Every process needs the network and its data, which come from a file of yours. This one has
# a classifier of digits, and a data set that is slow to read and logs what was read.

# %%
JOB = """
import time
import torch
from sklearn.datasets import load_digits
from torch import nn


def net():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


class Digits(torch.utils.data.Dataset):
    def __init__(self, seconds=0.0):
        self.images = torch.tensor(load_digits().images).float()[:960, None] / 16
        self.seconds = seconds

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        if self.seconds:
            time.sleep(self.seconds)
            with open("read.log", "a") as log:
                print(time.time(), file=log)
        return self.images[i]


def digits():
    return Digits()


def slow_digits():
    return Digits(seconds=0.002)
"""
(folder / "job.py").write_text(JOB)
job: dict = {}
exec(JOB, job)

torch.manual_seed(0)
x = job["Digits"]().images
y = torch.tensor(job["load_digits"]().target[:960])
model = job["net"]()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(8):
    for batch in torch.randperm(960).split(64):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
save_file(model.state_dict(), folder / "weights.safetensors")


def start(data: str, *options: str) -> subprocess.Popen:
    """Start ``scod fit`` in a process of its own."""
    command = ["fit", "job.py:net", f"job.py:{data}", "--weights", "weights.safetensors"]
    options = ("--likelihood", "categorical", "--batch-size", "32", "--rank", "50", *options)
    command = [sys.executable, "-m", "scodkit", *command, *options]
    one_core = {**os.environ, "OMP_NUM_THREADS": "1"}  # for each of the processes
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=folder, env=one_core, **quiet)


# %% [markdown]
# ## Two machines
#
# Each process reads one half. On real machines these are two jobs; here they are two
# processes that know nothing of each other. In a shell it would be `scod fit job.py:net
# job.py:digits ... --shard 1/2 -o part-1.scod`.

# %%
jobs = [start("digits", "--shard", f"{i}/2", "-o", f"part-{i}.scod") for i in (1, 2)]
assert [job.wait() for job in jobs] == [0, 0]

merged = Monitor.load(folder / "part-1.scod", model)
merged.merge(Monitor.load(folder / "part-2.scod", model))
alone = Monitor(model, Categorical(), rank=50).fit(x)

new = torch.tensor(job["load_digits"]().images).float()[960:, None] / 16
scores, other = alone.score(new), merged.score(new)
print(f"samples: {merged.basis.num_data} merged, {alone.basis.num_data} in one fit")
apart = ((other - scores) / scores).abs().max()
print(f"scores of {len(new)} new digits differ by {apart:.0e} of their size at most")

# %% [markdown]
# The two halves were never in one place, and only sketches travelled: sums over samples, no
# images. Merging a part twice is refused, as its samples would count double.
#
# Processes that can talk to each other take one line instead: `torchrun --nproc-per-node=2 -m
# scodkit fit ...` reads a part in each and adds up at the end ([many
# processes](../guides/scaling.md)).
#
# ## Killed, and started again
#
# `--checkpoint` keeps the sums every few batches. This fit is killed after its second
# checkpoint, without a warning, as a spot instance is; then the same command is given again.
# Meanwhile, another process does the same fit undisturbed.


# %%
def times_read() -> list[float]:
    """Return when each sample was read, in seconds since the epoch."""
    log = folder / "read.log"
    return [float(line) for line in log.read_text().splitlines()] if log.exists() else []


undisturbed = start("digits", "-o", "undisturbed.scod")
options = ("--checkpoint", "fit.ckpt", "--every", "5", "-o", "resumed.scod")
killed = start("slow_digits", *options)
while len(times_read()) < 400:
    time.sleep(0.01)
killed.kill()
killed.wait()
before = len(times_read())
again = start("slow_digits", *options)
assert (again.wait(), undisturbed.wait()) == (0, 0)
read = times_read()
print(
    f"read before the kill: {before} samples; after it: {len(read) - before}; in all: {len(x)}"
)

monitors = [Monitor.load(folder / f"{name}.scod", model) for name in ("undisturbed", "resumed")]
same = torch.equal(monitors[0].score(new), monitors[1].score(new))
print(f"the same scores, bit for bit: {same}")

# %%
# Figure: Above, the curvature of the merged fit lies on that of one fit, direction by
# direction. Below, samples read over time: a kill, a start, and the fit resumes where it was.
figure, (above, below) = plt.subplots(2, figsize=(5, 5), layout="constrained")
above.semilogy(alone.basis.values, color="#0072B2", lw=5, alpha=0.4, label="one fit")
above.semilogy(merged.basis.values, ".", color="#D55E00", ms=4, label="two parts, merged")
above.set(xlabel="direction", ylabel="curvature")
above.legend(frameon=False)
seconds = torch.tensor(read, dtype=torch.float64) - read[0]
count = torch.arange(1, len(read) + 1)
below.plot(seconds[:before], count[:before], color="#D55E00", label="killed")
below.plot(seconds[before:], count[before:], color="#0072B2", label="started again")
below.plot(seconds[before - 1], before, "x", color="black", ms=8)
below.set(xlabel="seconds", ylabel="samples read")
below.legend(frameon=False)
for axes in (above, below):
    axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# The second process reads more than what was missing: also the batches since the last
# checkpoint, and eight earlier ones, to make sure that the data is still the same. Changed data
# is refused.
#
# In Python it is `monitor.fit(loader, checkpoint="fit.ckpt", every=100)`. A folder of [job
# scripts](../guides/scaling.md) has a Slurm array, Ray and Spark.
