"""What every baseline must do, whatever its method.

A test module makes a subclass of `BaselineContract` for its method and says in ``cases`` how it
is made, for which likelihoods. Networks are tiny and in float64, data is labelled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scodkit import Bernoulli, Categorical, Gaussian, Monitor
from scodkit.baselines import Baseline, Detector
from scodkit.errors import (
    BatchError,
    CorruptArtifactError,
    MismatchError,
    NotFittedError,
    UnsupportedLikelihoodError,
)
from scodkit.likelihoods import HeteroscedasticGaussian, Likelihood, MonteCarlo

LIKELIHOODS: dict[str, Likelihood] = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(),
    "scaled": Gaussian((0.5, 2.0)),
    "heteroscedastic": HeteroscedasticGaussian(),
}
OUTPUTS = {"categorical": 3, "bernoulli": 1, "gaussian": 1, "scaled": 2, "heteroscedastic": 2}


def network(kind: str, seed: int = 0) -> nn.Module:
    """Return a small convolutional network in float64, for one of `LIKELIHOODS`."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 5), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(5, OUTPUTS[kind])).double().eval()


def training_data(kind: str, count: int = 40, batch: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Return batches of images ``(B, 1, 4, 4)`` with targets that fit the likelihood."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    if kind == "categorical":
        y = torch.arange(count) % 3
        x[torch.arange(count), 0, 0, y] += 2.0
    elif kind == "bernoulli":
        y = (x.sum((1, 2, 3)) > 0).double()[:, None]
    else:
        outputs = 1 if kind == "heteroscedastic" else OUTPUTS[kind]
        y = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    return list(zip(x.split(batch), y.split(batch), strict=True))


def some(count: int = 6, seed: int = 3) -> Tensor:
    """Return inputs that are not in the training data."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A method, and how it is made of a model (or several) and a likelihood."""

    kind: str
    make: Callable[[Any, Likelihood], Baseline]
    # the constructor's first argument, where it is not a single network
    model: Callable[[str], Any] = network
    # where scores are higher: far from all training data, or where the network itself is
    # unsure; "" for a constant
    rises: str = "far"
    # whether the method draws by the bytes of a sample, which differ between dtypes
    draws: bool = False

    def __str__(self) -> str:
        return self.kind

    @property
    def likelihood(self) -> Likelihood:
        return LIKELIHOODS[self.kind]

    def fresh(self, model: Any = None) -> Baseline:
        return self.make(self.model(self.kind) if model is None else model, self.likelihood)

    def fitted(self, model: Any = None) -> Baseline:
        """Fit anew to a model; without one, return a copy of what was fitted once."""
        if model is None:
            return copy.deepcopy(_fitted_once(self))
        return self.fresh(model).fit(training_data(self.kind), progress=False)


@cache
def _fitted_once(case: Case) -> Baseline:
    """The fit that most tests of a case begin with; they are handed copies of it."""
    return case.fitted(case.model(case.kind))


def cases(
    make: Callable[[Any, Likelihood], Baseline],
    *kinds: str,
    model: Callable[[str], Any] = network,
    rises: str = "far",
    draws: bool = False,
) -> list[Case]:
    """Return one case per kind of likelihood."""
    return [Case(kind, make, model, rises, draws) for kind in kinds]


def parametrised(*made: list[Case]) -> pytest.MarkDecorator:
    """Decorate a subclass of the contract with its cases."""
    return pytest.mark.parametrize("case", [c for some in made for c in some], ids=str)


class BaselineContract:
    """Inherit, and decorate with `parametrised`."""

    # distance allowed between a sample's scores in two batches
    rounding = 1e-9

    def test_is_a_detector(self, case: Case) -> None:
        assert isinstance(case.fresh(), Detector)
        assert type(case.fresh()).__name__ in repr(case.fresh())
        assert isinstance(Monitor(network(case.kind), case.likelihood), Detector)

    def test_scores_have_one_number_per_sample(self, case: Case) -> None:
        x = some()
        scored = case.fitted()(x)
        assert scored.score.shape == (6,)
        assert scored.score.dtype == torch.float64
        assert scored.score.isfinite().all()
        assert scored.output.shape == (6, OUTPUTS[case.kind])
        assert not scored.output.requires_grad
        assert not scored.score.requires_grad

    def test_score_is_the_score_of_the_call(self, case: Case) -> None:
        method = case.fitted()
        assert torch.equal(method.score(some()), method(some()).score)

    def test_a_batch_is_its_samples(self, case: Case) -> None:
        method, x = case.fitted(), some()
        together = method(x)
        alone = [method(x[i : i + 1]) for i in range(6)]
        for found, wanted in (
            (together.score, torch.cat([one.score for one in alone])),
            (together.output, torch.cat([one.output for one in alone])),
        ):
            torch.testing.assert_close(found, wanted, rtol=self.rounding, atol=self.rounding)

    def test_the_order_of_samples_does_not_matter(self, case: Case) -> None:
        method, x = case.fitted(), some()
        order = torch.tensor([3, 1, 5, 0, 2, 4])
        torch.testing.assert_close(
            method.score(x[order]),
            method.score(x)[order],
            rtol=self.rounding,
            atol=self.rounding,
        )

    def test_larger_is_more_atypical(self, case: Case) -> None:
        if case.rises == "far":
            method = case.fitted()
            known = torch.cat([method.score(x) for x, _ in training_data(case.kind)])
            assert method.score(30 * some(40)).median() > known.median()
        elif case.rises == "unsure":
            unsure, sure = (self._mean_score(case, scale) for scale in (0.02, 20.0))
            assert unsure > sure
        else:
            assert len(case.fitted().score(some()).unique()) == 1

    def _mean_score(self, case: Case, scale: float) -> Tensor:
        """The mean score of networks whose last layer is scaled: sure where it is large."""
        model = case.model(case.kind)
        for part in model if isinstance(model, list) else [model]:
            with torch.no_grad():
                part[5].weight.mul_(scale)
                # a log-variance is no logit: lower is surer
                part[5].bias.fill_(-scale if case.kind == "heteroscedastic" else 0.0)
        return case.fitted(model).score(some(40)).mean()

    def test_float32_agrees_with_float64(self, case: Case) -> None:
        exact = case.fitted().score(some())
        model = case.model(case.kind)
        parts = model if isinstance(model, list) else [model]
        for part in parts:
            part.float()
        data = [
            (x.float(), y.float() if y.is_floating_point() else y)
            for x, y in training_data(case.kind)
        ]
        method = case.fresh(model).fit(data, progress=False)
        found = method.score(some().float())
        assert found.dtype == torch.float32
        assert found.isfinite().all()
        if not case.draws:
            close = 1e-4 * float(exact.abs().max())
            torch.testing.assert_close(found.double(), exact, rtol=0.0, atol=close)

    def test_two_fits_agree_to_the_bit(self, case: Case) -> None:
        one, other = (case.model(case.kind) for _ in range(2))
        torch.manual_seed(0)
        first = case.fitted(one).score(some())
        torch.manual_seed(1)
        assert torch.equal(first, case.fitted(other).score(some()))

    def test_random_state_is_left_alone(self, case: Case) -> None:
        model = case.model(case.kind)
        before = torch.get_rng_state()
        method = case.fitted(model)
        method.score(some())
        assert torch.equal(before, torch.get_rng_state())

    def test_an_empty_batch_has_no_scores(self, case: Case) -> None:
        scored = case.fitted()(some()[:0])
        assert scored.score.shape == (0,)
        assert scored.output.shape == (0, OUTPUTS[case.kind])

    def test_bad_samples_score_infinity_and_do_no_harm(self, case: Case) -> None:
        method, x = case.fitted(), some()
        clean = method.score(x)
        x[1, 0, 2, 2] = torch.nan
        x[4, 0, 0, 0] = torch.inf
        found = method.score(x)
        assert found[[1, 4]].tolist() == [torch.inf, torch.inf]
        good = [0, 2, 3, 5]
        torch.testing.assert_close(
            found[good], clean[good], rtol=self.rounding, atol=self.rounding
        )

    def test_the_model_is_left_as_found(self, case: Case) -> None:
        model = case.model(case.kind)
        parts = model if isinstance(model, list) else [model]
        for part in parts:
            part.train()
            part[0].weight.requires_grad_(False)
        before = [copy.deepcopy(part.state_dict()) for part in parts]
        method = case.fitted(model)
        with torch.inference_mode():
            method.score(some())
        for part, state in zip(parts, before, strict=True):
            assert part.training
            assert part[0].training
            assert not part[0].weight.requires_grad
            assert part[3].weight.requires_grad
            assert all(parameter.grad is None for parameter in part.parameters())
            assert all(torch.equal(value, state[k]) for k, value in part.state_dict().items())
            assert not part._forward_hooks
            assert not any(m._forward_pre_hooks or m._forward_hooks for m in part.modules())

    def test_before_a_fit_it_says_what_to_type(self, case: Case, tmp_path: Path) -> None:
        method = case.fresh()
        if not method.learns:
            method.score(some())
            return
        for ask in (method.score, method):
            with pytest.raises(NotFittedError, match="fit"):
                ask(some())
        with pytest.raises(NotFittedError, match="fit"):
            method.save(tmp_path / "x")
        assert "not fitted" in repr(method)

    def test_a_failed_fit_changes_nothing(self, case: Case) -> None:
        method = case.fitted()
        if not method.learns:
            assert method.fit(iter(())) is method  # not even read
            return
        before = method.score(some())
        with pytest.raises(BatchError):
            method.fit([], progress=False)
        broken = [*training_data(case.kind)[:1], (torch.zeros(2, 9), torch.zeros(2))]
        with pytest.raises(Exception):  # noqa: B017, PT011 (the model's own)
            method.fit(broken, progress=False)
        assert torch.equal(method.score(some()), before)

    def test_save_and_load_agree_to_the_bit(self, case: Case, tmp_path: Path) -> None:
        model = case.model(case.kind)
        method = case.fitted(model)
        wanted = method(some())
        method.save(tmp_path / "method")
        loaded = type(method).load(tmp_path / "method", model)
        found = loaded(some())
        assert torch.equal(found.score, wanted.score)
        assert torch.equal(found.output, wanted.output)
        assert repr(loaded) == repr(method)
        assert [path.name for path in tmp_path.iterdir()] == ["method"]

    def test_files_of_others_are_refused(self, case: Case, tmp_path: Path) -> None:
        method = case.fitted()
        method.score(some())
        path = tmp_path / "method"
        method.save(path)
        other = case.model(case.kind)
        with torch.no_grad():
            (other[0] if isinstance(other, list) else other)[3].weight[0, 0] += 1
        with pytest.raises(MismatchError, match="weights"):
            type(method).load(path, other)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CorruptArtifactError):
            type(method).load(path, case.model(case.kind))

    def test_other_likelihoods_are_refused_by_name(self, case: Case) -> None:
        kind = type(case.fresh())
        others = [*LIKELIHOODS.values(), MonteCarlo(lambda o: None, 1)]  # type: ignore[arg-type,return-value]
        for likelihood in others:
            if not isinstance(likelihood, kind.handles):
                with pytest.raises(UnsupportedLikelihoodError, match=kind.because[:20]):
                    case.make(case.model("gaussian"), likelihood)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_moves_to_a_gpu_and_back(self, case: Case, tmp_path: Path) -> None:
        method = case.fitted()
        wanted = method(some())
        found = method.to("cuda")(some())
        assert found.score.device.type == "cuda"
        close = {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(found.score.cpu(), wanted.score, **close)
        torch.testing.assert_close(found.output.cpu(), wanted.output, **close)
        there = method.fit(training_data(case.kind), progress=False).score(some())
        torch.testing.assert_close(there.cpu(), wanted.score, rtol=1e-4, atol=1e-5)
        back = method.to("cpu").score(some())
        torch.testing.assert_close(back, wanted.score, rtol=1e-4, atol=1e-5)

    def test_follows_a_model_to_another_device(self, case: Case) -> None:
        """The other device is one without memory; what is checked is that state follows."""
        method, followed = case.fitted(), case.fitted()
        assert method.to("cpu") is method
        assert self._devices(method) == {"cpu"}
        assert method.to("meta") is method
        assert self._devices(method) == {"meta"}
        for model in followed._models():
            model.to("meta")
        assert self._devices(followed) == {"meta"}

    def _devices(self, method: Baseline) -> set[str]:
        """Where a fitted method's networks are, and what it has learnt."""
        weights = (p for model in method._models() for p in model.parameters())
        return {tensor.device.type for tensor in (*weights, *method._ready().values())}
