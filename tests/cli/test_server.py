"""`manyhands server`: options win over the environment; a token is needed beyond this host."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from manyhands.cli.server import (
    Given,
    card_address,
    parse_bytes,
    settle,
)
from manyhands.errors import LaunchError
from manyhands.launch.environment import ServedBy

ROOT = ServedBy(uri="127.0.0.1", port=9400, num_workers=4, num_servers=2, token="t" * 32)


def of(role: str, found: ServedBy = ROOT) -> ServedBy:
    return ServedBy(**{**vars(found), "role": role})


def test_without_anything_it_is_one_server_of_this_machine_that_coordinates_itself() -> None:
    settings = settle(Given(), ServedBy())
    assert (settings.role, settings.bind, settings.port, settings.coordinator) == (
        "server",
        "127.0.0.1",
        0,
        None,
    )
    assert (settings.servers, settings.shards, settings.workers, settings.memory_bytes) == (
        1,
        1,
        None,
        None,
    )
    assert (
        settings.token_file is not None
        and settings.token_file.read_text().strip() == settings.token
    )
    assert stat.S_IMODE(settings.token_file.stat().st_mode) == 0o600 and settings.temporary
    settings.token_file.unlink()


def test_the_roles_of_ps_lite() -> None:
    scheduler = settle(Given(), of("scheduler"))
    assert (scheduler.role, scheduler.bind, scheduler.port, scheduler.coordinator) == (
        "coordinator",
        "127.0.0.1",
        9400,
        None,
    )
    assert (scheduler.workers, scheduler.servers, scheduler.token, scheduler.token_file) == (
        4,
        2,
        "t" * 32,
        None,
    )
    server = settle(Given(), of("server"))
    assert (server.role, server.bind, server.port, server.coordinator) == (
        "server",
        "127.0.0.1",
        0,
        "127.0.0.1:9400",
    )


def test_a_server_that_is_kept_leaves_the_number_of_workers_to_its_runs() -> None:
    settings = settle(Given(keep=True), of("scheduler"))
    assert settings.keep and settings.workers is None and not settle(Given(), of("server")).keep
    with pytest.raises(LaunchError, match="leave --workers out"):
        settle(Given(keep=True, workers=2), of("scheduler"))
    with pytest.raises(LaunchError, match=r"--keep is for the coordinator, at 127\.0\.0\.1:9400"):
        settle(Given(keep=True), of("server"))


def test_what_is_said_beats_the_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("said\n")
    given = Given(
        role="server",
        coordinator="10.9.9.9:7",
        bind="0.0.0.0",
        port=5,
        workers=9,
        token_file=tmp_path / "token",
    )
    settings = settle(given, of("scheduler"))
    assert (settings.role, settings.coordinator, settings.bind, settings.port) == (
        "server",
        "10.9.9.9:7",
        "0.0.0.0",
        5,
    )
    assert (settings.workers, settings.servers, settings.token) == (9, 2, "said")


def test_a_token_file_that_does_not_exist_is_made_for_this_user_alone(tmp_path: Path) -> None:
    made = settle(Given(bind="0.0.0.0", token_file=tmp_path / "new"), ServedBy())
    assert (tmp_path / "new").read_text().strip() == made.token and len(made.token) == 64
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    again = settle(Given(bind="0.0.0.0"), ServedBy(token_file=str(tmp_path / "new")))
    assert (again.token, again.temporary) == (made.token, False)
    other = settle(
        Given(),
        ServedBy(role="scheduler", uri="10.0.0.1", port=9400, token_file=str(tmp_path / "other")),
    )
    assert (tmp_path / "other").read_text().strip() == other.token != made.token


@pytest.mark.parametrize(
    ("given", "found", "says"),
    [
        (
            Given(),
            of("worker"),
            "a worker is the training script, not a server: start that one .* at 127.0.0.1:9400",
        ),
        (Given(role="boss"), ServedBy(), "--role boss; needed: server or coordinator"),
        (
            Given(bind="0.0.0.0"),
            ServedBy(),
            "listening at 0.0.0.0 without a token would let everybody",
        ),
        (Given(bind="::"), ServedBy(), "listening at :: without a token"),
        (
            Given(),
            ServedBy(role="scheduler", uri="10.0.0.1", port=1),
            "listening at 10.0.0.1 without a token",
        ),
        (
            Given(coordinator="127.0.0.1:9400"),
            ServedBy(),
            "a server that joins others needs their token",
        ),
        (
            Given(coordinator="127.0.0.1:1", token_file=Path("nowhere")),
            ServedBy(),
            "--token-file=nowhere cannot be read",
        ),
        (Given(coordinator="9400"), ROOT, "--coordinator 9400; needed: HOST:PORT"),
        (Given(coordinator="host:http"), ROOT, "--coordinator host:http; needed: HOST:PORT"),
        (Given(role="coordinator", coordinator="a:1"), ROOT, "--coordinator a:1 is for servers"),
        (Given(servers=2), ServedBy(), "2 servers, but this one was given no coordinator"),
        (
            Given(tls_cert=Path("cert.pem")),
            ROOT,
            "TLS needs both: --tls-cert FILE and --tls-key FILE",
        ),
        (Given(tls_ca=Path("nowhere.pem")), ROOT, "--tls-ca nowhere.pem: there is no such file"),
        (Given(memory="8"), ROOT, "--memory 8; needed: 1MiB or more"),
        (
            Given(memory="much"),
            ROOT,
            "--memory much; needed: a number of bytes with a unit, e.g. 512MiB",
        ),
        (
            Given(token_file=Path("/nowhere/token")),
            ServedBy(),
            "--token-file /nowhere/token cannot be made",
        ),
    ],
)
def test_what_cannot_be_is_refused(given: Given, found: ServedBy, says: str) -> None:
    given = Given(**{"servers": 1, **{k: v for k, v in vars(given).items() if v is not None}})
    with pytest.raises(LaunchError, match=says):
        settle(given, found)


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_bytes("--memory", t) for t in ("8GiB", "1.5 mib", "2GB", "1048576")] == [
        8 << 30,
        3 << 19,
        2 * 10**9,
        1 << 20,
    ]


def test_a_network_card_has_its_address_and_one_that_is_not_there_is_named() -> None:
    assert card_address("lo") == "127.0.0.1"
    with pytest.raises(
        LaunchError, match=r"DMLC_INTERFACE=nope0 has no address .*; cards here: .*lo"
    ):
        card_address("nope0")
