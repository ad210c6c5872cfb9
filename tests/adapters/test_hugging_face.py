"""A real run of the Trainer of transformers on a tiny BERT, and folders with monitors."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from scodkit import Categorical, Fused, LastLayers, Monitor
from scodkit.adapters import Monitored, MonitoredModel
from scodkit.errors import (
    CalibrationWarning,
    MismatchError,
    MissingFileError,
    OptionError,
)

pytestmark = [
    pytest.mark.hosts,
    # of the libraries themselves, about pinned memory and what is deprecated in torch
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::scodkit.errors.CalibrationWarning"),
]
transformers = pytest.importorskip("transformers", reason="of make test-hosts")
pytest.importorskip("accelerate", reason="of make test-hosts")

from scodkit.adapters import (  # noqa: E402
    HuggingFaceCallback,
    from_pretrained,
    save_pretrained,
)

VOCABULARY, LENGTH, CLASSES = 60, 12, 3


def tiny_bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
    )
    return transformers.BertForSequenceClassification(config)


class Sentences(Dataset):  # type: ignore[type-arg]
    """Sentences of a class are of its own third of the words; padded, with masks."""

    def __init__(self, count: int, seed: int, words: range | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % CLASSES
        first, width = 1 + 10 * self.labels[:, None], 10
        if words is not None:
            first, width = torch.full((count, 1), words.start), len(words)
        draws = torch.randint(width, (count, LENGTH), generator=generator)
        lengths = torch.randint(4, LENGTH + 1, (count, 1), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.ids = (first + draws) * self.mask

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.ids[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }

    def batch(self, count: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[:count], "attention_mask": self.mask[:count]}


UNKNOWN = range(40, 60)


def trainer(folder: Path, model: Any, callback: Any, **options: Any) -> Any:
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", **options}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=3,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        learning_rate=3e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=Sentences(384, 1),
        eval_dataset=Sentences(192, 2),
        callbacks=[callback],
    )


def last_layer(model: nn.Module) -> Monitor:
    return Monitor(model, Categorical(), parameters=LastLayers(count=1))


def fused(model: nn.Module) -> Fused:
    return Fused(model, Categorical())


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [last_layer, fused])
def test_a_run_leaves_model_and_monitor(
    tmp_path: Path, make: Any, options: dict[str, Any]
) -> None:
    callback = HuggingFaceCallback(make)
    run = trainer(tmp_path, tiny_bert(), callback, **options)
    run.train()
    # what mixed precision puts around the model
    assert ("forward" in vars(run.model)) == bool(options)
    assert callback.monitor is not None
    assert callback.monitor.calibration is not None
    assert callback.monitor.calibration.num_data == (144 if make is fused else 192)
    folder = tmp_path / "monitored"
    names = {file.name for file in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "monitor.scod"}
    known = run.evaluate(Sentences(384, 3))
    unknown = run.evaluate(Sentences(384, 4, UNKNOWN))
    assert known["eval_scod_flagged"] < 0.15 < unknown["eval_scod_flagged"]
    assert known["eval_scod_score"] < unknown["eval_scod_score"]
    predicted = run.predict(Sentences(384, 3)).metrics
    assert predicted["test_scod_flagged"] == known["eval_scod_flagged"]
    found = from_pretrained(folder)
    assert type(found) is type(callback.monitor)
    batch = Sentences(20, 5).batch(20)
    if not options:  # or accelerate's forward pass is still around the trainer's model
        torch.testing.assert_close(found.score(batch), callback.monitor.score(batch))
    flags = torch.cat([found.flag(each) for each in run.get_eval_dataloader(Sentences(384, 3))])
    assert float(flags.double().mean()) == pytest.approx(known["eval_scod_flagged"])


def test_data_that_chose_the_best_checkpoint_is_named(tmp_path: Path) -> None:
    callback = HuggingFaceCallback(last_layer)
    run = trainer(tmp_path, tiny_bert(), callback, load_best_model_at_end=True)
    with pytest.raises(CalibrationWarning, match=r"load_best_model_at_end.*heldout=loader"):
        run.train()


def test_held_out_data_of_ones_own(tmp_path: Path) -> None:
    heldout = torch.utils.data.DataLoader(Sentences(100, 6), 50)
    callback = HuggingFaceCallback(last_layer, heldout=heldout)
    trainer(tmp_path, tiny_bert(), callback, eval_strategy="no").train()
    assert callback.monitor is not None
    assert callback.monitor.calibration is not None
    assert callback.monitor.calibration.num_data == 100


def test_a_run_without_held_out_data_does_not_start(tmp_path: Path) -> None:
    run = trainer(tmp_path, tiny_bert(), HuggingFaceCallback(last_layer), eval_strategy="no")
    with pytest.raises(OptionError, match="heldout=loader"):
        run.train()
    assert run.state.global_step == 0


# --- Folders ---


def monitor_of(model: Any) -> Monitor:
    monitor = last_layer(model.eval())
    monitor.fit([Sentences(96, 1).batch(96)], progress=False)
    return monitor.calibrate([Sentences(96, 2).batch(96)], progress=False)


def test_folders_come_back(tmp_path: Path) -> None:
    monitor = monitor_of(tiny_bert())
    save_pretrained(monitor, tmp_path / "new" / "folder")
    batch = Sentences(20, 5).batch(20)
    for given in (None, tiny_bert()):
        found = from_pretrained(tmp_path / "new" / "folder", given)
        torch.testing.assert_close(found.score(batch), monitor.score(batch))
        torch.testing.assert_close(found(batch).p_value, monitor(batch).p_value)


def test_folders_of_other_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="save_pretrained"):
        from_pretrained(tmp_path)
    monitor = monitor_of(tiny_bert())
    save_pretrained(monitor, tmp_path)
    with torch.no_grad():
        monitor.model.classifier.weight.add_(1)  # type: ignore[union-attr, operator]
    monitor.model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(MismatchError):
        from_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("BertForSequence", "MyOwnSequence"))
    with pytest.raises(OptionError, match="MyOwnSequenceClassification"):
        from_pretrained(tmp_path)
    plain = Monitor(nn.Sequential(nn.Linear(4, 3)), Categorical())
    with pytest.raises(OptionError, match="PreTrainedModel"):
        save_pretrained(plain.fit([torch.randn(9, 4)], progress=False), tmp_path)


def test_bert_in_onnx(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="of make test-hosts")
    pytest.importorskip("onnxscript", reason="of make test-hosts")
    monitor, file = monitor_of(tiny_bert()), tmp_path / "bert.onnx"
    MonitoredModel(monitor).save_onnx(file, **Sentences(4, 7).batch(4))
    batch = Sentences(20, 5).batch(20)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given = {name: tensor.numpy() for name, tensor in batch.items()}
    found = Monitored(*map(torch.from_numpy, session.run(None, given)))
    expected = monitor(batch)
    torch.testing.assert_close(found.output, expected.output)
    torch.testing.assert_close(found.score, expected.score, rtol=1e-4, atol=1e-7)
    assert monitor.calibration is not None
    assert torch.equal(found.p_value, monitor.calibration.p_value(found.score))


def test_the_example_in_the_docstring_runs() -> None:
    module = importlib.import_module("scodkit.adapters.hugging_face")
    assert doctest.testmod(module) == doctest.TestResults(failed=0, attempted=3)
