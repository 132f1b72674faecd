"""A small residual network with BatchNorm.

Its skips cross cuts, its channels can be split, its buffers move with their layers.
"""

import torch
from torch import Tensor, nn

import manyhands as mh


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short = (
            nn.Identity()
            if stride == 1 and channels == out
            else nn.Conv2d(channels, out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.short(x))


class Net(nn.Module):
    def __init__(self, width: int = 8, classes: int = 5):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            [Block(width, width), Block(width, 2 * width, 2), Block(2 * width, 2 * width)]
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def task():
    chance = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    x, y = torch.randn(96, 1, 8, 8, generator=chance), torch.randint(5, (96,), generator=chance)
    return mh.Task(
        model=Net(),
        loss=nn.functional.cross_entropy,
        train=(x, y),
        test=(x[:40], y[:40]),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        batch=16,
        metrics={"accuracy": mh.accuracy},
    )
