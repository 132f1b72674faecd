"""All-reduce algorithms over gloo's point-to-point messages, against gloo's own all-reduce.

For every length: which algorithm is fastest, and which one the cost model chooses.
Draw the picture again from the figures: python benchmarks/allreduce.py figures.json picture.png
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from common import Claim, cores, median

from manyhands.core import Job
from manyhands.launch.hosts import HostsLauncher

PEER = "gloo"
SIZES = (64, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 25 << 20)
QUICK_SIZES = (64, 8 << 10, 512 << 10, 25 << 20)
# the fastest is as fast as gloo's own, taken over all lengths; the choice of the model is off by a
# quarter at most, or by half
# where ranks share cores, of which it knows nothing
BARS = {"best": 1.0, "choice": 0.8}
CROWDED = 0.5
COLOURS = {
    "star": "#9c755f",
    "tree": "#b07aa1",
    "double_tree": "#f28e2b",
    "butterfly": "#4e79a7",
    "halving_doubling": "#59a14f",
    "ring": "#e15759",
    "binary_blocks": "#76b7b2",
    "hierarchical": "#bab0ac",
}


def body(sizes: tuple[int, ...], quick: bool) -> dict[str, Any]:
    import torch.distributed as dist

    from manyhands.exchange import algorithms, collective
    from manyhands.launch import environment

    here = environment.process_info()
    link = collective.connect(
        here.rank, here.size, dist.PrefixStore("bench", environment.store(here, 60)), "gloo", 60
    )
    measured = algorithms.measure(link)
    options = (
        {"double_tree": {"latency_bytes": measured.alpha / measured.beta}}
        if measured.beta > 0
        else {}
    )
    ways: dict[str, Any] = {PEER: link} | {
        name: algorithms.wrap(link, name, **options.get(name, {})) for name in algorithms.ALGORITHMS
    }
    total = here.size * (here.size + 1) / 2
    found: dict[str, Any] = {"link": measured._asdict(), "sizes": {}}
    for nbytes in sizes:
        x = torch.empty(nbytes // 4)
        times = max(3 if quick else 5, min(5 if quick else 40, int(2e7 / nbytes)))
        seconds = torch.zeros(len(ways), times + 1, dtype=torch.float64)
        for turn in range(times + 1):
            for i, over in enumerate(ways.values()):
                x.fill_(here.rank + 1.0)
                link.all_reduce({"together": torch.zeros(1)}).wait()
                start = time.perf_counter()
                over.all_reduce({"x": x}).wait()
                seconds[i, turn] = time.perf_counter() - start
                assert x[0] == total and x[-1] == total
        link.all_reduce(
            {"seconds": seconds}, "max"
        ).wait()  # an all-reduce is over when the last rank has the sum
        row = {name: median(seconds[i, 1:].tolist()) for i, name in enumerate(ways)}
        predicted = {
            name: algorithms.cost(name, here.size, nbytes, *measured)
            for name in algorithms.ALGORITHMS
        }
        found["sizes"][nbytes] = {
            "seconds": row,
            "predicted": predicted,
            "best": min(predicted, key=lambda name: row[name]),
            "chosen": algorithms.choose(here.size, nbytes, *measured),
        }
    link.all_reduce({"together": torch.zeros(1)}).wait()
    link.close()
    return found


def measure(quick: bool, only: list[str]) -> list[Claim]:
    claims: list[Claim] = []
    for world in [w for w in (2, 4, 8, 16) if w <= max(4, cores())]:
        names = {kind: f"{kind}_of_{world}" for kind in BARS}
        if only and not set(names.values()) & set(only):
            continue
        job = Job(
            world,
            bytes(
                cloudpickle.dumps(functools.partial(body, QUICK_SIZES if quick else SIZES, quick))
            ),
            threads=1,
        )
        found = HostsLauncher().launch(job)
        rows = list(found["sizes"].values())
        table(world, found)
        best = mean(rows, lambda row: row["seconds"][row["best"]])
        chosen = mean(rows, lambda row: row["seconds"][row["chosen"]])
        gloo = mean(rows, lambda row: row["seconds"][PEER])
        # the figures once, with the first claim: the picture is drawn from them
        made = [
            Claim(
                names["best"],
                best * 1e3,
                gloo * 1e3,
                "ms",
                gloo / best,
                BARS["best"],
                {"figures": Quiet(found)},
            ),
            Claim(
                names["choice"],
                chosen * 1e3,
                best * 1e3,
                "ms",
                best / chosen,
                BARS["choice"] if world <= cores() else CROWDED,
            ),
        ]
        claims += [claim for claim in made if not only or claim.name in only]
    return claims


class Quiet(dict[str, Any]):
    """Figures for the file, not for the terminal."""

    def __repr__(self) -> str:
        return f"{len(self['sizes'])} lengths, in the file and the picture"


def mean(rows: list[Any], seconds: Callable[[Any], float]) -> float:
    """Over lengths from bytes to megabytes: geometric."""
    return math.exp(sum(math.log(seconds(row)) for row in rows) / len(rows))


def table(world: int, found: dict[str, Any]) -> None:
    alpha, beta, gamma = found["link"].values()
    print(
        f"\n{world} ranks over gloo: alpha {alpha * 1e6:.0f} us, beta {beta * 1e9:.2f} ns/B, "
        f"gamma {gamma * 1e9:.3f} ns/B"
    )
    print(f"  {'bytes':>8}  {'fastest measured':<26}{'chosen by the model':<34}{'gloo itself':>12}")
    for nbytes, row in found["sizes"].items():
        s, p = row["seconds"], row["predicted"]
        best = f"{row['best']} {s[row['best']] * 1e3:.3f} ms"
        name = row["chosen"]
        chosen = f"{name} {s[name] * 1e3:.3f} ms ({p[name] * 1e3:.3f} predicted)"
        print(f"  {length(int(nbytes)):>8}  {best:<26}{chosen:<44}{s[PEER] * 1e3:>9.3f} ms")


def length(nbytes: int) -> str:
    for unit, step in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= step:
            return f"{nbytes / step:g} {unit}"
    return f"{nbytes} B"


def draw(report: dict[str, Any], path: Path) -> None:
    """For every number of ranks: seconds over bytes, and below who was fastest beside who should
    have been.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    worlds = {
        c["name"].split("_of_")[1]: c["detail"]["figures"]
        for c in report["claims"]
        if "figures" in c.get("detail", {})
    }
    if not worlds:
        return
    figure, axes = plt.subplots(
        2,
        len(worlds),
        figsize=(6.2 * len(worlds), 6.4),
        height_ratios=[4, 1],
        squeeze=False,
        layout="constrained",
    )
    for column, (world, found) in enumerate(worlds.items()):
        lines, strip = axes[0][column], axes[1][column]
        sizes = [int(n) for n in found["sizes"]]
        rows = list(found["sizes"].values())
        for name, colour in COLOURS.items():
            lines.plot(
                sizes,
                [r["seconds"][name] * 1e3 for r in rows],
                color=colour,
                marker="o",
                markersize=3,
                label=name,
            )
            lines.plot(
                sizes,
                [r["predicted"][name] * 1e3 for r in rows],
                color=colour,
                linewidth=0.8,
                linestyle=":",
            )
        lines.plot(
            sizes,
            [r["seconds"][PEER] * 1e3 for r in rows],
            color="black",
            linestyle="--",
            linewidth=2,
            label="gloo's own",
        )
        lines.set(xscale="log", yscale="log", ylabel="milliseconds" if column == 0 else "")
        lines.set_title(f"{world} ranks    (dotted: predicted)", fontsize=11)
        lines.set_xticks(sizes, [length(n) for n in sizes])
        lines.minorticks_off()
        lines.grid(alpha=0.25)
        for y, key in enumerate(("best", "chosen")):
            for x, row in enumerate(rows):
                strip.barh(y, 0.96, left=x - 0.48, height=0.9, color=COLOURS[row[key]])
                words = (
                    row[key].replace("halving_doubling", "halving-\ndoubling").replace("_", "\n")
                )
                strip.text(
                    x,
                    y,
                    words,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white",
                    fontweight="bold",
                )
        strip.set(xlim=(-0.5, len(rows) - 0.5), ylim=(1.5, -0.5))
        strip.set_xticks(range(len(rows)), [length(n) for n in sizes])
        strip.set_yticks([0, 1], ["fastest", "chosen"])
        strip.tick_params(length=0)
        for edge in strip.spines.values():
            edge.set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle(
        f"All-reduce over point to point, {report['machine'].split(',')[0]}, {report['commit']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"  drawn in {path}")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
