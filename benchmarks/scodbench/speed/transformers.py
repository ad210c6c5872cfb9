"""Transformers of Hugging Face and recurrent networks: scores and fits beside the floor.

The floor is a forward pass, one backward pass per direction to the chosen weights, in the same
precision, and the bare product of so many rows with the basis. Random weights from a config.
Rows go to results/transformers.jsonl; those of BERT-base and ViT-B on a GPU, in bfloat16, to
transformers_cuda.jsonl.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scodbench.speed.turns import Run, Timed, add_rows, interleaved, rows_file, settle
from scodkit import Categorical, LastLayers, Monitor
from scodkit.likelihoods import Likelihood
from scodkit.model.parameters import Selection

RANK, SECONDS = 20, {"cpu": 4.0, "cuda": 0.1}
WORDS, LENGTH = 1000, 32
FIT_ON, SKIP = 22, 2  # batches; of these the first choose the engine and check its rows


@dataclass(frozen=True)
class Case:
    """A network, a batch of it, and what of it is monitored."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    size: int
    parameters: Selection = "all"
    likelihood: Likelihood = Categorical()  # noqa: RUF009 (it is frozen)
    precision: torch.dtype | None = None


class Recurrent(nn.Module):
    """An LSTM or GRU with a linear head on its last state.

    Args:
        kind: Of the layer.
    """

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(32, 128, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(B, 4)`` of sequences ``(B, T, 32)``."""
        return self.head(self.cell(x)[0][:, -1])


def bert(**options: Any) -> nn.Module:
    """Return a classifier of texts, BERT-base by default."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_labels=4, **options)).eval()


def vit() -> nn.Module:
    """Return ViT-B/16 with ten classes."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=10)).eval()


def texts(size: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Return a padded batch of random words, ``(size, length)``, with its mask."""
    mask = torch.ones(size, length, dtype=torch.int64)
    for i in range(size):
        mask[i, length - i % (length // 2) :] = 0
    return {"input_ids": torch.randint(0, WORDS, mask.shape), "attention_mask": mask}


def tiny() -> nn.Module:
    """Return a BERT of four layers of width 128."""
    return bert(
        vocab_size=WORDS,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
    )


def sequences(size: int) -> Tensor:
    """Return random sequences ``(size, T, 32)``."""
    return torch.randn(size, LENGTH, 32)


LAST, HALF = LastLayers(fraction=0.15), torch.bfloat16
CASES = {
    "cpu": (
        Case("BERT, 4 x 128, padded", tiny, texts, 64),
        Case("LSTM, 128", lambda: Recurrent(nn.LSTM).eval(), sequences, 64),
        Case("GRU, 128", lambda: Recurrent(nn.GRU).eval(), sequences, 64),
    ),
    "cuda": (
        Case("BERT-base", bert, lambda n: texts(n, 128), 32, LAST, precision=HALF),
        Case("ViT-B", vit, lambda n: torch.randn(n, 3, 224, 224), 32, LAST, precision=HALF),
    ),
}


def rows(case: Case, device: str) -> Iterator[dict[str, Any]]:
    """Yield the times of one network."""
    torch.manual_seed(0)
    model = case.build().to(device)
    batches = [_on(case.batch(case.size), device) for _ in range(4)]
    x, half = batches[0], case.precision
    monitor = Monitor(model, case.likelihood, RANK, parameters=case.parameters)
    monitor.fit(batches, progress=False, precision=half)
    monitor.precision = half
    names = monitor.fitted.parameters.names
    weights = [w for name, w in model.named_parameters() if name in names]

    def run(backward: bool) -> None:
        with torch.autocast(device, half, enabled=half is not None):
            with torch.set_grad_enabled(backward):
                out = model(**x) if isinstance(x, Mapping) else model(x)
            output = getattr(out, "logits", out).float()
        for row in case.likelihood.factor(output.detach()).unbind(1) if backward else ():
            torch.autograd.grad(output, weights, row, retain_graph=True, allow_unused=True)

    vectors = monitor.basis.vectors
    directions = case.likelihood.num_directions(monitor.fitted.shape)
    flat = torch.randn(case.size * directions, len(vectors), device=device)

    def floor() -> None:
        run(backward=True)
        _ = flat @ vectors

    runs: dict[str, Run] = {
        "forward": lambda: run(backward=False),
        "forward, backward": lambda: run(backward=True),
        "floor": floor,
        "score": lambda: monitor.score(x),
    }
    times = interleaved(runs, device, SECONDS[device])
    clock = Timed([x] * FIT_ON, SKIP)
    again = Monitor(model, case.likelihood, RANK, parameters=case.parameters)
    again.fit(clock, progress=False, precision=half, check_deterministic=False)
    times["fit"] = 1e3 * clock.each
    for method, ms in times.items():
        yield {
            "net": case.name,
            "method": method,
            "batch": case.size,
            "ms": ms,
            "engine": monitor.fitted.engine,
            "weights": monitor.fitted.parameters.num_parameters,
            "precision": str(half),
        }


def _on(batch: Any, device: str) -> Any:
    if isinstance(batch, Mapping):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return batch.to(device)


def measure(device: str, output: Path) -> None:
    """Measure all networks, write the rows and print them.

    Args:
        device: Where.
        output: Folder for the rows.
    """
    settle(device)
    warnings.simplefilter("ignore")
    file = rows_file(output, "transformers", device)
    for case in CASES[device]:
        times = list(rows(case, device))
        add_rows(file, times, "floors", times[2]["ms"], device)
        cells = "  ".join(f"{r['method']} {r['ms']:.2f} ms ({r['floors']:.2f})" for r in times)
        print(f"{case.name}, {times[0]['engine']}: {cells}", flush=True)
