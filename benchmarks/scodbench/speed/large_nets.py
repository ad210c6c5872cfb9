"""Networks larger than the paper's: a vision transformer and a segmenter, random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class VisionTransformer(nn.Module):
    """ViT-B/16 by default: 86 million weights for pictures of 3 x 224 x 224.

    Args:
        classes: Outputs.
        width: Of a token.
        depth: Blocks.
        heads: Of each block's attention.
        patch: Pixels along a patch's side.
        side: Pixels along a picture's side.
    """

    def __init__(
        self,
        classes: int = 1000,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        patch: int = 16,
        side: int = 224,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 1 + (side // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width,
                    heads,
                    4 * width,
                    dropout=0.0,
                    activation="gelu",
                    batch_first=True,
                    norm_first=True,
                )
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(B, classes)`` of pictures ``(B, 3, side, side)``."""
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1) + self.places
        return self.head(self.norm(self.blocks(tokens)[:, 0]))


def _twice(wide: int, narrow: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(wide, narrow, 3, padding=1),
        nn.BatchNorm2d(narrow),
        nn.ReLU(),
        nn.Conv2d(narrow, narrow, 3, padding=1),
        nn.BatchNorm2d(narrow),
        nn.ReLU(),
    )


class Segmenter(nn.Module):
    """A U-Net: logits ``(B, classes, H, W)`` for every pixel of ``(B, 3, H, W)``.

    Args:
        classes: Of a pixel.
        width: Channels at full resolution; doubled three times on the way down.
    """

    def __init__(self, classes: int = 21, width: int = 32) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(map(_twice, [3, *widths[:-1]], widths))
        self.rise = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1])
        )
        self.up = nn.ModuleList(_twice(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        passed = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else nn.functional.max_pool2d(x, 2))
            passed.append(x)
        for rise, block, beside in zip(self.rise, self.up, passed[-2::-1], strict=True):
            x = block(torch.cat([rise(x), beside], 1))
        return self.head(x)
