"""Weights & Biases logger: a wandb run with the plan as its config and all numbers by step.

Without an account (no WANDB_API_KEY, no entry in .netrc) or a network it is written offline, below
the run directory; `wandb sync` uploads it later. WANDB_MODE, WANDB_PROJECT and the like hold.
"""

from __future__ import annotations

import netrc
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.observe.events import say
from manyhands.observe.loggers.scalar_sink import keep, recall
from manyhands.observe.loggers.scalars import LoggedPoint

CONNECT_S = 20.0  # beyond which a run is written offline


class WandbRun:
    """Weights & Biases logger. `project`: the name of the run's script, unless WANDB_PROJECT says
    another."""

    def __init__(self, directory: Path, project: str, env: Mapping[str, str]):
        self._directory, self._project, self._env = Path(directory), project, env
        self._run: Any = None

    def begin(self, config: dict[str, Any]) -> None:
        import wandb

        given = {
            "project": self._env.get("WANDB_PROJECT") or self._project,
            "name": self._env.get("WANDB_NAME") or self._directory.name,
            "id": recall(self._directory, "wandb").get("id") or secrets.token_hex(4),
            "resume": "allow",
            "dir": str(self._directory),
            "config": config,
        }
        mode = self._mode(wandb.Settings().base_url)
        try:
            self._run = wandb.init(mode=mode, settings=_quiet(wandb), **given)
        except Exception as e:
            if mode == "offline":
                raise
            said = " ".join(str(e).split())
            say(f"log=wandb: no connection ({said:.200}); written offline, `wandb sync` uploads it")
            given["id"] = secrets.token_hex(4)  # the other one counts as in use
            self._run = wandb.init(mode="offline", settings=_quiet(wandb), **given)
        keep(self._directory, "wandb", {"id": str(given["id"])})
        # numbers that a resumed run repeats come at steps that were before
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, point: LoggedPoint) -> None:
        epoch = {} if point.epoch is None else {"epoch": point.epoch}
        self._run.log({"step": point.step, **epoch, **point.values})

    def end(self, finished: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if finished else 1)

    def _mode(self, url: str) -> Any:
        if mode := self._env.get("WANDB_MODE"):
            return mode
        return "online" if self._env.get("WANDB_API_KEY") or self._has_login(url) else "offline"

    def _has_login(self, url: str) -> bool:
        host = url.split("//")[-1].split("/")[0]
        try:
            return netrc.netrc(self._env.get("NETRC")).authenticators(host) is not None
        except (OSError, netrc.NetrcParseError):
            return False


def _quiet(wandb: Any) -> Any:
    """Settings under which it leaves the terminal alone."""
    return wandb.Settings(console="off", silent=True, init_timeout=CONNECT_S)
