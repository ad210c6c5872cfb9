"""2. A residual network on images: BatchNorm, in-place ReLU, skips, left in train mode."""

import torch
from given import batches, trained
from torch import Tensor, nn

from scodkit import Categorical, LastLayers, Monitor


def textures(count: int, kinds: list[int]) -> tuple[Tensor, Tensor]:
    """Return images ``(count, 3, 16, 16)`` of stripes, a direction and colour for each kind."""
    kind = torch.tensor(kinds)[torch.randint(len(kinds), (count,))]
    y, x = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    angle = kind.float()[:, None, None] * torch.pi / 8
    waves = torch.sin(x * torch.cos(angle) + y * torch.sin(angle) + 6 * torch.rand(count, 1, 1))
    colour = 0.5 + 0.5 * torch.stack([torch.cos(kind + shift) for shift in (0.0, 2.1, 4.2)], 1)
    return waves[:, None] * colour[..., None, None] + 0.3 * torch.randn(count, 3, 16, 16), kind


class Block(nn.Module):
    """Two convolutions with a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` and what the convolutions add to it."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


resnet = nn.Sequential(
    *(nn.Conv2d(3, 16, 3, padding=1), Block(16), nn.MaxPool2d(2), Block(16)),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
)
x, y = textures(600, kinds=[0, 1, 2, 3])
trained(resnet, batches(x[:400], y[:400], shuffle=True), epochs=5)
new, _ = textures(200, kinds=[5, 6])

last = LastLayers(fraction=0.5)  # all weights of a large network are seldom worth their cost
monitor = Monitor(resnet, Categorical(), parameters=last)
print(monitor.plan(x[:64]))  # what it will take, before it is taken
monitor.fit(batches(x[:400], y[:400])).calibrate(batches(x[400:500], y[400:500]))
false_alarms = monitor.flag(x[500:]).float().mean()
caught = monitor.flag(new).float().mean()
print(f"alarms: {false_alarms:.1%} of known textures, {caught:.1%} of new ones")
assert resnet.training  # as it was
