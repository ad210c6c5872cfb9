"""Models of Hugging Face as they come: on the fast path, and right; run by make test-hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scodkit import Categorical, LastLayers, Monitor

transformers = pytest.importorskip("transformers", reason="of make test-hosts")

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WORDS, CLASSES = 50, 3
TEXT = {"vocab_size": WORDS, "num_labels": CLASSES, "pad_token_id": 0}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = {**SMALL, "intermediate_size": 32}


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, **WIDE))


def roberta() -> nn.Module:
    config = transformers.RobertaConfig(**TEXT, **WIDE, max_position_embeddings=40)
    return transformers.RobertaForSequenceClassification(config)


def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(**TEXT, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
    return transformers.DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(**TEXT, n_embd=16, n_layer=2, n_head=2, n_positions=40)
    return transformers.GPT2ForSequenceClassification(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(**WIDE, image_size=16, patch_size=8, num_labels=CLASSES)
    return transformers.ViTForImageClassification(config)


def texts(count: int, length: int, seed: int, *, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, (count, length), generator=generator)
    mask = torch.ones_like(words)
    if padded:
        for i in range(count):
            mask[i, length - i % (length // 2) :] = 0
    return {"input_ids": words * mask, "attention_mask": mask}


def images(count: int, length: int, seed: int, *, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 3, 16, 16)
    return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "bert": (bert, texts),
    "roberta": (roberta, texts),
    "distilbert": (distilbert, texts),
    "gpt2": (gpt2, texts),
    "vit": (vit, images),
}


def fitted(name: str, **options: Any) -> tuple[Monitor, Callable[..., Any]]:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    monitor = Monitor(build().double().eval(), Categorical(), rank=8, **options)
    return monitor.fit([batch(8, 10, seed) for seed in (1, 2)], progress=False), batch


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"parameters": LastLayers(fraction=0.15)}], ids=str)
def test_scores_are_those_of_each_sample_alone(name: str, options: dict[str, Any]) -> None:
    monitor, batch = fitted(name, **options)
    assert monitor.fitted.engine is not None
    assert monitor.fitted.engine.startswith("HookEngine")
    for length, padded in ((10, True), (10, False), (8, True)):
        found = monitor.selftest(batch(6, length, 3, padded=padded))
        assert found.engine == "HookEngine"
        assert found.distance < 1e-9, str(found)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_models_own(name: str) -> None:
    monitor, batch = fitted(name)
    x = batch(6, 10, 3)
    with torch.no_grad():
        expected = monitor.model(**x).logits
    torch.testing.assert_close(monitor(x).output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_padding_does_not_change_a_score(name: str) -> None:
    monitor, batch = fitted(name)
    x = batch(4, 10, 3)
    wider = {key: nn.functional.pad(value, (0, 3)) for key, value in x.items()}
    torch.testing.assert_close(monitor.score(wider), monitor.score(x), rtol=1e-9, atol=0)
