"""3. A text classifier with an attention mask, whose batches are dicts.

The network is built of torch's own encoder and returns what those of Hugging Face do: an object
with ``logits``. Those of ``transformers`` are taken in the same way.
"""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from scodkit import Categorical, Fused, Monitor

torch.set_num_threads(1)
torch.manual_seed(0)
WORDS, LENGTH, WIDTH = 60, 12, 32


def sentence(words: range) -> dict[str, Tensor]:
    """Return a sentence of 4 to 12 words, padded; its label is the larger half of its words."""
    length = int(torch.randint(4, LENGTH + 1, ()))
    ids = torch.zeros(LENGTH, dtype=torch.long)
    ids[:length] = torch.randint(words.start, words.stop, (length,))
    middle = (words.start + words.stop) / 2
    label = (ids[:length] >= middle).float().mean() > 0.5
    mask = (torch.arange(LENGTH) < length).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": label.long()}


class Classifier(nn.Module):
    """An encoder, the mean of its words, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> SimpleNamespace:
        """Return the logits ``(B, 2)``, and the loss where there are labels."""
        embedded = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        hidden = self.encoder(embedded, src_key_padding_mask=attention_mask == 0)
        mask = attention_mask[..., None].to(hidden.dtype)
        logits = self.head((hidden * mask).sum(1) / mask.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


model = Classifier()
known_words, new_words = range(1, 40), range(40, WORDS)
sentences = [sentence(known_words) for _ in range(800)]
train_set, heldout_set, test_set = sentences[:400], sentences[400:600], sentences[600:]
new_set = [sentence(new_words) for _ in range(200)]  # the network has never read these
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(8):
    for batch in DataLoader(train_set, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

caught = {}
for method in (Monitor(model, Categorical()), Fused(model, Categorical())):
    method.fit(DataLoader(train_set, batch_size=64))  # dicts, labels, masks: nothing to type
    method.calibrate(DataLoader(heldout_set, batch_size=64))
    known, new = (
        float(method.flag(DataLoader(asked, batch_size=64)).float().mean())
        for asked in (test_set, new_set)
    )
    caught[type(method).__name__] = known, new
    print(f"{type(method).__name__}: alarms {known:.1%} of known words, {new:.1%} of new ones")
