"""A regressor and a wrong unit."""

# %% [markdown]
# A classifier can at least look unsure. A regressor cannot: it returns a number, and the
# number looks the same whether the network knows the answer or makes it up. This tutorial
# gives a regressor a score of its uncertainty, in two steps:
#
# 1. a curve in one dimension, to see what the score measures;
# 2. a table of patients in which someone enters a blood sugar in another unit, and the
#    prediction does not give it away.
#
# Everything here runs in a few seconds and downloads nothing. The table needs pandas.

# %%
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from scodkit import Gaussian, Monitor
from scodkit.metrics import separation

BLUE, ORANGE = "#0072B2", "#D55E00"


def train(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """Return the network, trained on all samples at once."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return net


# %% [markdown]
# ## A curve with a gap
#
# The network learns $y = \sin 3x$ with some noise. It sees inputs in two intervals, none in
# the gap between them.

# %%
torch.manual_seed(0)
x = torch.cat([-2 + 1.2 * torch.rand(300, 1), 0.4 + 1.2 * torch.rand(300, 1)])
y = torch.sin(3 * x) + 0.1 * torch.randn(600, 1)
shuffled = torch.randperm(600)
known, held_out = x[shuffled[:400]], x[shuffled[400:]]
curve = nn.Sequential(
    nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
)
train(curve, known, y[shuffled[:400]], steps=500)

# %% [markdown]
# Three lines make the monitor. `Gaussian(variance=0.01)` says what the output means: the mean
# of a normal distribution whose noise has a standard deviation of 0.1. `fit` passes over the
# training inputs once and sketches which changes of the weights they would notice.
# `calibrate` scores inputs that were held out, so that scores turn into p-values.

# %%
monitor = Monitor(curve, Gaussian(variance=0.01), rank=60)
monitor.fit(known)
monitor.calibrate(held_out)

grid = torch.linspace(-3, 3, 400)[:, None]
scored = monitor(grid)
alarm = monitor.flag(grid, false_alarm=0.05)
for at in (-1.4, -0.2, 1.0, 2.6):
    one = monitor(torch.tensor([[at]]))
    print(
        f"x = {at:4}: predicted {one.output.item():5.2f}, score {one.score.item():7.3f} nats, "
        f"p-value {one.p_value.item():.3f}"
    )

# %%
# Figure: Above: the network's curve and its training data, with a gap. Below: the score, low
# where there is data and above the alarm's threshold elsewhere.
threshold = monitor.calibration.threshold(false_alarm=0.05)
figure, (above, below) = plt.subplots(2, figsize=(5, 4.8), sharex=True, height_ratios=(3, 2))
above.plot(known, y[shuffled[:400]], ".", color=BLUE, ms=3, alpha=0.5, label="training data")
above.plot(grid, torch.sin(3 * grid), "k:", lw=1, label="truth, sin 3x")
above.plot(grid, scored.output, color="black", label="the network")
above.set(ylabel="y", ylim=(-3, 3))
above.legend(loc="upper center", ncols=3, frameon=False, fontsize=9, columnspacing=1)
below.semilogy(grid, scored.score, color="black")
below.axhline(threshold, color=ORANGE, ls="--", lw=1)
below.text(-2.95, 1.5 * threshold, "alarm", color=ORANGE, fontsize=9)
below.set(xlabel="x", ylabel="score (nats)", xlim=(-3, 3))
for axes in (above, below):
    where = axes.get_xaxis_transform()
    axes.fill_between(grid[:, 0], 0, 1, where=alarm, transform=where, color=ORANGE, alpha=0.12)
    axes.spines[["top", "right"]].set_visible(False)
figure.align_ylabels()

# %% [markdown]
# The shaded regions raise an alarm. There the data leaves the network free: other weights fit
# the training samples equally well, and predict something else. That freedom is the score, in
# nats: how far the prediction may move, measured against the noise of the output.
#
# The usual measure of a prediction's uncertainty, its entropy, has nothing to say here. The
# network returns a mean, the noise is a constant, and so is the entropy of the two together.

# %%
entropy = torch.distributions.Normal(scored.output, 0.1).entropy()
print(f"different entropies on the whole grid: {len(entropy.unique())}")

# %% [markdown]
# ## Patients, and a wrong unit
#
# Now a real table: 442 patients with diabetes, ten measurements each, and how far the illness
# has come a year later (scikit-learn's copy, in the original units). The network's first
# layer standardises the measurements, so that the monitor sees years and mg/dl rather than
# z-scores, and its explanations name them.


# %%
class Standardise(nn.Module):
    """Bring columns to mean 0 and standard deviation 1."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("deviation", x.std(0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns ``(B, n)`` without units."""
        return (x - self.mean) / self.deviation


table = load_diabetes(as_frame=True, scaled=False)
torch.manual_seed(0)
order = torch.randperm(len(table.data)).numpy()
patients, progress = table.data.iloc[order], table.target.iloc[order]
x = torch.tensor(patients.to_numpy(), dtype=torch.float32)
y = torch.tensor(progress.to_numpy(), dtype=torch.float32)[:, None] / 100
net = nn.Sequential(Standardise(x[:240]), nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
train(net, x[:240], y[:240], steps=60)
noise = nn.functional.mse_loss(net(x[240:340]), y[240:340]).item()
print(f"squared error on held-out patients: {noise:.2f}; variance of the target: {y.var():.2f}")

# %% [markdown]
# The error on held-out patients also serves as the likelihood's variance. A monitor takes data
# frames as they are: 240 patients to fit, 100 others to calibrate, 102 to ask about.

# %%
monitor = Monitor(net, Gaussian(variance=round(noise, 2)), rank=30)
monitor.fit(patients[:240])
monitor.calibrate(patients[240:340])

test = patients[340:]
slips = {
    "as measured": test,
    "blood sugar in mmol/l": test.assign(s6=test.s6 / 18),
    "two columns swapped": test.assign(s1=test.s2, s2=test.s1),
}
lowest, highest = patients[:240].min(), patients[:240].max()
print(f"{'':22} {'error':>6} {'alarms':>7} {'out of range':>13} {'AUROC':>6}")
scores, rates = {}, {}
for name, asked in slips.items():
    found = monitor(asked)
    scores[name] = found.score
    error = abs(found.output[:, 0] - y[340:, 0].numpy()).mean()
    outside = ((asked < lowest) | (asked > highest)).any(axis=1).mean()
    rates[name] = (found.p_value <= 0.05).mean(), outside, error
    auroc = separation(scores["as measured"], found.score).auroc
    print(f"{name:22} {error:6.2f} {rates[name][0]:7.0%} {outside:13.0%} {auroc:6.3f}")

# %% [markdown]
# Both slips happen. Laboratories report blood sugar (`s6`) in mg/dl or in mmol/l, a factor of
# 18; total cholesterol (`s1`) and its LDL part (`s2`) stand beside each other in every
# report.
#
# - **As measured**, about as many patients raise an alarm as we accepted (5 % of 102 is 5).
# - **In mmol/l**, every patient raises one. The predictions alone do not reveal it: most of
#   them are numbers that real patients have.
# - **Swapped**, again every patient raises one, though a check of each column's range misses
#   a good part of them. In those no single number is unusual; their combination is.

# %%
# Figure: Predictions against scores. Most predictions with a wrong unit are numbers that
# patients have; all scores of both slips are above the alarm's threshold, few of other
# patients are.
figure, axes = plt.subplots(figsize=(5, 4.2))
for (name, asked), colour, mark in zip(
    slips.items(), (BLUE, ORANGE, "#CC79A7"), "os^", strict=True
):
    predicted = 100 * monitor(asked).output[:, 0]
    axes.scatter(predicted, scores[name], 18, colour, marker=mark, alpha=0.7, label=name)
threshold = monitor.calibration.threshold(false_alarm=0.05)
axes.axhline(threshold, color="black", ls="--", lw=1)
axes.text(-80, 0.93 * threshold, "alarm above this line", va="top", fontsize=9)
axes.axvspan(100 * y.min(), 100 * y.max(), color="black", alpha=0.05)
axes.set(
    yscale="log",
    xlabel="predicted progress (shaded: real patients)",
    ylabel="score (nats)",
)
axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Why does the score say so? `explain` answers in words, with the columns by name.

# %%
print(monitor.explain(slips["blood sugar in mmol/l"]).words(0))

# %% [markdown]
# ## A slip that does not matter
#
# Blood pressure (`bp`) and blood sugar (`s6`) have about the same range. Swap these two, and
# the network's error hardly changes: it makes little use of either. The score does not rise
# either, and that is as it should be. It does not ask whether an input is strange, but
# whether the *prediction* depends on something the data did not settle.

# %%
harmless = test.assign(bp=test.s6, s6=test.bp)
found = monitor(harmless)
error = abs(found.output[:, 0] - y[340:, 0].numpy()).mean()
alarms = (found.p_value <= 0.05).mean()
print(f"error {error:.2f}, alarms {alarms:.0%}")

# %% [markdown]
# ## What to remember
#
# - A regressor's monitor takes three lines, no labels and no retraining.
# - The variance of `Gaussian` sets the unit of the score. Take the squared error on held-out
#   data; p-values and alarms hardly depend on it.
# - The score grows where the data leaves the prediction open, also where every input is in
#   range.
#
# Next: [an image classifier](image_classifier.md), where the network does have an opinion of
# its own certainty, and [is SCOD the right score for my task?](right_score.md)
