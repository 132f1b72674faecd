"""Own buffers: which ones a forward pass has changed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyhands.replica.checks.own_buffers import OwnBuffers


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = (
            nn.BatchNorm1d(4),
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        )
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.last(self.norm(x)) * self.scale


def test_buffers_that_a_forward_pass_changes_are_named_but_for_those_of_known_modules() -> None:
    model = Running()
    buffers = OwnBuffers(model)
    assert buffers.changed() == []
    model(torch.randn(8, 4))
    assert buffers.changed() == ["mean"]
