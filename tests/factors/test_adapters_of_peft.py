"""LoRA as peft adds it to models of Hugging Face: right, and fast; run by make test-hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles import dense_fisher, dense_score
from scodkit import Categorical, Monitor
from scodkit.factors.hooks import HookEngine
from scodkit.sketch import Exact

transformers = pytest.importorskip("transformers", reason="of make test-hosts")
peft = pytest.importorskip("peft", reason="of make test-hosts")

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WORDS, CLASSES, LENGTH = 50, 3, 7


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        num_labels=CLASSES,
        pad_token_id=0,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, num_labels=CLASSES, pad_token_id=0, n_embd=16, n_layer=2, n_head=2
    )
    return transformers.GPT2ForSequenceClassification(config)


# the model, the layers with an adapter, and their number; GPT-2's are transposed
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str], int]] = {
    "bert": (bert, ["query", "value", "output.dense"], 8),
    "gpt2": (gpt2, ["c_attn", "c_fc"], 4),
}


def adapted(name: str, way: str) -> nn.Module:
    """A model with adapters that change its output, as after training."""
    torch.manual_seed(0)
    build, layers, _ = MODELS[name]
    model = build()
    config = peft.LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.1,
        target_modules=layers,
        fan_in_fan_out=name == "gpt2",
        init_lora_weights=False,
        task_type=peft.TaskType.SEQ_CLS if way == "get_peft_model" else None,
    )
    if way == "get_peft_model":
        model = peft.get_peft_model(model, config)
    else:
        model.add_adapter(config)
    return model.double().eval()


def texts(count: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < 4 + torch.arange(count)[:, None] % 4).long()
    return {"input_ids": words * mask, "attention_mask": mask}


def rows(model: nn.Module, weights: list[Tensor], x: dict[str, Tensor]) -> Tensor:
    """Return roots of the Fisher information of each sample alone, by plain autograd."""
    found = []
    for i in range(len(x["input_ids"])):
        logits = model(**{key: value[i : i + 1] for key, value in x.items()}).logits[0]
        chances = logits.log_softmax(0)
        gradients = [torch.autograd.grad(c, weights, retain_graph=True) for c in chances]
        flat = torch.stack([torch.cat([g.flatten() for g in each]) for each in gradients])
        found.append(chances.detach().exp().sqrt()[:, None] * flat)
    return torch.stack(found)


@pytest.mark.parametrize("way", ["get_peft_model", "add_adapter"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_of_adapters_are_those_of_plain_autograd(name: str, way: str) -> None:
    model, train, new = adapted(name, way), texts(12, 1), texts(6, 2)
    options: dict[str, Any] = {"parameters": ["*lora*"], "sketch": Exact(), "prior_scale": 2.0}
    monitor = Monitor(model, Categorical(), **options).fit([train], progress=False)
    weights = [p for n, p in model.named_parameters() if "lora" in n]
    assert len(weights) == 2 * MODELS[name][2]
    assert len(monitor.fitted.parameters.names) == len(weights)
    assert isinstance(monitor._ready().source.engine, HookEngine)
    fisher = dense_fisher(rows(model, weights, train))
    expected = dense_score(fisher, 12, rows(model, weights, new), 2.0)
    torch.testing.assert_close(monitor.score(new), expected, rtol=1e-9, atol=0)
    found = monitor.selftest(new)
    assert found.engine == "HookEngine"
    assert found.distance < 1e-9, str(found)
