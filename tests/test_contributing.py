"""The merge rule that CONTRIBUTING.md shows is complete and does what its equation says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from manyhands.core import (
    Group,
    Tensors,
)
from manyhands.exchange.inproc import World


class Pulled:
    """A replica with two numbers, that each step moves one tenth of the way towards its rank's
    goal.
    """

    def __init__(self, goal: float):
        self.goal = goal
        self.params: Tensors = {"w": torch.zeros(2)}
        self.grads: Tensors = {"w": torch.zeros(2)}
        self.count = torch.ones(())

    def steps(self, most: int) -> Iterator[int]:
        return iter(range(most))

    def backward(self, on_ready: Any = None) -> Tensor:
        self.grads["w"].copy_(self.params["w"] - self.goal)
        return self.grads["w"].square().sum() / 2

    def step(self) -> None:
        self.params["w"].sub_(self.grads["w"], alpha=0.1)


def example(monkeypatch) -> Any:
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    code = re.search(r"```python\n(\"\"\"Slow.*?)```", page, re.DOTALL)
    assert code is not None
    module = ModuleType("slow_momentum")
    # dataclasses look their module up; `from __future__ import annotations` of this file does not
    # reach it
    monkeypatch.setitem(__import__("sys").modules, "slow_momentum", module)
    exec(compile(code[1], "CONTRIBUTING.md", "exec", dont_inherit=True), module.__dict__)
    return module.SlowMomentum


def test_the_example_follows_its_equation(monkeypatch) -> None:
    rule = example(monkeypatch)(period=1, alpha=1.0, beta=0.5)

    def main(link: Group) -> list[float]:
        replica: Any = Pulled(goal=[1.0, 3.0][link.rank])
        state = rule.init(replica)
        places = []
        for _ in range(2):
            rule.round(replica, link, state)
            places.append(replica.params["w"][0].item())
        return places

    # first round: x_i = 0.1, 0.3, mean 0.2, u = -0.2, z = 0.2; second: mean 0.38, u = -0.1 - 0.18,
    # z = 0.48
    for places in World(2).run(main):
        torch.testing.assert_close(places, [0.2, 0.48])
