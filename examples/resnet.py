"""A residual network on Fashion-MNIST through a pipeline.

Its skips cross from stage to stage, and BatchNorm sees micro-batches.

python examples/resnet.py                                          one process
manyhands run examples/resnet.py pipe=2 micro=4                    two stages
manyhands run examples/resnet.py pipe=2 tensor=2 schedule=gpipe    four: stages split by channels
"""

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands import datasets


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.skip = (
            nn.Identity() if channels == out else nn.Conv2d(channels, out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Block(width, width, 1),
            Block(width, 2 * width, 2),
            Block(2 * width, 2 * width, 1),
            Block(2 * width, 4 * width, 2),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


def task() -> mh.Task:
    name, train, test = datasets.images()
    return mh.Task(
        name=f"ResNet on {name}",
        model=ResNet(),
        loss=nn.functional.cross_entropy,
        train=train,
        test=test,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        metrics={"accuracy": mh.accuracy},
        batch=64,
        epochs=1,
    )


if __name__ == "__main__":
    mh.train(task)
