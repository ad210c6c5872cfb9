"""An image classifier that meets a new kind of image."""

# %% [markdown]
# A classifier knows a fixed list of classes and must choose one of them, whatever you show
# it. Here it knows the digits 0 to 4, and is then shown 5 to 9. `Fused` adds up several kinds
# of evidence that an image is unlike those it was trained on, so you need not choose one.
#
# The data comes with scikit-learn: 1,797 handwritten digits of 8 x 8 pixels.

# %%
import warnings

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from scodkit import Categorical, Fused, Monitor, compare
from scodkit.baselines import KNN, Energy, MaxSoftmax, ViM
from scodkit.errors import SuspiciousInputWarning

torch.manual_seed(0)
data = load_digits()
order = torch.randperm(len(data.target))
images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
labels = torch.tensor(data.target)[order]
known, known_labels, new = images[labels < 5], labels[labels < 5], images[labels >= 5]
train_x, held_out_x, test_x = known[:500], known[500:700], known[700:]

model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(128, 5)),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(15):
    for batch in torch.randperm(500).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train_x[batch]), known_labels[batch]).backward()
        optimizer.step()

right = (model(test_x).argmax(1) == known_labels[700:]).float().mean()
sure = (model(new).softmax(1).amax(1) > 0.9).float().mean()
print(f"right on new images of 0-4: {right:.1%}")
print(f"more than 90 % sure of its answer on 5-9: {sure:.1%}")

# %% [markdown]
# The network is good at its task, and more than 90 % sure of a wrong answer on many of the
# digits it has never seen. Its own confidence is not enough.
#
# ## Fit, calibrate, ask
#
# `fit` needs the training images and no labels. `calibrate` needs images like those the
# network will meet, on which it was **not** trained. It turns scores into p-values, so that
# you choose a rate of false alarms rather than a threshold.

# %%
fused = Fused(model, Categorical())
fused.fit(train_x)
fused.calibrate(held_out_x)

alarms, new_alarms = fused.flag(test_x, false_alarm=0.05), fused.flag(new, false_alarm=0.05)
for name, flags in {"0-4": alarms, "5-9": new_alarms}.items():
    print(f"digits {name}: {flags.sum()} alarms among {len(flags)}, {flags.float().mean():.1%}")

# %% [markdown]
# With a rate of 5 %, 201 images have between 4 and 16 alarms in 95 of 100 cases (the binomial
# interval): the first line keeps the promise. The second line shows what the alarm is for.

# %%
# Figure: Scores of known and of new digits on one axis with the alarm's threshold; beneath it
# digits 5-9 from the least to the most atypical, an alarm framed in orange.
scored, scored_new = fused(test_x), fused(new)
ranks = scored_new.score.argsort()[torch.linspace(0, len(new) - 1, 12).long()]
figure = plt.figure(figsize=(5, 5), layout="constrained")
above, below = figure.subfigures(2, height_ratios=(3, 2))
axes = above.subplots()
bins = torch.linspace(-8, 16, 37).tolist()
for score, colour, name in (
    (scored.score, "#0072B2", "digits 0-4, new images"),
    (scored_new.score, "#D55E00", "digits 5-9, never seen"),
):
    axes.hist(score, bins, density=True, color=colour, alpha=0.6, label=name)
threshold = fused.calibration.threshold(false_alarm=0.05)
axes.axvline(threshold, color="black", ls="--", lw=1)
axes.text(threshold + 0.2, 0.17, "alarm", fontsize=9)
axes.set(xlabel="score (standard deviations of held-out images)", yticks=[])
axes.legend(frameon=False, fontsize=9)
axes.spines[["top", "right", "left"]].set_visible(False)
for cell, i in zip(below.subplots(2, 6).flat, ranks.tolist(), strict=True):
    cell.imshow(new[i, 0].numpy(), cmap="gray_r")
    cell.set(xticks=[], yticks=[])
    cell.set_title(f"{scored_new.score[i]:.1f}", fontsize=9)
    cell.spines[:].set(color="#D55E00" if new_alarms[i] else "#BBBBBB", lw=2.5)

# %% [markdown]
# The new digits that pass are those that look like a known one.
#
# ## What makes an image atypical?
#
# Each part of `Fused` is standardised on held-out images, so its terms can be compared and
# simply add up to the score.

# %%
for i in (ranks[-1], ranks[0]):
    print(fused.explain(new[i : i + 1]).words(0))
    print()

# %% [markdown]
# ## Is it any better than the rest?
#
# `compare` scores the same images with every method, and reports intervals and costs.

# %%
methods = {"Fused": fused, "SCOD": Monitor(model, Categorical(), rank=50).fit(train_x)}
for method in (ViM, Energy, MaxSoftmax, KNN):
    methods[method.__name__] = method(model, Categorical()).fit(train_x)
found = compare(methods, known=test_x, unknown={"digits 5-9": new})
for row in found.rows:
    low, high = row["auroc_low"], row["auroc_high"]
    print(f"{row['method']:10}  AUROC {row['auroc']:.3f} ({low:.3f} to {high:.3f})")

# %%
# Figure: AUROC, AUPR and FPR95 of six methods with their intervals.
found.plot()

# %% [markdown]
# Read the intervals before the ranks. On this small network `Fused` and `ViM` cannot be told
# apart, and both are ahead of the network's own confidence (`MaxSoftmax`). SCOD alone is
# between the two and costs the most: in classifiers the softmax already says much of what the
# curvature knows. Its place is with [networks that predict numbers](regressor.md).
#
# ## The slip that confidence cannot see
#
# Someone forgets to divide the pixels by 16. The logits grow with the pixels, the softmax
# saturates, and any score made of the softmax alone takes the image for a familiar one.
# `Fused` also looks at features and at the range of inputs. (Both methods warn that the
# inputs are out of range; here the warnings are turned off.)

# %%
warnings.simplefilter("ignore", SuspiciousInputWarning)
bright = 16 * test_x
methods["SCOD"].calibrate(held_out_x)
for name in ("SCOD", "Fused"):
    print(
        f"{name}: {methods[name].flag(bright).float().mean():.0%} of images 16 times too bright"
    )
