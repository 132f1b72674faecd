"""Ports: scripts in the shapes that people bring, and the lines that change; one process of the
port trains what the plain script trains."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.own_loop.run import joined_runs

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
x = torch.rand(48, 6)
y = (x.sum(1) > 3).long()
"""
LOADER = HEAD + "data = torch.utils.data.DataLoader(list(zip(x, y)), batch_size=8)\n"
LAYERS = "nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))"
IMPORT = ("import torch\n", "import torch\nimport manyhands as mh\n")
JOIN = ("torch.manual_seed(0)\n", "run = mh.join()\ntorch.manual_seed(0)\n")

# name: (the plain script, what is replaced in it, lines that may change)
SHAPES: dict[str, tuple[str, list[tuple[str, str]], int]] = {
    "epochs with a schedule, as mnist": (
        LOADER
        + f"""
model = {LAYERS}
optimizer = torch.optim.Adadelta(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(2):
    model.train()
    for i, (inputs, target) in enumerate(data):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        if i % 2 == 0:
            print(i * len(inputs), len(data.dataset), 100 * i / len(data), loss.item())
    scheduler.step()
""",
        [
            ("        loss.backward()\n        optimizer.step()\n", "        run.step(loss)\n"),
            (
                "scheduler =",
                "model, optimizer, data = run.prepare(model, optimizer, data)\nscheduler =",
            ),
        ],
        5,
    ),
    "a loss that is a sum, as vae": (
        LOADER
        + f"""
model = {LAYERS}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for inputs, _ in data:
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), inputs, reduction="sum")
    loss.backward()
    optimizer.step()
""",
        [
            (
                "    loss.backward()\n    optimizer.step()\n",
                '    run.step(loss, reduction="sum")\n',
            ),
            (
                "for inputs",
                "model, optimizer, data = run.prepare(model, optimizer, data)\nfor inputs",
            ),
        ],
        5,
    ),
    "own batches, accumulation and a scaler that is off, as nanoGPT": (
        HEAD
        + f"""
ddp = False
model = {LAYERS}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", enabled=False)
for step in range(6):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (step + 1)
    for micro in range(2):
        at = 8 * ((2 * step + micro) % 6)
        loss = F.cross_entropy(model(x[at : at + 8]), y[at : at + 8]) / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
""",
        [
            ("    scaler.step(optimizer)\n", "    run.step(loss.detach())\n"),
            ("scaler =", "model, optimizer = run.prepare(model, optimizer)\nscaler ="),
        ],
        5,
    ),
    "hidden state and steps by hand, as word_language_model": (
        HEAD
        + """
text = x.view(-1, 1)
model = nn.GRU(1, 1)
lr, hidden = 0.1, torch.zeros(1, 1)
for at in range(0, len(text) - 9, 8):
    model.zero_grad()
    hidden = hidden.detach()
    output, hidden = model(text[at : at + 8], hidden)
    loss = F.mse_loss(output, text[at + 1 : at + 9])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
    lr /= 1.1
""",
        [
            ("text = x.view(-1, 1)\n", "text = run.part(x.view(-1, 1))\n"),
            ("mh.join()", 'mh.join("clip=0.1")'),
            (
                "lr, hidden",
                "model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters()))\n"
                "lr, hidden",
            ),
            (
                "    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
                "    for p in model.parameters():\n        p.data.add_(p.grad, alpha=-lr)\n",
                '    optimizer.param_groups[0]["lr"] = lr\n    run.step(loss.detach())\n',
            ),
        ],
        6,
    ),
    "two models that call backward themselves, as dcgan": (
        LOADER
        + f"""
model, other = {LAYERS}, nn.Linear(6, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
second = torch.optim.Adam(other.parameters(), lr=1e-2)
for inputs, _ in data:
    other.zero_grad()
    real = F.softplus(-other(inputs)).mean()
    real.backward()
    made = model(inputs)
    fake = F.softplus(other(made.detach())).mean()
    fake.backward()
    second.step()
    model.zero_grad()
    loss = F.softplus(-other(made)).mean()
    loss.backward()
    optimizer.step()
""",
        [
            (
                "for inputs",
                'parts = {"g": model, "d": other}, {"g": optimizer, "d": second}\n'
                "_, _, data = run.prepare(*parts, data)\nfor inputs",
            ),
            ("    second.step()\n", '    run.step(fake.detach(), optimizer="d")\n'),
            ("    optimizer.step()\n", '    run.step(loss.detach(), optimizer="g")\n'),
        ],
        8,
    ),
}


def ported(plain: str, edits: list[tuple[str, str]]) -> str:
    for old, new in [IMPORT, JOIN, *edits]:
        assert plain.count(old) == 1, old
        plain = plain.replace(old, new)
    return plain


def changed_lines(plain: str, port: str) -> int:
    a, b = plain.splitlines(), port.splitlines()
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return max(len(a), len(b)) - sum(block.size for block in blocks)


def weights(script: str) -> dict[str, torch.Tensor]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, "script.py", "exec"), names)
    found = {k: v.detach().clone() for k, v in names["model"].state_dict().items()}
    if "run" in names:
        names["run"].close()
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_port_changes_few_lines(shape: str) -> None:
    plain, edits, most = SHAPES[shape]
    assert 0 < changed_lines(plain, ported(plain, edits)) <= most


@pytest.mark.parametrize("shape", SHAPES)
def test_one_process_of_a_port_trains_what_the_plain_script_trains(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    plain, edits, _ = SHAPES[shape]
    try:
        ours = weights(ported(plain, edits))
    finally:
        for run in list(joined_runs):
            run._abandon()
            run.close()
    for name, value in weights(plain).items():
        assert torch.allclose(ours[name], value, atol=1e-6), name
