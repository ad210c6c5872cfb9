"""Fits and scores of projected weights of large networks, all layers, beside passes alone.

The floor is a forward pass and one backward pass per direction to all weights, in the same
precision. Random weights, from a config. Encoders of 1 M to 1 B weights are measured whole,
too, as long as a sketch of them fits into the memory of a GPU. Rows go to
results/projected.jsonl, on a GPU to projected_cuda.jsonl.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scodbench.speed.transformers import WORDS, bert, texts, tiny
from scodbench.speed.turns import Timed, add_rows, interleaved, rows_file, settle
from scodkit import Categorical, Monitor, Projected
from scodkit.likelihoods import Likelihood
from scodkit.numerics.timing import wait_for
from scodkit.sketch import Nystrom

SECONDS = {"cpu": 4.0, "cuda": 0.1}
AHEAD = 2  # batches to learn projections from


@dataclass(frozen=True)
class Case:
    """A network, a batch of it, and the directions of its output."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    size: int
    likelihood: Likelihood
    dtype: torch.dtype = torch.bfloat16
    rank: int = 50
    projected: bool = True
    fit_on: int = 10  # batches


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


def encoder(width: int, depth: int) -> nn.Module:
    """Return a BERT with four classes."""
    return bert(
        vocab_size=WORDS,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )


def pictures(size: int) -> Tensor:
    """Return random pictures ``(size, 3, 224, 224)``."""
    return torch.randn(size, 3, 224, 224)


def words(size: int, length: int = 128) -> dict[str, Tensor]:
    """Return random tokens ``(size, length)``."""
    return {"input_ids": torch.randint(0, 32_000, (size, length))}


TEN, FOUR = Categorical(directions=10), Categorical(directions=4)
SIZES = {"1 M": (128, 4), "10 M": (384, 6), "100 M": (768, 14), "1 B": (2048, 20)}


def of_size(name: str, projected: bool) -> Case:
    """Return an encoder of so many weights, at a rank at which a tenth of them fits whole."""
    return Case(
        f"encoder, {name}",
        lambda: encoder(*SIZES[name]),
        lambda n: texts(n, 128),
        8,
        Categorical(),
        rank=20,
        projected=projected,
    )


CASES = {
    "cpu": (Case("BERT, 4 x 128", tiny, texts, 32, Categorical(), torch.float32),),
    "cuda": (
        Case("ViT-B", vit, pictures, 32, TEN),
        *(of_size(name, True) for name in SIZES),
        *(of_size(name, False) for name in list(SIZES)[:-1]),
        Case(
            "decoder, 1.1 B", lambda: llama(2048, 22, 32, 4, 5632), words, 8, FOUR, fit_on=250
        ),
        Case("decoder, 7 B", lambda: llama(4096, 32, 32, 32, 11008), words, 4, FOUR),
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

    clock, peaks = Timed([x] * case.fit_on, AHEAD + 1), {}
    projected = Projected(rank=16, samples=AHEAD * case.size) if case.projected else "all"
    sketch = Nystrom(size=2 * case.rank)
    monitor = Monitor(model, case.likelihood, case.rank, sketch=sketch, parameters=projected)
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
    times["fit"] = 1e3 * clock.each
    times["whole fit"] = 1e3 * whole_fit_s
    projections = monitor.projections.tensors().values() if case.projected else ()
    for method, ms in times.items():
        yield {
            "net": case.name,
            "method": method,
            "batch": case.size,
            "ms": ms,
            "peak": peaks.get(method),
            "engine": monitor.fitted.engine,
            "weights": sum(weight.numel() for weight in weights),
            "projected": case.projected,
            "coordinates": monitor.fitted.parameters.num_parameters,
            "kept": monitor.basis.nbytes + sum(matrix.nbytes for matrix in projections),
            "fit_on": case.fit_on * case.size,
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
        whole = "" if case.projected else ", whole weights"
        print(
            f"{case.name}{whole}, {found[0]['engine']}, batch {case.size}: {cells}", flush=True
        )
        if device == "cuda":
            torch.cuda.empty_cache()
