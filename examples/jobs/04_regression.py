"""4. Networks that predict numbers: with a variance of their own, a controller, an LSTM."""

import torch
from given import batches, trained
from torch import Tensor, nn

from scodkit import Gaussian, HeteroscedasticGaussian, Monitor


def told(name: str, monitor: Monitor, known: Tensor, far: Tensor) -> tuple[float, float]:
    """Print the shares of alarms of known and of far inputs, and return them."""
    rates = [float(monitor.flag(x).float().mean()) for x in (known, far)]
    print(f"{name}: {rates[0]:.1%} alarms of known inputs, {rates[1]:.1%} of far ones")
    return rates[0], rates[1]


# a mean and the logarithm of a variance
x = 4 * torch.rand(700, 1) - 2
y = torch.sin(2 * x) + 0.3 * x.abs() * torch.randn_like(x)


class MeanAndVariance(nn.Module):
    """A network with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.mean, self.log_variance = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the variance, each ``(B, 1)``."""
        h = self.body(x)
        return self.mean(h), self.log_variance(h)


def likely(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Return the negative log likelihood."""
    mean, log_variance = output
    return nn.functional.gaussian_nll_loss(mean, y, log_variance.exp())


net = trained(MeanAndVariance(), batches(x[:400], y[:400], shuffle=True), likely, epochs=40)
monitor = Monitor(net, HeteroscedasticGaussian(), outputs=lambda out: torch.cat(out, -1))
monitor.fit(x[:400]).calibrate(x[400:600])
with_variance = told("mean and variance", monitor, x[600:], 4 * x[600:])

# a controller: six numbers of state, two of command
state = torch.randn(1200, 6)
command = torch.tanh(state @ torch.randn(6, 2))
net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
trained(net, batches(state[:800], command[:800], shuffle=True), nn.functional.mse_loss)
monitor = Monitor(net, Gaussian(variance=0.01)).fit(state[:800]).calibrate(state[800:1000])
controller = told("controller", monitor, state[1000:], 4 * state[1000:])


class LastStep(nn.Module):
    """An LSTM that predicts the next value of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the prediction ``(B, 1)`` from the series ``(B, T, 1)``."""
        return self.head(self.lstm(x)[0][:, -1])


def series(count: int, speed: float) -> Tensor:
    """Return waves ``(count, 21, 1)`` with some noise."""
    steps = speed * torch.arange(21.0)[:, None] + 6.28 * torch.rand(count, 1, 1)
    return torch.sin(steps) + 0.05 * torch.randn(count, 21, 1)


waves, fast = series(800, speed=0.3), series(200, speed=1.5)
net = trained(
    LastStep(), batches(waves[:400, :-1], waves[:400, -1], shuffle=True), nn.functional.mse_loss
)
monitor = Monitor(net, Gaussian(variance=0.01))
monitor.fit(waves[:400, :-1]).calibrate(waves[400:600, :-1])
recurrent = told("LSTM", monitor, waves[600:, :-1], fast[:, :-1])
print(f"engine of the LSTM: {monitor.fitted.engine}")
