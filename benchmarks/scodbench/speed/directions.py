"""What one direction per sample costs in accuracy, on the paper's MNIST 0-4 network.

Fits the exact likelihood and ``Categorical(directions=1)`` on 5000 digits and compares how well
they tell unseen digits 5-9 from test digits 0-4. Writes rows to results/directions.jsonl; needs
the variable SCODKIT_DATA, as ``make bench-sketch`` does.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from sklearn.metrics import roc_auc_score

from scodbench.speed.real_nets import TrainedNet, mnist_net
from scodbench.speed.turns import machine
from scodkit import Categorical, Monitor
from scodkit.sketch import Nystrom


def auroc(net: TrainedNet, likelihood: Categorical) -> float:
    """Return the area under the ROC curve of known against novel digits."""
    monitor = Monitor(net.model, likelihood, rank=100, sketch=Nystrom(size=604))
    monitor.fit(net.fit_on.split(128), progress=False)
    scores = [
        torch.cat([monitor.score(batch) for batch in part.split(128)])
        for part in (net.known, net.novel)
    ]
    truth = torch.cat([torch.zeros(len(scores[0])), torch.ones(len(scores[1]))])
    return float(roc_auc_score(truth, torch.cat(scores)))


def measure(device: str, output: Path) -> None:
    """Train, fit, score, and write the rows.

    Args:
        device: cpu.
        output: Folder for the rows.
    """
    net = mnist_net(num_data=5000)
    rows = [
        {"net": net.name, "likelihood": repr(likelihood), "auroc": auroc(net, likelihood)}
        for likelihood in (Categorical(), Categorical(directions=1))
    ]
    (output / "directions.jsonl").write_text(
        "".join(json.dumps({**row, **machine("cpu")}) + "\n" for row in rows), encoding="utf-8"
    )
    print(*rows, sep="\n")
