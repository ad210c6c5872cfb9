"""Runs every baseline beside the monitor on four domains of the SCOD paper, with real data.

``SCODKIT_DATA=path python benchmarks/baselines.py --seeds 3`` trains the networks (kept in a
cache), writes one JSON row per domain, seed, method and set of unknown inputs to
``benchmarks/results/baselines.jsonl``, and prints the table. Rows that are there are kept.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from baselines_table import print_table
from paper_domains import DOMAINS, FIT_ON, PaperDomain
from scodkit import LastLayers, Monitor, baselines
from scodkit.baselines import Detector
from scodkit.errors import UnsupportedLikelihoodError
from scodkit.likelihoods import Likelihood
from scodkit.sketch import Nystrom
from timing import machine

RESULTS = Path(__file__).parent / "results" / "baselines.jsonl"
MEMBERS = 5
Rows = Iterator[dict[str, object]]
Make = Callable[["Setting"], Detector]


@dataclass(frozen=True)
class Setting:
    """A domain with a network trained from a seed, and others for ensembles."""

    domain: PaperDomain
    seed: int

    @property
    def model(self) -> nn.Module:
        """The network that is looked at."""
        return self.domain.model(self.seed)

    @property
    def likelihood(self) -> Likelihood:
        """Of its output."""
        return self.domain.likelihood

    @property
    def members(self) -> list[nn.Module]:
        """The network, and others from the next seeds."""
        return [self.domain.model(self.seed + i) for i in range(MEMBERS)]

    @property
    def last_layers(self) -> LastLayers:
        """The paper's last layers: two at least, and one convolution at least."""
        return LastLayers(count=3 if self.domain.name == "rotated mnist" else 2)


def _monitor(setting: Setting, **options: object) -> Monitor:
    net = setting.domain.net
    sketch = Nystrom(size=net.size)
    return Monitor(setting.model, net.likelihood, net.rank, sketch=sketch, **options)  # type: ignore[arg-type]


def _plain(kind: type[baselines.Baseline], **options: object) -> Make:
    return lambda s: kind(s.model, s.likelihood, **options)  # type: ignore[arg-type]


METHODS: dict[str, Make] = {
    "scod": _monitor,
    "scod_ll": lambda s: _monitor(s, parameters=s.last_layers),
    "identity_curvature": _plain(baselines.IdentityCurvature),
    "naive": _plain(baselines.Naive),
    "deep_ensemble": lambda s: baselines.DeepEnsemble(s.members, s.likelihood),
    "local_ensemble": lambda s: baselines.LocalEnsemble(
        s.model, s.likelihood, rank=s.domain.local_rank
    ),
    "kfac_laplace": _plain(baselines.KFACLaplace),
    "kfac_laplace_glm": _plain(baselines.KFACLaplace, samples=None),
    "kfac_laplace_ll": _plain(baselines.KFACLaplace, samples=None, last_layer=True),
    "sketched_lanczos": lambda s: baselines.SketchedLanczos(
        s.model, s.likelihood, rank=s.domain.net.rank
    ),
    "max_softmax": _plain(baselines.MaxSoftmax),
    "max_logit": _plain(baselines.MaxLogit),
    "energy": _plain(baselines.Energy),
    "mahalanobis": _plain(baselines.Mahalanobis),
    "knn": _plain(baselines.KNN),
    "vim": _plain(baselines.ViM),
    "residual": _plain(baselines.Residual),
    "grad_norm": _plain(baselines.GradNorm),
}


def rows_of(setting: Setting, name: str) -> Rows:
    """Yield the rows of one method; none where it is not for the domain's likelihood."""
    try:
        detector = METHODS[name](setting)
    except UnsupportedLikelihoodError:
        return
    splits = setting.domain.splits()
    x, y = (part[:FIT_ON] for part in splits.train)
    began = time.perf_counter()
    detector.fit(DataLoader(TensorDataset(x, y), batch_size=128), progress=False)
    fit_s = time.perf_counter() - began
    sets = {"known": splits.known, **splits.novel}
    scores = {which: _scores(detector, x) for which, x in sets.items()}
    unknown = {which: scores[which] for which in splits.novel}
    unknown["pooled"] = torch.cat(list(unknown.values()))
    about = {"domain": setting.domain.name, "seed": setting.seed, "method": name}
    times = {"fit_s": fit_s, **{f"ms_b{b}": _ms(detector, splits.known[:b]) for b in (1, 64)}}
    for which, found in unknown.items():
        truth = torch.cat([torch.zeros(len(scores["known"])), torch.ones(len(found))])
        auroc = roc_auc_score(truth, torch.cat([scores["known"], found]))
        yield {**about, "ood": which, "auroc": float(auroc), **times}


def _scores(detector: Detector, x: Tensor) -> Tensor:
    return torch.cat([detector.score(part) for part in x.split(128)])


def _ms(detector: Detector, x: Tensor) -> float:
    """Return the least milliseconds per sample of a few runs."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        detector.score(x)
        times.append(time.perf_counter() - began)
    return min(times) * 1e3 / len(x)


def main() -> None:
    """Add the rows that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--domain", choices=DOMAINS, action="append")
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers
    torch.set_num_threads(1)
    done = set()
    if options.output.exists():
        lines = options.output.read_text(encoding="utf-8").splitlines()
        done = {(r["domain"], r["seed"], r["method"]) for r in map(json.loads, lines)}
    about = machine("cpu")
    with options.output.open("a", encoding="utf-8") as file:
        for seed in range(options.seeds):
            for domain in options.domain or DOMAINS:
                for method in options.method or METHODS:
                    if (domain, seed, method) in done:
                        continue
                    rows = list(rows_of(Setting(DOMAINS[domain], seed), method))
                    lines = [json.dumps({**row, **about}) + "\n" for row in rows]
                    file.writelines(lines)
                    file.flush()
                    if rows:
                        pooled = rows[-1]
                        print(domain, seed, method, f"{pooled['auroc']:.4f}", flush=True)
    print_table(options.output)


if __name__ == "__main__":
    main()
