"""A text classifier, and a topic it was never taught."""

# %% [markdown]
# A shop's help desk sorts messages with a transformer: *delivery*, *payment*, *account*. One
# day customers write about something else, a lamp that flickers. The classifier has no fourth
# answer. It picks one of the three, and the message waits at the wrong desk.
#
# The monitor below notices such messages. It works in **projected** weights, which is how a
# monitor of a large transformer fits into memory. The messages are put together from a small
# grammar, so that this page needs no download; the network has the interface of a Hugging
# Face model, and [the last section](#your-own-model) has the lines for one.

# %%
import random
from itertools import chain, product
from types import SimpleNamespace

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.utils.data import DataLoader

from scodkit import Categorical, Monitor, Projected
from scodkit.baselines import MaxSoftmax
from scodkit.metrics import separation

GREETINGS = ["", "hello", "hi there", "dear team", "good morning"]
ENDINGS = ["", "please help", "thank you", "can you check", "what should i do"]
ITEMS = ["lamp", "desk", "chair", "mirror", "kettle", "carpet", "clock", "sofa", "table"]
TOPICS = {
    "delivery": [
        "my ITEM has not arrived yet",
        "the parcel with the ITEM was sent to the wrong address",
        "the courier left the ITEM in the rain",
        "the tracking page says the ITEM is still in the warehouse",
        "when will the driver bring the ITEM",
    ],
    "payment": [
        "i was charged twice for the ITEM",
        "the invoice for the ITEM shows the wrong amount",
        "my card was refused when i bought the ITEM",
        "i still wait for the refund of the ITEM",
        "the discount on the ITEM is not on my bill",
    ],
    "account": [
        "i cannot log in to see my ITEM",
        "the password reset did not work and my list has the ITEM",
        "please change the email of my account where the ITEM is saved",
        "my profile shows a ITEM i never looked at",
        "delete my account and the reviews i wrote about the ITEM",
    ],
}
NEW_TOPICS = {
    "repair": [
        "the ITEM has arrived and it flickers",
        "one leg of the ITEM wobbles and my carpet has a scratch",
        "a screw was missing in the parcel with the ITEM",
        "can the driver bring a spare part for the ITEM",
        "the ITEM i bought makes a loud noise",
    ],
    "advice": [
        "is the ITEM on the page made of dark oak",
        "which ITEM is safe for children",
        "the colour of the ITEM in my profile is too bright for a kitchen",
        "when will you have the ITEM in green",
        "is my address too far to see the ITEM in a shop",
    ],
}

# %% [markdown]
# Every message is a greeting, a sentence and an ending; no message is in two of the sets.
# Words become numbers. As with any pretrained tokenizer, the vocabulary is larger than what
# the classifier is trained on: it has the words of the new topics, too.

# %%
LENGTH = 24
texts = [*GREETINGS, *ENDINGS, *ITEMS, *chain(*TOPICS.values(), *NEW_TOPICS.values())]
words = sorted({word for text in texts for word in text.split()})
VOCABULARY = {word: number for number, word in enumerate(words, start=1)}


def messages(topics: dict[str, list[str]], *counts: int) -> list[list[dict[str, Tensor]]]:
    """Return sets with so many messages of each topic, padded as a tokenizer pads them."""
    sets: list[list[dict[str, Tensor]]] = [[] for _ in counts]
    for label, templates in enumerate(topics.values()):
        texts = [
            f"{greeting} {sentence} {ending}".replace("ITEM", item)
            for greeting, sentence, item, ending in product(
                GREETINGS, templates, ITEMS, ENDINGS
            )
        ]
        drawn = iter(random.Random(label).sample(texts, sum(counts)))
        for messages_of_set, count in zip(sets, counts, strict=True):
            for _ in range(count):
                ids = [VOCABULARY[word] for word in next(drawn).split()]
                padded = torch.tensor(ids + [0] * (LENGTH - len(ids)))
                message = {"input_ids": padded, "attention_mask": (padded > 0).long()}
                messages_of_set.append({**message, "labels": torch.tensor(label)})
    return sets


train_set, held_out, test = messages(TOPICS, 250, 100, 70)
(new,) = messages(NEW_TOPICS, 100)

# %% [markdown]
# The network is an encoder of two layers. It takes batches that are dicts and returns an
# object with `logits`, as classifiers of Hugging Face do.


# %%
class Classifier(nn.Module):
    """A small encoder, the mean of its words and a last layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(len(VOCABULARY) + 1, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(TOPICS))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> SimpleNamespace:
        """Return the logits ``(B, topics)``, and the loss where labels are given."""
        hidden = self.words(input_ids) + self.places.weight
        hidden = self.encoder(hidden, src_key_padding_mask=attention_mask == 0)
        mask = attention_mask[..., None].to(hidden.dtype)
        logits = self.head((hidden * mask).sum(1) / mask.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


def train(model: nn.Module) -> nn.Module:
    """Return the model after six passes over the messages."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(6):
        for batch in DataLoader(train_set, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return model.eval()


def loader(dataset: list[dict[str, Tensor]]) -> DataLoader[dict[str, Tensor]]:
    """Return batches of 64, in order."""
    return DataLoader(dataset, batch_size=64)


torch.manual_seed(0)
model = train(Classifier())
with torch.no_grad():
    logits = torch.cat([model(**batch).logits for batch in loader(test)])
    new_logits = torch.cat([model(**batch).logits for batch in loader(new)])
right = (
    (logits.argmax(1) == torch.stack([message["labels"] for message in test])).float().mean()
)
sure = (new_logits.softmax(1).amax(1) > 0.9).float().mean()
print(f"right on new messages of known topics: {right:.1%}")
print(f"more than 90 % sure of its answer on new topics: {sure:.1%}")

# %% [markdown]
# ## A monitor in projected weights
#
# The network has about a hundred thousand weights. A monitor of all of them keeps `rank`
# directions with as many numbers each. `Projected(rank=8)` looks at each layer's gradient
# through $8 \times 8$ numbers on average, learnt from the first training samples, and keeps
# directions of those alone. What the projections miss still counts in the score: the length
# of the whole gradient is exact.

# %%
monitors = {
    "all weights": Monitor(model, Categorical(), rank=40),
    "Projected(rank=8)": Monitor(model, Categorical(), rank=40, parameters=Projected(rank=8)),
}
for name, monitor in monitors.items():
    monitor.fit(loader(train_set))
    monitor.calibrate(loader(held_out))
    known_score, new_score = monitor.score(loader(test)), monitor.score(loader(new))
    auroc = separation(known_score, new_score).auroc
    numbers, kept = monitor.fitted.parameters.num_parameters, monitor.basis.nbytes / 2**20
    print(f"{name:18} {numbers:7,} numbers, {kept:5.2f} MiB kept, AUROC {auroc:.3f}")
baseline = MaxSoftmax(model, Categorical())
softmax = [
    torch.cat([baseline.score(batch) for batch in loader(asked)]) for asked in (test, new)
]
print(f"{'softmax alone':18} AUROC {separation(*softmax).auroc:.3f}")

# %% [markdown]
# The projected monitor takes a small fraction of the memory and tells topics apart equally
# well. On a network this small the saving is of no use; with a billion weights it decides
# whether a monitor is possible at all ([large models](../guides/large.md#projected-weights)).
#
# The softmax alone is about as good: on classifiers, do not expect the curvature to win by
# much. What the monitor adds is a decision with a rate of false alarms that you choose.

# %%
monitor = monitors["Projected(rank=8)"]
for name, asked in {"known topics": test, "new topics": new}.items():
    flags = monitor.flag(loader(asked), false_alarm=0.05)
    print(f"{name}: {flags.sum()} alarms among {len(flags)}, {flags.float().mean():.1%}")

# %%
# Figure: Scores of messages, a row for each topic: three known topics left of the alarm's
# threshold, two new topics mostly right of it.
figure, axes = plt.subplots(figsize=(5, 3.2))
jitter = torch.Generator().manual_seed(0)
scores = [*known_score.split(70), *new_score.split(100)]
names = [*TOPICS, *(f"{topic} (new)" for topic in NEW_TOPICS)]
for row, (name, score) in enumerate(zip(names, scores, strict=True)):
    height = row + 0.5 * torch.rand(len(score), generator=jitter) - 0.25
    colour = "#D55E00" if "new" in name else "#0072B2"
    axes.plot(score, height, ".", color=colour, alpha=0.5, ms=5)
axes.axvline(monitor.calibration.threshold(0.05), color="black", ls="--", lw=1)
axes.set(xscale="log", xlabel="score (nats); dashed: 5 % false alarms")
axes.set_yticks(range(5), names)
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Which new messages pass? The three that look most familiar:

# %%
word_of = {number: word for word, number in VOCABULARY.items()}
for i in new_score.argsort()[:3].tolist():
    text = " ".join(word_of[number] for number in new[i]["input_ids"].tolist() if number)
    print(f"score {new_score[i]:.3f}: {text}")

# %% [markdown]
# Most of their words are known from the other topics. This is a limit of any score made from
# this network: what the network does not tell apart, the monitor cannot either.
#
# ## Your own model
#
# Any model of Hugging Face takes the place of `Classifier`; no other line of this page
# changes. This one is made from a configuration, so that nothing is downloaded:
#
# ```python
# from transformers import BertConfig, BertForSequenceClassification
#
# config = BertConfig(
#     vocab_size=len(VOCABULARY) + 1,
#     hidden_size=64,
#     num_hidden_layers=2,
#     num_attention_heads=4,
#     intermediate_size=256,
#     num_labels=len(TOPICS),
# )
# model = train(BertForSequenceClassification(config))
# ```
#
# Models with an output for each token, `(B, S, C)`, need one more decision: what a message's
# score is made of. `Categorical(class_dim=-1, pool="sum")` adds up all positions,
# `pool="mean"` makes messages of different lengths comparable, and `pool="last"` asks about
# the next token alone. Padded positions count there; [next-token
# heads](../guides/large.md#next-token-heads) says what to do about it.
