"""A camera that fogs up."""

# %% [markdown]
# A camera looks at a lane, a network says how far the vehicle is from its middle. Fog settles
# on the lens, a little more with every frame. No single frame is remarkable, every prediction
# is a plausible number, and after a while all of them are wrong.
#
# A threshold on single frames never stops raising false alarms: on 5 % of all frames. A
# `DriftAlarm` watches the stream as a whole and promises something stronger: the probability
# that it ever raises a false alarm, however long it runs, is at most 1 %.

# %%
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from scodkit import DriftAlarm, Gaussian, Monitor

HEIGHT, WIDTH = 16, 24
draw = torch.Generator().manual_seed(0)


def frames(fog: Tensor) -> tuple[Tensor, Tensor]:
    """Return a frame ``(1, 16, 24)`` for each amount of fog, and the places ``(n, 1)``."""
    place, heading, light = torch.rand(3, len(fog), 1, 1, generator=draw)
    place, heading = 2 * place - 1, 1.2 * heading - 0.6
    near = torch.linspace(0, 1, HEIGHT)[:, None]  # from the horizon to the wheels
    across = torch.linspace(-1.5, 1.5, WIDTH)
    picture = 0.25 + 0.1 * light
    for side in (-1, 1):
        line = (0.9 * side - 0.6 * place) * (0.15 + 0.85 * near) + heading * (1 - near)
        picture = picture + 0.6 * torch.exp(-(((across - line) / (0.05 + 0.1 * near)) ** 2))
    fog = fog[:, None, None]
    picture = (1 - fog) * picture.clamp(max=1) + 0.75 * fog
    return (picture + 0.03 * torch.randn(picture.shape, generator=draw))[:, None], place[
        :, :, 0
    ]


torch.manual_seed(0)
x, y = frames(fog=torch.zeros(1500))
model = nn.Sequential(
    *(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU()),
    *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(384, 32), nn.ReLU(), nn.Linear(32, 1)),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(12):
    for batch in torch.randperm(1000).split(50):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
error = nn.functional.mse_loss(model(x[1000:]), y[1000:]).item()
print(f"squared error on new clear frames {error:.4f}, variance of the place {y.var():.2f}")

# %% [markdown]
# The monitor is fitted and calibrated as for [any regressor](regressor.md). The alarm starts
# with its calibration.

# %%
monitor = Monitor(model, Gaussian(variance=error), rank=50)
monitor.fit(x[:1000])
monitor.calibrate(x[1000:])

CLEAR, ALL = 200, 600
fogging = (torch.arange(ALL) - CLEAR).clamp(min=0) * 0.001  # from frame 200 on, 0.1 % a frame
streams = {"clear": torch.zeros(ALL), "fogging up": fogging}
evidence, errors, alarmed_at = {}, {}, {}
for name, fog in streams.items():
    alarm = DriftAlarm(monitor, false_alarm=0.01, seed=0)
    seen, place = frames(fog)
    scored = monitor(seen)
    evidence[name] = []
    for score in scored.score:
        alarm.push(score)
        evidence[name].append(alarm.wealth)
    errors[name] = (scored.output - place).abs()[:, 0].detach()
    alarmed_at[name] = alarm.alarmed_at
    print(
        f"{name}: " + (f"alarm at frame {alarm.alarmed_at}" if alarm.alarmed_at else "no alarm")
    )

# %% [markdown]
# The alarm is a gambler who bets, frame after frame, that scores are higher than the held-out
# ones. While all is well no bet pays on average, so the wealth seldom grows: the probability
# that it ever reaches 100 is at most 1 in 100. With fog the bets pay, and the wealth explodes.

# %%
# Figure: Frames of a stream that fogs up; below, the alarm's wealth, which passes 100 soon
# after the fog begins and stays low on a clear stream; at the bottom the error of the
# predictions, which grows with the fog.
figure = plt.figure(figsize=(5, 5.4), layout="constrained")
strip, plots = figure.subfigures(2, height_ratios=(1, 5))
times = (100, 250, alarmed_at["fogging up"], 400, 500, 599)
pictures, _ = frames(fogging[list(times)])
for axes, picture, time in zip(strip.subplots(1, len(times)), pictures, times, strict=True):
    axes.imshow(picture[0].numpy(), cmap="gray", vmin=0.2, vmax=1)
    axes.set(xticks=[], yticks=[])
    axes.set_title(
        f"frame {time}", fontsize=9, color="#D55E00" if time == times[2] else "black"
    )
above, below = plots.subplots(2, sharex=True)
smooth = torch.ones(1, 1, 25) / 25
for name, colour in {"clear": "#0072B2", "fogging up": "#D55E00"}.items():
    above.semilogy(evidence[name], color=colour, label=name)
    mean = nn.functional.conv1d(errors[name][None, None], smooth)[0, 0]
    below.plot(torch.arange(24, ALL), mean, color=colour)
above.axhline(100, color="black", ls="--", lw=1)
above.text(5, 150, "alarm", fontsize=9)
above.set(ylabel="wealth", ylim=(1e-2, 1e6))
above.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.0, 0.85))
below.set(xlabel="frame", ylabel="error, mean of 25", xlim=(0, ALL))
for axes in (above, below):
    axes.axvline(CLEAR, color="black", lw=0.8, ls=":")
    axes.axvline(alarmed_at["fogging up"], color="#D55E00", lw=0.8, ls=":")
    axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## How often, and how soon?
#
# One stream proves little. Here are 200 clear ones, and 40 for each of four kinds of fog.


# %%
def first_alarm(fog: Tensor, seed: int) -> int | None:
    """Return the frame at which a stream's alarm rises; None if it stays quiet."""
    alarm = DriftAlarm(monitor, false_alarm=0.01, seed=seed)
    alarm.push_many(monitor.score(frames(fog)[0]))
    return alarm.alarmed_at


quiet = [first_alarm(torch.zeros(300), seed) for seed in range(200)]
false_alarms = sum(alarm is not None for alarm in quiet)
print(f"clear streams with a false alarm: {false_alarms} of {len(quiet)}")
delays = {}
for speed in (0.0005, 0.001, 0.002, 0.005):
    fog = (torch.arange(500) - 100).clamp(min=0) * speed
    alarms = [first_alarm(fog, seed) for seed in range(40)]
    delays[speed] = [alarm - 100 for alarm in alarms if alarm is not None]
    median = sorted(delays[speed])[len(delays[speed]) // 2]
    print(
        f"{speed:.2%} more fog a frame: {len(delays[speed])} of 40 noticed, "
        f"the median after {median} frames, at {median * speed:.0%} fog"
    )

# %%
# Figure: Delay of the alarm in 40 streams for each of four speeds of the fog: fewer frames
# the faster it comes.
figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
jitter = torch.Generator().manual_seed(0)
for row, values in enumerate(delays.values()):
    height = row + 0.4 * torch.rand(len(values), generator=jitter) - 0.2
    axes.plot(values, height, ".", color="#D55E00", alpha=0.5)
    axes.plot(sorted(values)[len(values) // 2], row, "|", color="black", ms=18, mew=2)
axes.set_yticks(range(len(delays)), [f"{speed:.2%} a frame" for speed in delays])
axes.set(xlabel="frames from first fog to alarm (bar: median)", xlim=(0, None))
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## What is promised, and what is not
#
# - The bound on false alarms holds for any network and any score, for a stream of any length.
# - It assumes that good frames are **exchangeable** with the held-out ones: as if drawn from
#   the same box. Here they are. Frames of a real camera resemble their neighbours; push one
#   frame every few seconds, or judge whole drives with a [`RolloutAlarm`](robot_rollout.md).
# - Nothing is promised about delays. They depend on how much the fog changes what the network
#   computes; measure them, as above, on faults you can make.
#
# [All alarms and their guarantees](../guides/alarms.md)
