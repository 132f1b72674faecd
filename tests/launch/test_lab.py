"""Labs: options are parsed or refused before anything is made; ranks are spread over hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from manyhands.errors import LaunchError, PlanError
from manyhands.launch import environment, lab, namespaces
from manyhands.launch.hosts import HERE, Host, HostsLauncher, assign_ranks
from manyhands.launch.lab import launcher


@pytest.mark.parametrize(
    ("rate", "bits"),
    [
        ("200mbit", 200e6),
        ("1gbit", 1e9),
        ("10Gbit", 10e9),
        ("1.5gbit", 1.5e9),
        (" 512 kbit ", 512e3),
        (None, None),
    ],
)
def test_rates_are_numbers_with_a_unit(rate: str | None, bits: float | None) -> None:
    assert lab.parse(2, rate, None, None).rate_bits == bits


def test_delays_and_losses_have_units_too() -> None:
    assert lab.parse(2, None, "5ms", "0.1%") == lab.Lab(2, None, 0.005, 0.001)
    assert lab.parse(3, "1.5gbit", "500us", "2%").__str__() == (
        "3 hosts, each on a link of 1.5gbit, 500us away, 0.02 of all packets lost"
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            (2, "fast", None, None),
            "--rate fast; needed: a number with kbit or mbit or gbit, e.g. 200mbit, 1gbit or "
            "1.5gbit",
        ),
        ((2, "1000", None, None), "--rate 1000; needed: a number with"),
        ((2, "1gb", None, None), "--rate 1gb; needed: a number with"),
        ((2, "-1gbit", None, None), "--rate -1gbit; needed: a number with"),
        ((2, "0gbit", None, None), "--rate 0gbit; needed: 100kbit to 1000gbit"),
        ((2, None, "5", None), "--delay 5; needed: a number with us or ms or s, e.g. 500us or 5ms"),
        ((2, None, "1000s", None), "--delay 1000s; needed: 0us to 10s"),
        ((2, None, None, "0.1"), "--loss 0.1; needed: a number with %, e.g. 0.1% or 2%"),
        ((2, None, None, "100%"), "--loss 100%; needed: 0% to 99%"),
        ((0, None, None, None), "--hosts 0; needed: 1 to 200"),
        ((201, None, None, None), "--hosts 201; needed: 1 to 200"),
    ],
)
def test_what_cannot_be_a_lab_is_refused_with_what_can(
    given: tuple[int, str | None, str | None, str | None], says: str
) -> None:
    with pytest.raises(PlanError) as refused:
        lab.parse(*given)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("command", "says"),
    [([], "no command for the lab"), (["lab", "--hosts", "2"], "a lab in a lab")],
)
def test_a_lab_needs_a_command_that_is_no_lab(command: list[str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        lab.run(lab.Lab(2), command)


def test_a_machine_without_the_tools_is_told_what_to_install() -> None:
    with pytest.raises(
        LaunchError,
        match=r"needs the commands ip, tc, unshare, nsenter, setpriv, .* install iproute2 and "
        r"util-linux",
    ):
        namespaces.rights({"PATH": "/nowhere"})


def test_a_user_without_rights_is_told_why_and_what_to_do(tmp_path: Path) -> None:
    for tool in namespaces.TOOLS:
        (tmp_path / tool).write_text(
            "#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n"
        )
        (tmp_path / tool).chmod(0o755)
    with pytest.raises(LaunchError) as refused:
        namespaces.rights({"PATH": f"{tmp_path}:{os.defpath}"})
    text = str(refused.value)
    assert (
        "unshare --net: unshare failed: Operation not permitted; unshare --user --map-root-user "
        "--net:" in text
    )
    assert "run as root, or allow user namespaces" in text


# -- who sits where --


@pytest.mark.parametrize(
    ("size", "hosts", "expected"),
    [
        (4, 2, [("a", 0, 2), ("a", 1, 2), ("b", 0, 2), ("b", 1, 2)]),
        (2, 2, [("a", 0, 1), ("b", 0, 1)]),
        (5, 2, [("a", 0, 3), ("a", 1, 3), ("a", 2, 3), ("b", 0, 2), ("b", 1, 2)]),
        (2, 3, [("a", 0, 1), ("b", 0, 1)]),
        (3, 1, [("a", 0, 3), ("a", 1, 3), ("a", 2, 3)]),
    ],
)
def test_ranks_are_counted_from_host_to_host_as_evenly_as_can_be(
    size: int, hosts: int, expected: list[tuple[str, int, int]]
) -> None:
    found = assign_ranks(size, [Host(name) for name in "abc"[:hosts]])
    assert [s.rank for s in found] == list(range(size))
    assert [(s.host.name, s.local_rank, s.local_size) for s in found] == expected


def test_the_environment_says_where_jobs_start() -> None:
    assert launcher({}).hosts == (HERE,)
    hosts = [
        {
            "name": "one",
            "enter": ["nsenter", "--net=x", "--"],
            "variables": {"GLOO_SOCKET_IFNAME": "lab0"},
        }
    ]
    chosen = launcher({environment.LAB: json.dumps({"address": "10.77.0.1", "hosts": hosts})})
    assert isinstance(chosen, HostsLauncher) and chosen.address == "10.77.0.1"
    assert chosen.hosts == (
        Host("one", ("nsenter", "--net=x", "--"), {"GLOO_SOCKET_IFNAME": "lab0"}),
    )


@pytest.mark.parametrize("described", ["yes", "[]", '{"hosts": [{}], "address": ""}'])
def test_a_lab_that_no_lab_wrote_is_refused(described: str) -> None:
    with pytest.raises(LaunchError, match="MANYHANDS_LAB is set to what no lab wrote"):
        launcher({environment.LAB: described})
