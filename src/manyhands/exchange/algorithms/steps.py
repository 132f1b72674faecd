"""Steps of an all-reduce, printed: what every rank holds after every tick, one tick per message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core import Op
from manyhands.exchange.algorithms import AlgorithmGroup
from manyhands.exchange.inproc import InprocGroup, World

EXAMPLE = ([2, 4, 6], [1, 2, 3], [4, 8, 12])


def steps(name: str, given: Sequence[Sequence[int]] = EXAMPLE, op: Op = "sum") -> str:
    """One line per tick and one column per rank: its vector, and which rank's values it has just
    added (+) or copied (=)."""
    world = World(len(given))
    rows: dict[float, dict[int, str]] = {}
    marks: dict[tuple[float, int], list[str]] = {}

    def main(group: InprocGroup) -> None:
        x = torch.tensor(given[group.rank])

        def watch(rank: int, what: str, values: Tensor) -> None:
            taken = [word.replace("from ", "") for word in what.split(", ") if "from" in word]
            # two messages may arrive in the same tick
            marks.setdefault((world.now[rank], rank), []).extend(taken)
            rows.setdefault(world.now[rank], {})[rank] = " ".join(
                [str(x.tolist()), *marks[world.now[rank], rank]]
            )

        AlgorithmGroup(group, name, watch=watch).all_reduce({"x": x}, op).wait()
        results.append(x.tolist())

    results: list[list[int]] = []
    world.run(main)
    assert all(result == results[0] for result in results), "all ranks end alike"
    lines = [("given", [str(list(v)) for v in given])]
    lines += [
        (f"tick {tick:g}", [row.get(r, "") for r in range(len(given))])
        for tick, row in sorted(rows.items())
    ]
    width = max(len(cell) for _, cells in lines for cell in cells) + 2
    heads = [f"rank {r}" for r in range(len(given))]
    table = [f"{name:<18}" + "".join(f"{h:<{width}}" for h in heads)]
    table += [
        f"{label:<18}" + "".join(f"{cell:<{width}}" for cell in cells) for label, cells in lines
    ]
    return "\n".join(line.rstrip() for line in table)
