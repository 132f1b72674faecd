"""`manyhands lab --hosts 2 --rate 1gbit -- run script.py data=2`: run on simulated hosts."""

from __future__ import annotations

from manyhands.launch import lab as labs


def lab(
    hosts: int, rate: str | None, delay: str | None, loss: str | None, command: list[str]
) -> int:
    return labs.run(labs.parse(hosts, rate, delay, loss), command)
