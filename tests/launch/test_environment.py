"""Process info from the environment of any launcher; contradicting variables are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from manyhands.core import ProcessInfo
from manyhands.errors import LaunchError
from manyhands.launch.environment import (
    ServedBy,
    own_address,
    process_info,
    served,
    store,
)

HOST = {"MANYHANDS_HOST": "here"}
TORCHRUN = {**HOST, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (HOST, ProcessInfo(0, 1, 0, 1, "here", "alone")),
        (TORCHRUN, ProcessInfo(5, 8, 1, 4, "here", "torchrun")),
        ({**TORCHRUN, "MANYHANDS_WORKER": "1"}, ProcessInfo(5, 8, 1, 4, "here", "manyhands")),
        ({**HOST, "RANK": "1", "WORLD_SIZE": "2"}, ProcessInfo(1, 2, 1, 2, "here", "torchrun")),
        (
            {
                **HOST,
                "SLURM_PROCID": "3",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "1",
                "SLURM_NTASKS_PER_NODE": "2",
            },
            ProcessInfo(3, 4, 1, 2, "here", "slurm"),
        ),
        (
            {**HOST, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            ProcessInfo(0, 1, 0, 1, "here", "alone"),
        ),
        (
            {
                **HOST,
                **{
                    f"OMPI_COMM_WORLD_{k}": v
                    for k, v in {
                        "RANK": "2",
                        "SIZE": "4",
                        "LOCAL_RANK": "0",
                        "LOCAL_SIZE": "2",
                    }.items()
                },
            },
            ProcessInfo(2, 4, 0, 2, "here", "mpi"),
        ),
    ],
)
def test_every_launcher_is_understood(env: dict[str, str], expected: ProcessInfo) -> None:
    assert process_info(env) == expected


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "RANK=2 and WORLD_SIZE=2 contradict each other: 0 <= RANK < WORLD_SIZE is needed",
        ),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "contradict"),
        (
            {"RANK": "one", "WORLD_SIZE": "2"},
            "RANK='one', but a whole number is needed; "
            "the program that started this process must set it",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_LOCALID=None, but a whole number is needed",
        ),
    ],
)
def test_variables_that_cannot_be_are_refused(env: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        process_info(env)


def test_alone_no_port_is_opened_and_with_others_the_rendezvous_must_be_named() -> None:
    assert isinstance(store(ProcessInfo(), 1.0, {}), dist.HashStore)
    with pytest.raises(
        LaunchError,
        match="rank 1 of 2 was started by slurm without MASTER_ADDR and MASTER_PORT; set them",
    ):
        store(ProcessInfo(1, 2, started_by="slurm"), 1.0, {})


def test_a_rendezvous_that_nobody_hosts_is_said_within_its_timeout() -> None:
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free.port
    del free
    with pytest.raises(
        LaunchError, match=f"rank 1 cannot reach the rendezvous at 127.0.0.1:{port}"
    ):
        store(
            ProcessInfo(1, 2, started_by="torchrun"),
            0.3,
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )


def test_ranks_meet_in_a_store_of_their_own_that_a_restart_does_not_share() -> None:
    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(hosted.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    one, two = (store(ProcessInfo(r, 2, started_by="torchrun"), 5.0, env) for r in range(2))
    one.set("key", "value")
    assert two.get("key") == b"value"
    again = store(
        ProcessInfo(0, 2, started_by="torchrun"), 5.0, {**env, "TORCHELASTIC_RESTART_COUNT": "1"}
    )
    assert not again.check(["key"])


# -- parameter servers started by hand --

ROOT = {"DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9400"}


def test_what_ps_lite_sets_is_understood(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    counts = {
        "DMLC_NUM_WORKER": "4",
        "DMLC_NUM_SERVER": "2",
        "DMLC_INTERFACE": "eth1",
        "DMLC_NODE_HOST": "10.0.0.7",
    }
    env = {
        **ROOT,
        **counts,
        "DMLC_ROLE": "scheduler",
        "MANYHANDS_TOKEN_FILE": str(tmp_path / "token"),
    }
    assert served(env) == ServedBy(
        "scheduler", "10.0.0.1", 9400, 4, 2, "eth1", "10.0.0.7", "", str(tmp_path / "token")
    )
    assert served(env).secret() == "secret"
    assert served(env).coordinator == "10.0.0.1:9400"
    assert served({**ROOT, "DMLC_PS_ROOT_URI": "fd00::1"}).coordinator == "[fd00::1]:9400"
    assert (
        served({**env, "DMLC_ROLE": "coordinator", "MANYHANDS_TOKEN": "another"}).role
        == "scheduler"
    )
    assert served({**env, "MANYHANDS_TOKEN": "another"}).secret() == "another"
    assert served({}) == ServedBy() and served({}).coordinator == ""


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"DMLC_ROLE": "boss"}, "DMLC_ROLE=boss; needed: worker, server or scheduler"),
        (
            {"DMLC_PS_ROOT_URI": "10.0.0.1"},
            "DMLC_PS_ROOT_URI=10.0.0.1 without DMLC_PS_ROOT_PORT; set it",
        ),
        (
            {**ROOT, "DMLC_PS_ROOT_PORT": "http"},
            "DMLC_PS_ROOT_PORT='http', but a whole number is needed",
        ),
        ({**ROOT, "DMLC_PS_ROOT_PORT": "70000"}, "DMLC_PS_ROOT_PORT=70000; needed: 1 to 65535"),
        ({"DMLC_NUM_WORKER": "0"}, "DMLC_NUM_WORKER=0; needed: 1 or more"),
        ({"DMLC_NUM_SERVER": "-2"}, "DMLC_NUM_SERVER=-2; needed: 1 or more"),
    ],
)
def test_variables_of_servers_that_cannot_be_are_refused(env: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        served(env)


def test_a_token_file_that_is_empty_or_not_there_is_no_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(LaunchError, match="is empty; needed: a file with the token"):
        served({"MANYHANDS_TOKEN_FILE": str(tmp_path / "token")}).secret()
    with pytest.raises(LaunchError, match="MANYHANDS_TOKEN_FILE=/nowhere/token cannot be read"):
        served({"MANYHANDS_TOKEN_FILE": "/nowhere/token"}).secret()
    assert served({}).secret() == ""


def test_the_own_address_is_that_of_the_card_on_the_way_to_the_rendezvous() -> None:
    assert own_address({"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    assert own_address({"DMLC_PS_ROOT_URI": "127.0.0.1"}) == "127.0.0.1"
    assert own_address({"DMLC_NODE_HOST": "10.1.2.3", "MASTER_ADDR": "127.0.0.1"}) == "10.1.2.3"
    assert own_address({}) == "127.0.0.1"
    with pytest.raises(LaunchError, match=r"there is no way from here to nowhere\.invalid"):
        own_address({"MASTER_ADDR": "nowhere.invalid"})
