"""A fit and a score through each adapter, in the library that it is for.

Run by try_dist.py in an environment with this library and its extra alone, in an empty folder:
``python adapter_trials.py lightning hugging-face``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import scodkit
from scodkit import Categorical, Fused, LastLayers, Monitor
from scodkit.adapters import MonitoredModel

NETWORK = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
"""

SERVED = """
import mlflow
from network import build
from scodkit.adapters import MLflowModel

mlflow.models.set_model(MLflowModel(build))
"""


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points around three centres, and the centre of each."""
    y = torch.arange(count) % 3
    noise = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return 4 * torch.eye(4)[y] + noise, y


def network() -> nn.Module:
    """Return a small classifier."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def last_layer(model: nn.Module) -> Monitor:
    """Return a monitor of the last layer."""
    return Monitor(model, Categorical(), parameters=LastLayers(count=1))


def calibrated() -> Monitor:
    """Return a monitor of the network, fitted and calibrated."""
    monitor = last_layer(network()).fit(samples(300, 1)[0], progress=False)
    return monitor.calibrate(samples(150, 2)[0], progress=False)


def scikit_learn() -> None:
    """An estimator in a pipeline: known points are 1, others -1."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    from scodkit.adapters import OutlierDetector

    detector = OutlierDetector(Fused(network(), Categorical()), random_state=0)
    pipeline = make_pipeline(FunctionTransformer(), detector).fit(samples(600, 1)[0].numpy())
    new = samples(100, 3)[0].numpy()
    assert (pipeline.predict(new) == 1).mean() > 0.8
    assert (pipeline.predict(new + 50) == -1).all()
    assert (pipeline.decision_function(new + 50) < 0).all()


def mlflow() -> None:
    """A folder of MLflow returns the outputs, scores and p-values of the monitor."""
    import mlflow.pyfunc

    from scodkit.adapters import mlflow_artifacts

    Path("network.py").write_text(NETWORK)
    Path("served.py").write_text(SERVED)
    sys.path.insert(0, str(Path.cwd()))
    monitor, x = calibrated(), samples(20, 3)[0]
    mlflow.pyfunc.save_model(
        "model",
        python_model="served.py",
        artifacts=mlflow_artifacts(monitor, "files"),
        code_paths=["network.py"],
        pip_requirements=["scodkit"],
    )
    found, expected = mlflow.pyfunc.load_model("model").predict(x.numpy()), monitor(x)
    for name in ("output", "score", "p_value"):
        given = getattr(expected, name).detach().numpy()
        np.testing.assert_allclose(found[name], given, rtol=1e-6)


def lightning() -> None:
    """A callback fits a monitor at the end of training, and the test logs its scores."""
    import lightning as host

    from scodkit.adapters import LightningCallback

    class Module(host.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def test_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def loader(count: int, seed: int) -> Any:
        return DataLoader(TensorDataset(*samples(count, seed)), 32)

    callback = LightningCallback(last_layer, heldout=loader(150, 2))
    trainer = host.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
    )
    module = Module()
    trainer.fit(module, loader(300, 1))
    assert callback.monitor is not None
    assert callback.path is not None
    assert callback.path.is_file()
    (logged,) = trainer.test(module, loader(100, 3))
    x = samples(100, 3)[0]
    np.testing.assert_allclose(
        logged["scod_score"], callback.monitor.score(x).mean(), rtol=1e-4
    )


def hugging_face() -> None:
    """A callback fits a monitor at the end of training, and a folder has it and the model."""
    import transformers

    from scodkit.adapters import HuggingFaceCallback, from_pretrained

    def texts(count: int, seed: int) -> list[dict[str, Tensor]]:
        draws = torch.Generator().manual_seed(seed)
        words = torch.randint(1, 40, (count, 8), generator=draws)
        mask = torch.ones(8, dtype=torch.long)
        return [{"input_ids": w, "attention_mask": mask, "labels": w[0] % 3} for w in words]

    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    callback = HuggingFaceCallback(last_layer)
    trainer = transformers.Trainer(
        model=transformers.BertForSequenceClassification(config),
        args=transformers.TrainingArguments(
            output_dir="run",
            num_train_epochs=1,
            eval_strategy="epoch",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=texts(64, 1),
        eval_dataset=texts(40, 2),
        callbacks=[callback],
    )
    trainer.train()
    assert "eval_scod_score" in trainer.evaluate()
    new = torch.stack([text["input_ids"] for text in texts(10, 3)])
    x = {"input_ids": new, "attention_mask": torch.ones_like(new)}
    assert callback.monitor is not None
    assert torch.equal(from_pretrained("run/monitored").score(x), callback.monitor.score(x))


def onnx() -> None:
    """A file for ONNX Runtime returns the scores of the monitor."""
    import onnxruntime

    monitor, x = calibrated(), samples(20, 3)[0]
    MonitoredModel(monitor).eval().save_onnx("model.onnx", x)
    session = onnxruntime.InferenceSession("model.onnx")
    (given,) = session.get_inputs()
    _, score, p_value = session.run(None, {given.name: x.numpy()})
    np.testing.assert_allclose(score, monitor.score(x).numpy(), rtol=1e-4)
    assert p_value.shape == (20,)


def pytorch_ood() -> None:
    """A detector of pytorch-ood, beside one of its own, measured by its metrics."""
    from pytorch_ood.detector import EnergyBased
    from pytorch_ood.metrics import OODMetrics

    from scodkit.adapters import PytorchOODDetector
    from scodkit.metrics import separation

    fused = Fused(network(), Categorical())
    held_out = DataLoader(TensorDataset(*samples(150, 2)), 32)
    train = DataLoader(TensorDataset(*samples(300, 1)), 32)
    detector = PytorchOODDetector(fused, held_out).fit(train)
    known, unknown = samples(100, 3)[0], samples(100, 4)[0] + 1
    for each in (detector, EnergyBased(network())):
        metrics = OODMetrics()
        scores = [each(x).detach() for x in (known, unknown)]
        for score, label in zip(scores, (0, -1), strict=True):
            metrics.update(score, torch.full((100,), label))
        expected = separation(*scores, resamples=2).auroc
        np.testing.assert_allclose(metrics.compute()["AUROC"], expected, atol=1e-6)


TRIALS: dict[str, Callable[[], None]] = {
    "scikit-learn": scikit_learn,
    "mlflow": mlflow,
    "lightning": lightning,
    "hugging-face": hugging_face,
    "onnx": onnx,
    "pytorch-ood": pytorch_ood,
}


if __name__ == "__main__":
    print(scodkit.__file__)  # noqa: T201
    for name in sys.argv[1:]:
        TRIALS[name]()
        print(f"{name}: fitted and scored")  # noqa: T201
