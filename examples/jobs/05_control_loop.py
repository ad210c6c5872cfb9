"""5. A control loop: a compiled score, an alarm for drift, one for each rollout."""

import torch
from given import batches, trained
from torch import Tensor, nn

from scodkit import DriftAlarm, Gaussian, Monitor, RolloutAlarm

gain = torch.randn(6, 2)
states = torch.randn(1500, 6)
controller = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
trained(
    controller,
    batches(states[:1000], torch.tanh(states[:1000] @ gain), shuffle=True),
    nn.functional.mse_loss,
)
monitor = Monitor(controller, Gaussian(variance=0.01))
monitor.fit(states[:1000]).calibrate(states[1000:])
monitor.compile(states[:1])  # on a GPU a CUDA graph

# the stream: after 200 steps the sensors are off
drift = DriftAlarm(monitor, false_alarm=0.01)
stream = torch.cat([torch.randn(200, 6), 2.5 * torch.randn(100, 6)])
for step, state in enumerate(stream.split(1)):
    scored = monitor(state)
    command = scored.output  # for the actuators
    if drift.push(scored):
        print(f"drift noticed at step {step}")
        break


def rollout(wind: float) -> Tensor:
    """Return the states ``(40, 6)`` of a rollout, which depend on each other."""
    state, seen = torch.zeros(6), []
    for _ in range(40):
        state = 0.8 * state + 0.5 * torch.randn(6) + wind
        seen.append(state)
    return torch.stack(seen)


good = [monitor(rollout(0.0)) for _ in range(60)]
rollouts = RolloutAlarm(good, false_alarm=0.05, window=10)
alarms = {wind: 0 for wind in (0.0, 0.5)}
for wind in alarms:
    for _ in range(20):
        rollouts.start()
        alarms[wind] += any([rollouts.push(monitor(state)) for state in rollout(wind).split(1)])
print(f"stopped: {alarms[0.0]} of 20 good rollouts, {alarms[0.5]} of 20 in the wind")
print(drift, rollouts, sep="\n")
