"""Projected weights of Hugging Face's models as they come; run by make test-hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scodkit import Categorical, LastLayers, Monitor, Projected
from scodkit.model.projected import ProjectedSet

transformers = pytest.importorskip("transformers", reason="of make test-hosts")

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WORDS = 50
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": WORDS, "num_labels": 3, "pad_token_id": 0, "intermediate_size": 32}


class NextToken(nn.Module):
    """Logits of a few tokens after the last place of a decoder."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found = self.decoder(input_ids=input_ids, attention_mask=attention_mask)
        return found.logits[:, -1, :6]


def bert(**options: Any) -> nn.Module:
    config = transformers.BertConfig(**TEXT, **SIZES, **options)
    return transformers.BertForSequenceClassification(config)


def gpt2(**options: Any) -> nn.Module:
    """Its layers are products with the transposed weight."""
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        num_labels=3,
        pad_token_id=0,
        n_embd=16,
        n_layer=2,
        n_head=2,
        **options,
    )
    return transformers.GPT2ForSequenceClassification(config)


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**TEXT, **SIZES, num_key_value_heads=1, **options)
    return transformers.LlamaForSequenceClassification(config)


def tied(**options: Any) -> nn.Module:
    """Embedding and head are one weight."""
    config = transformers.LlamaConfig(**TEXT, **SIZES, tie_word_embeddings=True, **options)
    return NextToken(transformers.LlamaForCausalLM(config))


def vit(**options: Any) -> nn.Module:
    config = transformers.ViTConfig(
        **SIZES, intermediate_size=32, image_size=32, patch_size=8, num_labels=3, **options
    )
    return transformers.ViTForImageClassification(config)


TEXTS: list[Callable[..., nn.Module]] = [bert, gpt2, llama, tied]
ALL = [*TEXTS, vit]


def batch(build: Callable[..., nn.Module], count: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if build is vit:
        return {"pixel_values": torch.randn(count, 3, 32, 32, generator=generator)}
    words = torch.randint(1, WORDS, (count, 9), generator=generator)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def fitted(
    build: Callable[..., nn.Module],
    dtype: torch.dtype = torch.float64,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    projected: Projected = Projected(rank=3),  # noqa: B008 (frozen)
    **options: Any,
) -> Monitor:
    torch.manual_seed(0)
    model = build(**options).to(dtype).eval()
    prepare(model)
    monitor = Monitor(model, Categorical(), rank=8, parameters=projected)
    data = [cast(batch(build, 20, seed), dtype) for seed in (1, 2)]
    return monitor.fit(data, progress=False)


def cast(x: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in x.items()}


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scores_are_those_of_plain_autograd(build: Any, attention: str) -> None:
    monitor = fitted(build, attn_implementation=attention)
    assert monitor.fitted.engine is not None
    assert monitor.fitted.engine.startswith("HookEngine")
    found = monitor.selftest(cast(batch(build, 6, 3), torch.float64))
    assert found.engine == "HookEngine"
    assert found.distance < 1e-9, str(found)
    parameters = monitor.fitted.parameters
    assert isinstance(parameters, ProjectedSet)
    assert parameters.num_parameters < parameters.full.num_parameters / 3
    assert 0 < monitor.basis.inside < 1


@pytest.mark.parametrize("build", ALL)
def test_weights_in_bfloat16(build: Any) -> None:
    monitor = fitted(build, torch.bfloat16)
    assert monitor.basis.vectors.dtype == torch.float32
    found = monitor.selftest(cast(batch(build, 6, 3), torch.bfloat16))
    assert found.engine == "HookEngine"
    assert found.distance < 0.2, str(found)


@pytest.mark.parametrize("build", [bert, llama, vit])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(build: Any, reentrant: bool) -> None:
    plain = fitted(build)

    def recompute(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    monitor = fitted(build, prepare=recompute, projected=Projected(given=plain.projections))
    x = cast(batch(build, 5, 3), torch.float64)
    torch.testing.assert_close(monitor.score(x), plain.score(x), rtol=1e-9, atol=0)


def test_adapters_alone() -> None:
    def adapt(model: nn.Module) -> None:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if name in ("q_proj", "v_proj"):
                    setattr(module, name, Adapted(child))

    monitor = fitted(
        llama, prepare=adapt, projected=Projected(rank=2, layers=["*.down.*", "*.up.*"])
    )
    assert len(monitor.fitted.parameters.names) == 8
    found = monitor.selftest(batch(llama, 6, 3))
    assert found.engine == "HookEngine"
    assert found.distance < 1e-9, str(found)


class Adapted(nn.Module):
    """A linear layer with an adapter (LoRA)."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base = base
        self.down = nn.Linear(base.in_features, 8, bias=False).double()
        self.up = nn.Linear(8, base.out_features, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_last_layers() -> None:
    monitor = fitted(bert, projected=Projected(rank=3, layers=LastLayers(count=3)))
    assert monitor.selftest(batch(bert, 6, 3)).distance < 1e-9


def whole_decoder(**options: Any) -> nn.Module:
    """A next-token head at every place; embedding and head are one weight."""
    config = transformers.LlamaConfig(**TEXT, **SIZES, tie_word_embeddings=True, **options)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    "likelihood",
    [
        Categorical(class_dim=-1, samples=3, pool="mean"),
        Categorical(class_dim=-1, directions=1, pool="last"),
        Categorical(class_dim=-1, directions=1, pool="max"),
    ],
)
def test_next_token_heads(likelihood: Categorical) -> None:
    torch.manual_seed(0)
    model = whole_decoder().double().eval()
    monitor = Monitor(model, likelihood, rank=8, parameters=Projected(rank=3))
    monitor.fit([batch(llama, 10, 1), batch(llama, 10, 2)], progress=False)
    found = monitor.selftest(batch(llama, 4, 3))
    assert found.engine == "HookEngine"
    assert found.distance < 1e-9, str(found)
    if likelihood.worst:
        each = monitor.positions(batch(llama, 4, 3))
        assert each.score.shape == (4, 9)
        torch.testing.assert_close(each.score.amax(1), monitor.score(batch(llama, 4, 3)))
