"""Old module names: importing one raises an error that says what to import instead.

Only the names that `manyhands` itself exports are public. Modules below it move between versions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# old room or module -> where its content is now
MOVED = {
    "build": "manyhands.assembly",
    "compiling": "manyhands.kernels",
    "compute": "manyhands.data, manyhands.replica, manyhands.parallel and manyhands.embedding",
    "dividing": "manyhands.assembly",
    "exchange.server": "manyhands.server",
    "exchange.wires": "manyhands.exchange.compression",
    "feeding": "manyhands.assembly",
    "forecasting": "manyhands.assembly",
    "loop_data": "manyhands.own_loop",
    "rule": "manyhands.trainer_parts",
    "run": "manyhands.api",
    "serving": "manyhands.assembly",
    "site": "manyhands.assembly",
    "snapshots": "manyhands.assembly",
    "starting": "manyhands.assembly",
}
PUBLIC = "Task, Callback, train, join, load, Embedding, EmbeddingBag, accuracy and the errors"


class OldNames:
    """Import finder that comes after all others and refuses the modules of version 0.1."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        if package == "manyhands" and module in MOVED:
            raise ModuleNotFoundError(
                f"{name} is now {MOVED[module]}, and neither was ever public: import what scripts "
                f"need from manyhands itself ({PUBLIC})",
                name=name,
            )
        return None


def refuse_old_names() -> None:
    if OldNames not in sys.meta_path:
        sys.meta_path.append(OldNames)
