"""Loops of one's own over `two_players`, with several optimizers: as their users write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

import manyhands as mh
from support import two_players
from support.two_players import CLASSES, NOISE, REAL

SGD, StepLR = torch.optim.SGD, torch.optim.lr_scheduler.StepLR


class Players:
    """A GAN, prepared by a run. `epochs`: how many its loop makes."""

    norm = False

    def __init__(self, run: mh.Run, batch: int, epochs: int = 2):
        self.run, self.epochs = run, epochs
        models = two_players.gan_models(norm=self.norm)
        made = {k: f(models[k].parameters()) for k, f in self.optimizers().items()}
        prepared = run.prepare(models, made, self.data(), batch=batch, schedule=self.schedule(made))
        self.models, self.made, self.batches = prepared
        self.g, self.d = self.models["g"], self.models["d"]

    def optimizers(self) -> dict[str, Any]:
        return two_players.gan_optimizers()

    def schedule(self, made: dict[str, Any]) -> Any:
        return None

    def data(self) -> Any:
        return REAL, NOISE

    def loop(self) -> None:
        for _ in range(self.epochs):
            for batch in self.batches:
                self.batch(*batch)

    def batch(self, real: Tensor, noise: Tensor) -> None:
        fake = self.g(noise)
        self.run.step(self.loss_d(real, fake), optimizer="d")
        self.run.step(self.loss_g(fake), optimizer="g")

    def loss_d(self, real: Tensor, fake: Tensor) -> Tensor:
        return (softplus(-self.d(real)) + softplus(self.d(fake.detach()))).mean()

    def loss_g(self, fake: Tensor) -> Tensor:
        return softplus(-self.d(fake)).mean()

    def state(self) -> dict[str, Tensor]:
        named = self.models.items()
        return {f"{n}.{k}": v.clone() for n, m in named for k, v in m.state_dict().items()}


class Gradients(Players):
    """As in many scripts: a backward pass for the real ones, another for the others."""

    def batch(self, real: Tensor, noise: Tensor) -> None:
        self.made["d"].zero_grad()
        softplus(-self.d(real)).mean().backward()
        fake = self.g(noise)
        softplus(self.d(fake.detach())).mean().backward()
        self.run.step(optimizer="d")
        self.made["g"].zero_grad()
        loss = self.loss_g(fake)
        loss.backward()  # through d, whose gradients nobody wants
        self.run.step(loss.detach(), optimizer="g")


class Closures(Players):
    def batch(self, real: Tensor, noise: Tensor) -> None:
        self.run.step(lambda: self.loss_d(real, self.g(noise)), optimizer="d")
        self.run.step(lambda: self.loss_g(self.g(noise)), optimizer="g")


class Normed(Players):
    norm = True

    def optimizers(self) -> dict[str, Any]:
        # Adam divides by the root of a sum of squares, and would amplify the order of summation
        return {name: lambda p: SGD(p, 0.05, momentum=0.5) for name in "gd"}


class Clamped(Players):
    """The loop changes parameters between two steps, and counts samples itself."""

    def batch(self, real: Tensor, noise: Tensor) -> None:
        fake = self.g(noise)
        self.run.step(self.loss_d(real, fake), len(real), optimizer="d")
        for p in self.d.parameters():
            p.data.clamp_(-0.3, 0.3)
        self.run.step(self.loss_g(fake), len(real), optimizer="g")


class Scheduled(Players):
    def schedule(self, made: dict[str, Any]) -> Any:
        return {"d": StepLR(made["d"], 2, 0.5)}


class FiveToOne(Players):
    def batch(self, real: Tensor, noise: Tensor) -> None:
        for _ in range(5):
            self.run.step(self.loss_d(real, self.g(noise)), optimizer="d")
        self.run.step(self.loss_g(self.g(noise)), optimizer="g")


class NowAndThen(Players):
    """g steps at every second batch only, and then both once more, together."""

    n = 0

    def batch(self, real: Tensor, noise: Tensor) -> None:
        self.n += 1
        self.run.step(self.loss_d(real, self.g(noise)), optimizer="d")
        if self.n % 2:
            self.run.step(self.loss_g(self.g(noise)), optimizer="g")
            self.run.step(self.d(self.g(noise)).square().mean())


class Drawn(Players):
    """Batches that every rank takes its own part of: steps come one after the other."""

    def data(self) -> Any:
        return None

    def __init__(self, run: mh.Run, batch: int, epochs: int = 2):
        self.run, self.epochs = run, epochs
        self.models = two_players.gan_models()
        made = {k: f(self.models[k].parameters()) for k, f in self.optimizers().items()}
        self.models, self.made = run.prepare(self.models, made)
        self.g, self.d = self.models["g"], self.models["d"]

    def loop(self) -> None:
        for _, at in itertools.product(range(self.epochs), range(0, len(REAL), 12)):
            real, noise = (self.run.part(v[at : at + 12]) for v in (REAL, NOISE))
            for name in "dg":
                fake = self.g(noise)
                loss = self.loss_d(real, fake) if name == "d" else self.loss_g(fake)
                given = loss if len(real) else None
                self.run.step(given, count=len(real), optimizer=name)


class OneRankEndsEarly(Drawn):
    """The last rank has no samples after a while, and its loop ends there."""

    def loop(self) -> None:
        for n in range(6):
            if self.run.size > 1 and self.run.rank == self.run.size - 1 and n == 2:
                return
            parts = self.run.size if n < 2 else self.run.size - 1
            mine = slice(self.run.rank, None, max(1, parts))
            real, noise = REAL[:12][mine], NOISE[:12][mine]
            self.run.step(self.loss_d(real, self.g(noise)), len(real), optimizer="d")
            self.run.step(self.loss_g(self.g(noise)), len(real), optimizer="g")


class Critic(Players):
    """An actor-critic of one model with three parts, whose losses count what they like."""

    def __init__(self, run: mh.Run, batch: int, epochs: int = 2):
        self.run, self.epochs = run, epochs
        torch.manual_seed(6)
        self.model = two_players.Agent()
        parts = self.model.named_children()
        made = {name: SGD(part.parameters(), 0.05, momentum=0.9) for name, part in parts}
        self.model, _, self.batches = run.prepare(self.model, made, (REAL, CLASSES), batch=batch)

    def batch(self, seen: Tensor, done: Tensor) -> None:
        for name, loss, count in two_players.agent_step(self.model, (seen, done)):
            self.run.step(loss, count, optimizer=name)

    def state(self) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in self.model.state_dict().items()}


class Layers(Critic):
    """Optimizers of layers that step together."""

    def __init__(self, run: mh.Run, batch: int, epochs: int = 2):
        self.run, self.epochs = run, epochs
        torch.manual_seed(7)
        self.model: Any = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        first, last = self.model[0].parameters(), self.model[2].parameters()
        made = {"first": SGD(first, 0.05), "last": SGD(last, 0.1, momentum=0.9)}
        self.model, _, self.batches = run.prepare(self.model, made, (REAL, CLASSES), batch=batch)

    def batch(self, seen: Tensor, classes: Tensor) -> None:
        self.run.step(cross_entropy(self.model(seen), classes))


def one(make: Callable[..., Players], words: str, folder: Path, batch: int, **more: Any) -> None:
    """One loop, in this process or in this rank of a job."""
    resume = more.pop("resume", False)
    run = mh.join(words, directory=folder / "run", resume=resume, quiet=True, argv=False)
    try:
        players = make(run, batch, **more)
        players.loop()
        if not isinstance(players, OneRankEndsEarly):
            with run.merged():
                save_file(players.state(), folder / f"{run.rank}.safetensors")
            run.close()
        else:
            run.close()
            save_file(players.state(), folder / f"{run.rank}.safetensors")
    except Exception:
        run._abandon()
        run.close()
        raise


def read(folder: Path, rank: int = 0) -> dict[str, Tensor]:
    return load_file(folder / f"{rank}.safetensors")
