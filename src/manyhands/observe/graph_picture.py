"""Picture of a graph partitioned over ranks: a lane and a colour for each rank, time downwards.

Boxes are nodes, darker where they take more of the time. Thin lines stay on a rank; thick lines
cross from rank to rank and are labelled with the bytes of one micro-batch. A box is below all its
inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path

from manyhands.observe.curves import INK, MUTED
from manyhands.observe.race.picture import COLORS
from manyhands.split.graph import GraphNode

WIDE, HIGH, GAP, ROW, HEAD = 128, 22, 12, 44, 64
LETTERS = 19  # of a name in its box
MOST = 400  # boxes; in larger graphs a chain of nodes on one rank is one box


def draw(nodes: Sequence[GraphNode], where: Sequence[int], out: Path, title: str = "") -> Path:
    out.write_text(svg(nodes, where, title), encoding="utf-8")
    return out


def svg(nodes: Sequence[GraphNode], where: Sequence[int], title: str = "") -> str:
    """The SVG text; `where` is the rank of each node."""
    if len(nodes) > MOST:
        nodes, where = _runs(nodes, where)
    ranks = max(where, default=0) + 1
    row: list[int] = []
    for n in nodes:
        row.append(1 + max((row[t] for t in n.inputs), default=-1))
    cells: dict[tuple[int, int], list[int]] = defaultdict(list)  # (rank, row) -> nodes side by side
    for u in range(len(nodes)):
        cells[where[u], row[u]].append(u)
    across = [
        max((len(some) for (rank, _), some in cells.items() if rank == r), default=1)
        for r in range(ranks)
    ]
    left = [GAP]
    for count in across:
        left.append(left[-1] + count * (WIDE + GAP) + 3 * GAP)
    at: dict[int, tuple[float, float]] = {}
    for (rank, line), some in cells.items():
        start = left[rank] + GAP + (across[rank] - len(some)) * (WIDE + GAP) / 2
        for i, u in enumerate(some):
            at[u] = start + i * (WIDE + GAP), HEAD + line * ROW
    width, height = left[-1], HEAD + (max(row, default=0) + 1) * ROW
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{GAP}" y="20" font-size="14" font-weight="bold" fill="{INK}">'
        f"{escape(title)}</text>",
    ]
    total = sum(n.seconds for n in nodes) or 1.0
    for r in range(ranks):
        share = sum(n.seconds for n, rank in zip(nodes, where, strict=True) if rank == r) / total
        color, lane = COLORS[r % len(COLORS)], left[r + 1] - left[r] - GAP
        made.append(
            f'<rect x="{left[r]}" y="30" width="{lane}" height="{height - 36}" rx="6" '
            f'fill="{color}" fill-opacity="0.06"/>'
            f'<text x="{left[r] + GAP}" y="48" font-size="12" font-weight="bold" fill="{color}">'
            f"rank {r} · {share:.0%} of the work</text>"
        )
    lines, labels = _lines(nodes, where, at)
    made += lines
    most = max((n.seconds for n in nodes), default=0.0) or 1.0
    for u, n in enumerate(nodes):
        (x, y), color = at[u], COLORS[where[u] % len(COLORS)]
        name = n.name if len(n.name) <= LETTERS else f"{n.name[: LETTERS - 1]}…"
        made.append(
            f'<g class="node"><title>{escape(n.name)}: {n.seconds * 1e3:.3f} ms, '
            f"{_bytes(n.output_bytes)}</title>"
            f'<rect x="{x:g}" y="{y:g}" width="{WIDE}" height="{HIGH}" rx="4" fill="white" '
            f'stroke="{color}"/>'
            f'<rect x="{x:g}" y="{y:g}" width="{WIDE}" height="{HIGH}" rx="4" fill="{color}" '
            f'fill-opacity="{0.08 + 0.42 * n.seconds / most:.2f}"/>'
            f'<text x="{x + WIDE / 2:g}" y="{y + 15:g}" text-anchor="middle" fill="{INK}">'
            f"{escape(name)}</text></g>"
        )
    return "\n".join([*made, *labels, "</svg>\n"])


def _lines(
    nodes: Sequence[GraphNode], where: Sequence[int], at: dict[int, tuple[float, float]]
) -> tuple[list[str], list[str]]:
    lines, labels = [], []
    said: set[tuple[int, int]] = set()  # a value is sent to a rank once
    for u, n in enumerate(nodes):
        for t in n.inputs:
            (x0, y0), (x1, y1) = at[t], at[u]
            x0, y0, x1 = x0 + WIDE / 2, y0 + HIGH, x1 + WIDE / 2
            bend = max(14.0, (y1 - y0) / 2)
            path = f"M{x0:g},{y0:g} C{x0:g},{y0 + bend:g} {x1:g},{y1 - bend:g} {x1:g},{y1:g}"
            if where[t] == where[u]:
                lines.append(f'<path class="local" d="{path}" fill="none" stroke="#d1d5db"/>')
                continue
            color = COLORS[where[t] % len(COLORS)]
            lines.append(
                f'<path class="cut" d="{path}" fill="none" stroke="{color}" stroke-width="2.2"/>'
            )
            if (t, where[u]) in said:
                continue
            said.add((t, where[u]))
            x, y = (x0 + x1) / 2, (y0 + y1) / 2 + 3
            labels.append(
                f'<text class="crossing" x="{x:g}" y="{y:g}" text-anchor="middle" fill="{MUTED}" '
                'stroke="white" stroke-width="3" paint-order="stroke">'
                f"{_bytes(nodes[t].output_bytes)}</text>"
            )
    return lines, labels


def _runs(nodes: Sequence[GraphNode], where: Sequence[int]) -> tuple[list[GraphNode], list[int]]:
    """The graph with each chain of nodes on one rank, without other inputs, as one node."""
    of: list[int] = []
    made: list[list[int]] = []
    for u, n in enumerate(nodes):
        last = made[-1] if made else []
        if last and where[last[-1]] == where[u] and set(n.inputs) & set(last):
            last.append(u)
        else:
            made.append([u])
        of.append(len(made) - 1)
    whole = []
    for r, some in enumerate(made):
        takes = tuple(sorted({of[t] for u in some for t in nodes[u].inputs} - {r}))
        name = nodes[some[0]].name + (f" … {nodes[some[-1]].name}" if len(some) > 1 else "")
        whole.append(
            GraphNode(
                name, sum(nodes[u].seconds for u in some), takes, nodes[some[-1]].output_bytes
            )
        )
    return whole, [where[some[0]] for some in made]


def _bytes(nbytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"
