"""What may go wrong, and what happens then: one section per row of the failure table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cases import mlp
from scodkit import Bernoulli, Categorical, Gaussian, Monitor
from scodkit.errors import (
    BatchError,
    InsufficientMemoryError,
    MergeError,
    MismatchError,
    NondeterministicError,
    NonFiniteError,
    OptionError,
)
from scodkit.sketch import Exact, Nystrom


def data(size: int = 40, seed: int = 0) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


def fitted(model: nn.Module | None = None, **options: object) -> Monitor:
    torch.manual_seed(0)
    monitor = Monitor(model or mlp(3), Categorical(), rank=6, **options)
    return monitor.fit([data()], progress=False)


# -- train mode, dropout, augmentation -------------------------------------------------------


def test_dropout_and_train_mode_do_not_matter_and_are_restored() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)
    )
    model(data())  # running statistics of its own
    model.eval()
    model[2].train()  # a mixed state must come back as it was
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first = fitted(model)
    model.train()
    second = fitted(model)
    torch.testing.assert_close(first.score(data(5, 1)), second.score(data(5, 1)))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class AlwaysDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.5, training=True)


def test_a_model_that_is_random_in_eval_mode_is_refused_unless_asked_for() -> None:
    monitor = Monitor(AlwaysDropout(), Categorical(), rank=3)
    with pytest.raises(NondeterministicError, match="check_deterministic=False"):
        monitor.fit([data()], progress=False)


class Augmented(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(3)


def test_an_augmenting_data_set_is_refused_unless_asked_for() -> None:
    loader = DataLoader(Augmented(), batch_size=4)
    monitor = Monitor(mlp(3), Categorical(), rank=3)
    with pytest.raises(NondeterministicError, match="augmentation"):
        monitor.fit(loader, progress=False)
    monitor.fit(loader, progress=False, check_deterministic=False)
    assert monitor.basis.num_data == 12


def test_a_shuffling_loader_is_not_mistaken_for_augmentation() -> None:
    loader = DataLoader(TensorDataset(data()), batch_size=8, shuffle=True)
    assert Monitor(mlp(3), Categorical(), rank=3).fit(loader, progress=False).basis.rank == 3


# -- numbers that are not finite -------------------------------------------------------------


def test_a_bad_training_sample_is_named_and_leaves_the_old_fit() -> None:
    monitor = fitted()
    before = monitor.score(data(4, 1))
    bad = data(20)
    bad[13, 1] = float("nan")
    with pytest.raises(NonFiniteError, match=r"sample 13 \(batch 1, row 5\).*on_bad='skip'"):
        monitor.fit(list(bad.split(8)), progress=False)
    torch.testing.assert_close(monitor.score(data(4, 1)), before)


def test_skipped_samples_are_counted_and_change_nothing_else() -> None:
    torch.manual_seed(0)
    model = mlp(3)
    good = data(20)
    bad = torch.cat([good[:7], torch.full((2, 3), float("inf")), good[7:]])
    expected = Monitor(model, Categorical(), rank=6).fit([good], progress=False)
    for budget in (2**30, 1):  # also when the directions of a sample come one by one
        monitor = Monitor(model, Categorical(), rank=6)
        monitor.memory_budget = budget
        monitor.fit(list(bad.split(5)), progress=False, on_bad="skip")
        assert monitor.skipped == 2
        assert monitor.basis.num_data == 20
        torch.testing.assert_close(
            monitor.score(data(4, 1)), expected.score(data(4, 1)), rtol=1e-4, atol=1e-6
        )


class InfiniteSlope(nn.Module):
    """Finite outputs, infinite gradients at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).abs().sqrt()


def test_infinite_gradients_are_bad_samples_too() -> None:
    monitor = Monitor(InfiniteSlope(), Gaussian(), rank=2)
    with pytest.raises(NonFiniteError, match="gradients of sample 0"):
        monitor.fit([data(4)], progress=False)


def test_non_finite_inputs_score_infinity_and_are_flagged() -> None:
    monitor = fitted().calibrate([data(50, 2)], progress=False)
    x = data(5, 1)
    clean = monitor(x)
    x[1, 0], x[3, 2] = float("nan"), float("-inf")
    scored = monitor(x)
    assert scored.score[[1, 3]].tolist() == [float("inf")] * 2
    torch.testing.assert_close(scored.score[[0, 2, 4]], clean.score[[0, 2, 4]])
    assert scored.p_value is not None
    assert scored.p_value[1] == pytest.approx(1 / 51)
    assert monitor.flag(x)[[1, 3]].all()
    assert monitor.certify(x).upper[1] == float("inf")
    all_bad = monitor.score(torch.full((2, 3), float("nan")))
    assert all_bad.tolist() == [float("inf")] * 2


class Saturating(nn.Module):
    """Hides an infinite input behind a finite output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(x))


def test_an_infinite_input_counts_even_if_the_output_hides_it() -> None:
    monitor = fitted(Saturating())
    x = data(2, 1)
    x[0, 0] = float("inf")
    assert monitor.model(x).isfinite().all()
    assert monitor.score(x).isinf().tolist() == [True, False]


# -- memory ----------------------------------------------------------------------------------


def test_too_large_a_fit_is_refused_before_it_is_allocated() -> None:
    model = nn.Linear(3000, 3000)
    monitor = Monitor(model, Gaussian(), rank=400_000, sketch=Nystrom(size=2_000_000))
    with pytest.raises(InsufficientMemoryError) as caught:
        monitor.fit([torch.randn(2, 3000)], progress=False)
    message = str(caught.value)
    assert "9,003,000 parameters" in message
    assert "2000000 columns" in message
    assert "TiB" in message
    assert "the largest that fits is a sketch of" in message
    assert "LastLayers" in message


def test_the_plan_says_the_bytes_and_its_advice_fits() -> None:
    monitor = Monitor(mlp(3), Categorical(), rank=4, sketch=Nystrom(size=10))
    plan = monitor.plan(data(2))
    n = sum(p.numel() for p in monitor.model.parameters())
    assert (plan.num_parameters, plan.directions) == (n, 2)
    assert plan.sketch_bytes == 10 * n * 4
    assert plan.basis_bytes == 4 * n * 4
    assert plan.fits
    assert f"{n:,} parameters" in str(plan)
    exact = Monitor(mlp(3), Categorical(), rank=4, sketch=Exact()).plan(data(2), num_data=5)
    assert exact.columns == 10


# -- interrupted fits ------------------------------------------------------------------------

KILLED_FIT = """
import sys, torch
from torch import nn
from scodkit import Categorical, Monitor
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
def batches():
    for i, batch in enumerate(x.split(4)):
        print("batch", i, flush=True)
        if str(i) == sys.argv[2]:
            sys.stdin.readline()
        yield batch
monitor = Monitor(model, Categorical(), rank=6)
monitor.fit(batches(), progress=False, checkpoint=sys.argv[1], every=3)
print("scores", monitor.score(x[:5]).tolist(), flush=True)
"""


def run_fit(checkpoint: Path, stop_at: int) -> tuple[int, str]:
    """Fit in a process of its own; kill -9 it when it waits at batch ``stop_at``."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED_FIT), str(checkpoint), str(stop_at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if line == f"batch {stop_at}\n":
            os.kill(process.pid, signal.SIGKILL)
    assert process.stdin is not None
    process.stdin.close()
    process.stdout.close()
    return process.wait(timeout=60), seen


@pytest.mark.slow
def test_a_killed_fit_goes_on_where_it_was(tmp_path: Path) -> None:
    _, expected = run_fit(tmp_path / "whole.ckpt", stop_at=-1)
    code, _ = run_fit(tmp_path / "cut.ckpt", stop_at=8)
    assert code == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("cut")] == ["cut.ckpt"]
    code, resumed = run_fit(tmp_path / "cut.ckpt", stop_at=-1)
    assert code == 0
    assert resumed.splitlines()[-1].startswith("scores")
    assert resumed.splitlines()[-1] == expected.splitlines()[-1]


def test_a_checkpoint_of_another_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fit.ckpt"
    torch.manual_seed(0)
    model = mlp(3)
    Monitor(model, Categorical(), rank=4).fit([data()], progress=False, checkpoint=path)
    for monitor, batches, what in (
        (Monitor(model, Categorical(), rank=4), [data(seed=9)], "other batches"),
        (Monitor(model, Bernoulli(), rank=4), [data()], "likelihood: "),
        (Monitor(model, Categorical(), rank=5), [data()], "rank: "),
        (Monitor(mlp(3), Categorical(), rank=4), [data()], "weights: "),
    ):
        with pytest.raises(MismatchError, match=f"{what}.*delete (it|the checkpoint)"):
            monitor.fit(batches, progress=False, checkpoint=path)


def test_a_shuffled_loader_cannot_be_resumed(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(data()), batch_size=8, shuffle=True)
    with pytest.raises(OptionError, match="shuffle=False"):
        Monitor(mlp(3), Categorical(), rank=3).fit(
            loader, progress=False, checkpoint=tmp_path / "fit.ckpt"
        )


# -- merging ---------------------------------------------------------------------------------


def test_merging_what_does_not_belong_together_is_refused() -> None:
    torch.manual_seed(1)
    model, other_model = mlp(3), mlp(3)
    mine = fitted(model, sketch=Nystrom(size=12))
    before = mine.score(data(4, 1))
    for other, what in (
        (fitted(model, sketch=Nystrom(size=12, seed=1)), "seed=1"),
        (fitted(model, sketch=Nystrom(size=13)), "size=13"),
        (fitted(other_model, sketch=Nystrom(size=12)), "weights differ"),
        (fitted(model, parameters=["2.*"], sketch=Nystrom(size=12)), "parameters"),
    ):
        with pytest.raises(MergeError, match=what):
            mine.merge(other)
    torch.testing.assert_close(mine.score(data(4, 1)), before)


# -- grad modes, wrappers, precision, threads ------------------------------------------------


def test_scores_are_the_same_in_every_grad_mode() -> None:
    torch.manual_seed(0)
    monitor = fitted(nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)))
    expected = monitor.score(data(5, 1))
    with torch.no_grad():
        torch.testing.assert_close(monitor.score(data(5, 1)), expected)
    with torch.inference_mode():
        torch.testing.assert_close(monitor.score(data(5, 1)), expected)
        torch.testing.assert_close(monitor.score(data(5, 1).clone()), expected)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fits_are_the_same_in_every_grad_mode(mode: type[torch.no_grad]) -> None:
    torch.manual_seed(0)
    model = mlp(3)
    expected, new = fitted(model), data(5, 1)
    with mode():
        monitor = fitted(model)
    torch.testing.assert_close(monitor.score(new), expected.score(new))
    with mode():
        monitor.update([data(20, 2)], progress=False)
    expected.update([data(20, 2)], progress=False)
    torch.testing.assert_close(monitor.score(new), expected.score(new))


def test_wrapped_models_are_looked_through() -> None:
    torch.manual_seed(0)
    model = mlp(3)
    expected = fitted(model).score(data(5, 1))
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        torch.testing.assert_close(fitted(wrapped).score(data(5, 1)), expected)


def test_half_precision_models_keep_their_sums_in_float32() -> None:
    torch.manual_seed(0)
    model = mlp(3)
    expected = fitted(model).score(data(5, 1))
    half = fitted(model.to(torch.bfloat16), inputs=lambda x: x.bfloat16())
    assert half.basis.vectors.dtype == torch.float32
    scores = half.score(data(5, 1))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=0.2, atol=0.02 * float(expected.max()))
    assert next(model.parameters()).dtype == torch.bfloat16


def test_threads_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    monitor = fitted(model)
    model.train()
    inputs = [data(6, seed) for seed in range(8)]
    expected = [monitor.score(x) for x in inputs]
    wrong: list[str] = []

    def work(i: int) -> None:
        for _ in range(20):
            got = monitor.score(inputs[i])
            if not torch.allclose(got, expected[i], rtol=1e-4):
                wrong.append(f"{i}: {got} instead of {expected[i]}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(module.training for module in model.modules())


# -- data of the wrong form ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (TensorDataset(data()), r"DataLoader\(dataset, batch_size=64\)"),
        ([], "empty"),
        (["a string"], "tensor, tuple, list or dict"),
        ([torch.empty(0, 3)], "samples in the first batch"),
    ],
    ids=["dataset", "empty", "strings", "empty batch"],
)
def test_loaders_of_the_wrong_form_are_refused(loader: object, said: str) -> None:
    with pytest.raises(BatchError, match=said):
        Monitor(mlp(3), Categorical(), rank=3).fit(loader, progress=False)


def test_bad_fit_options_are_refused() -> None:
    monitor = Monitor(mlp(3), Categorical(), rank=3)
    with pytest.raises(OptionError, match="'raise' or 'skip'"):
        monitor.fit([data()], on_bad="ignore")
    with pytest.raises(OptionError, match="every >= 1"):
        monitor.fit([data()], every=0)


def test_progress_can_be_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(mlp(3), Categorical(), rank=3)
    monitor.fit([data()], progress=False)
    assert capsys.readouterr().err == ""
    monitor.fit([data()])
    assert "sketching" in capsys.readouterr().err
