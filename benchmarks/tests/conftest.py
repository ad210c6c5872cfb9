"""One thread per process: small problems are faster so, and the suite runs two processes."""

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"  # for processes the tests start
torch.set_num_threads(1)
