"""Fits and scores of projected weights of large networks, all layers, beside passes alone.

The floor is a forward pass and one backward pass per direction to all weights, in the same
precision. Random weights, from a config; whole weights are timed beside them where they fit.
Rows go to results/projected.jsonl, on a GPU to projected_cuda.jsonl.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scodbench.speed.transformers import texts, tiny
from scodbench.speed.turns import Timed, add_rows, interleaved, rows_file, settle
from scodkit import Categorical, Monitor, Projected
from scodkit.likelihoods import Likelihood
from scodkit.numerics.timing import wait_for
from scodkit.sketch import Nystrom

RANK, SIZE, SECONDS = 50, 100, {"cpu": 4.0, "cuda": 1.0}
FIT_ON, AHEAD = 10, 2  # batches, and those of them to learn projections from


@dataclass(frozen=True)
class Case:
    """A network, a batch of it, and the directions of its output."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    size: int
    likelihood: Likelihood
    dtype: torch.dtype = torch.bfloat16


class NextToken(nn.Module):
    """Logits of the token after the last place.

    Args:
        decoder: A causal language model of Hugging Face.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits ``(B, words)`` of tokens ``(B, T)``."""
        return self.decoder(input_ids, logits_to_keep=1).logits[:, -1]


def llama(width: int, depth: int, heads: int, groups: int, inner: int) -> nn.Module:
    """Return a decoder of 32,000 words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        use_cache=False,
    )
    return NextToken(LlamaForCausalLM(config))


def vit(classes: int = 11) -> nn.Module:
    """Return ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=classes))


def pictures(size: int) -> Tensor:
    """Return random pictures ``(size, 3, 224, 224)``."""
    return torch.randn(size, 3, 224, 224)


def words(size: int, length: int = 128) -> dict[str, Tensor]:
    """Return random tokens ``(size, length)``."""
    return {"input_ids": torch.randint(0, 32_000, (size, length))}


TEN, FOUR = Categorical(directions=10), Categorical(directions=4)
CASES = {
    "cpu": (Case("BERT, 4 x 128", tiny, texts, 32, Categorical(), torch.float32),),
    "cuda": (
        Case("ViT-B", vit, pictures, 32, TEN),
        Case("decoder, 1.1 B", lambda: llama(2048, 22, 32, 4, 5632), words, 8, FOUR),
        Case("decoder, 7 B", lambda: llama(4096, 32, 32, 32, 11008), words, 2, FOUR),
    ),
}


def rows(case: Case, device: str) -> Iterator[dict[str, Any]]:
    """Yield the times and the peaks of memory, above the model, of one network."""
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(case.dtype)
        model = case.build().eval()
        torch.set_default_dtype(torch.float32)
    x = _on(case.batch(case.size), device, case.dtype)
    weights = list(model.parameters())

    def run(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            out = model(**x) if isinstance(x, Mapping) else model(x)
        output = getattr(out, "logits", out)
        for row in case.likelihood.factor(output.detach()).unbind(1) if backward else ():
            torch.autograd.grad(
                output, weights, row.to(output), retain_graph=True, allow_unused=True
            )

    clock, peaks = Timed([x] * FIT_ON), {}
    monitor = Monitor(
        model,
        case.likelihood,
        RANK,
        sketch=Nystrom(size=SIZE),
        parameters=Projected(rank=16, samples=AHEAD * case.size),
    )
    fit = lambda: monitor.fit(clock, progress=False, check_deterministic=False)  # noqa: E731
    whole_fit_s, peaks["fit"] = _measured(fit, device)
    monitor.score(x)
    _, peaks["score"] = _measured(lambda: monitor.score(x), device)
    runs = {
        "forward": lambda: run(backward=False),
        "forward, backward": lambda: run(backward=True),
        "score": lambda: monitor.score(x),
    }
    times = interleaved(runs, device, SECONDS[device], rounds=3)
    times["fit"] = 1e3 * statistics.median(clock.seconds[AHEAD + 1 :])
    times["whole fit, projections learnt"] = 1e3 * whole_fit_s
    for method, ms in times.items():
        yield {
            "net": case.name,
            "method": method,
            "batch": case.size,
            "ms": ms,
            "peak": peaks.get(method),
            "engine": monitor.fitted.engine,
            "weights": sum(weight.numel() for weight in weights),
            "coordinates": monitor.fitted.parameters.num_parameters,
            "kept": monitor.basis.nbytes
            + sum(m.nbytes for m in monitor.projections.tensors().values()),
            "directions": case.likelihood.num_directions(monitor.fitted.shape),
            "precision": str(case.dtype),
        }


def _measured(run: Callable[[], object], device: str) -> tuple[float, int]:
    """Return seconds, and on a GPU the bytes at the peak above those before."""
    cuda = device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    clock = Timed([None])
    for _ in clock:
        run()
        wait_for(torch.device(device))
    return clock.seconds[0], (torch.cuda.max_memory_allocated() if cuda else 0) - before


def _on(batch: Any, device: str, dtype: torch.dtype) -> Any:
    if isinstance(batch, Mapping):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return batch.to(device, dtype)


def measure(device: str, output: Path, names: tuple[str, ...] = ()) -> None:
    """Measure networks, write the rows and print them.

    Args:
        device: Where.
        output: Folder for the rows.
        names: Of which networks; all by default.
    """
    settle(device)
    warnings.simplefilter("ignore")
    file = rows_file(output, "projected", device)
    for case in CASES[device]:
        if names and case.name not in names:
            continue
        found = list(rows(case, device))
        add_rows(file, found, "floors", found[1]["ms"], device)
        cells = "  ".join(
            f"{r['method']} {r['ms']:.1f} ms ({r['floors']:.2f}"
            + (f", {r['peak'] / 1e9:.2f} GB)" if r["peak"] else ")")
            for r in found
        )
        print(f"{case.name}, {found[0]['engine']}, batch {case.size}: {cells}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
