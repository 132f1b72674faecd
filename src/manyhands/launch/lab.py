"""Lab: several hosts on one Linux machine, made of network namespaces with links of limited rate.

    host1 --- lab0 ==== host1 --+
                                +-- bridge `lab`, in the namespace where the command runs, which
    host2 --- lab0 ==== host2 --+   reaches all hosts without a limit

    ====   a veth pair; a token bucket (tbf) at each end limits it to `rate` in either direction.
           A host's outgoing packets have delay and loss (netem), so a message between two hosts
           meets them once.

Bridge, cards and addresses are all in namespaces of the lab: two labs do not interfere, no address
can be taken, and the machine's own network is neither reached nor changed. The command finds its
hosts in the environment and starts processes on them as on real ones; memory is shared only
inside a host, because ranks compare host names.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from manyhands.errors import LaunchError, PlanError
from manyhands.launch import environment, namespaces
from manyhands.launch.hosts import Host, HostsLauncher
from manyhands.launch.namespaces import Namespace, Rights

CARD = "lab0"  # in every host
BRIDGE = "lab"
NETWORK = "10.77.0"  # the lab has a network of its own, so any private range is free
MOST_HOSTS = 200
# a bucket holds what passes in 2 ms, and at least two of the kernel's 64 KiB packets
BURST_S, SMALLEST_BURST_BYTES = 0.002, 128 * 1024
QUEUE_S = 0.05  # packets that wait longer are dropped, as in a switch with little memory
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
VERBS = [
    sys.executable,
    "-c",
    "import sys; from manyhands.cli import main; sys.argv[0] = 'manyhands'; main()",
]


@dataclass(frozen=True)
class Lab:
    hosts: int
    # per second, of each host's link, in each direction; None: no limit
    rate_bits: float | None = None
    delay_s: float = 0.0
    loss: float = 0.0  # share of packets

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise PlanError(f"--hosts {self.hosts}; needed: 1 to {MOST_HOSTS}")

    def __str__(self) -> str:
        rate = "without limit" if self.rate_bits is None else f"of {_spelled(self.rate_bits, BITS)}"
        slow = f", {_spelled(self.delay_s, SECONDS)} away" if self.delay_s else ""
        lossy = f", {self.loss:.6g} of all packets lost" if self.loss else ""
        return f"{self.hosts} host{'s' * (self.hosts > 1)}, each on a link {rate}{slow}{lossy}"


def parse(hosts: int, rate: str | None, delay: str | None, loss: str | None) -> Lab:
    return Lab(
        hosts,
        None
        if rate is None
        else _number("--rate", rate, BITS, "200mbit, 1gbit or 1.5gbit", least=1e5, most=1e12),
        0.0
        if delay is None
        else _number("--delay", delay, SECONDS, "500us or 5ms", least=0.0, most=10.0),
        0.0
        if loss is None
        else _number("--loss", loss, {"%": 0.01}, "0.1% or 2%", least=0.0, most=0.99),
    )


def run(lab: Lab, command: Sequence[str]) -> int:
    """Run `manyhands COMMAND` in a new lab, remove the lab however that ends, return its exit
    code."""
    if environment.lab():
        raise PlanError(
            "this command already runs in a lab; one lab in another is not needed: "
            "give the outer one all --hosts"
        )
    if not command:
        raise PlanError(
            "no command for the lab; needed after the options, e.g.: "
            "manyhands lab --hosts 2 -- run script.py data=2"
        )
    if command[0] == "lab":
        raise PlanError("a lab in a lab is not needed: give the outer one all --hosts")
    with up(lab) as (switch, env):
        print(f"{'lab':<12}{lab}", file=sys.stderr, flush=True)
        return _run(
            [*switch.enter(), "setpriv", "--pdeathsig", "KILL", "--", *VERBS, *command], env
        )


def launcher(env: Mapping[str, str] | None = None) -> HostsLauncher:
    """The launcher for jobs of this process: on this machine, or on the hosts of the lab it runs
    in."""
    described = environment.lab(env)
    return HostsLauncher(*read(described)) if described else HostsLauncher()


def read(described: str) -> tuple[list[Host], str]:
    """The hosts of the lab in this description, and the address at which they reach this
    process."""
    try:
        known: dict[str, Any] = json.loads(described)
        hosts = [Host(h["name"], tuple(h["enter"]), h["variables"]) for h in known["hosts"]]
        return hosts, known["address"]
    except (ValueError, KeyError, TypeError) as e:
        raise LaunchError(
            f"{environment.LAB} is set to what no lab wrote ({type(e).__name__}: {e}); "
            "unset it, or start with manyhands lab"
        ) from None


@contextlib.contextmanager
def up(lab: Lab) -> Iterator[tuple[Namespace, dict[str, str]]]:
    """A lab for as long as the block runs: the namespace of the bridge, and the environment for
    commands that use the lab."""
    known = environment.variables()
    path = ":".join([known.get("PATH", ""), *namespaces.BESIDES])
    # the lab has no host names, of which torch would warn at every connection
    env = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **known,
        "PATH": path,
        environment.LAB_MAKER: namespaces.mark(),
    }
    namespaces.sweep()  # what a killed lab left
    how = namespaces.rights(env)
    _check_kernel(lab, how, env)
    with contextlib.ExitStack() as stack:
        # last of all: what the command started and did not end
        stack.callback(namespaces.sweep, namespaces.mark())
        switch = namespaces.hold((), how, env)
        stack.callback(switch.close)
        hosts = []
        for _ in range(lab.hosts):
            hosts.append(namespaces.hold(switch.enter(), Rights(("--net",), how.own_users), env))
            stack.callback(hosts[-1].close)
        _connect(lab, switch, hosts, env)
        yield switch, {**env, environment.LAB: _describe(hosts)}


def _describe(hosts: Sequence[Namespace]) -> str:
    known = []
    for i, host in enumerate(hosts, 1):
        variables = {
            # else gloo takes the card that the machine's name resolves to: loopback
            "GLOO_SOCKET_IFNAME": CARD,
            "NCCL_SOCKET_IFNAME": CARD,
            # else nccl sees one machine and does not use the network
            "NCCL_HOSTID": f"host{i}",
            "NCCL_IB_DISABLE": "1",
        }
        known.append(
            {"name": f"host{i}", "enter": host.enter(from_outside=False), "variables": variables}
        )
    return json.dumps({"address": f"{NETWORK}.1", "hosts": known})


# -- the network --


def _check_kernel(lab: Lab, how: Rights, env: Mapping[str, str]) -> None:
    """Raise if this kernel cannot limit links as wanted, before anything is made; it is tried in a
    namespace that ends with the try."""
    wanted = (
        [("token bucket", "tbf", "tbf rate 1mbit burst 2kb latency 50ms")] if lab.rate_bits else []
    )
    wanted += [("delay and loss", "netem", "netem delay 1ms")] if lab.delay_s or lab.loss else []
    for what, kind, line in wanted:
        command = [
            "unshare",
            *how.unshare,
            "tc",
            "qdisc",
            "add",
            "dev",
            "lo",
            "root",
            *line.split(),
        ]
        tried = subprocess.run(command, capture_output=True, text=True, env=env)
        if tried.returncode:
            without = "--delay and --loss" if kind == "netem" else "--rate"
            raise LaunchError(
                f"this kernel has no {what} (sch_{kind}; tc says: {tried.stderr.strip()}); as root "
                f"try modprobe sch_{kind}, or use a kernel built with "
                f"CONFIG_NET_SCH_{kind.upper()}, or leave out {without}"
            )


def _connect(
    lab: Lab, switch: Namespace, hosts: Sequence[Namespace], env: Mapping[str, str]
) -> None:
    # no link-local addresses: gloo might listen there
    lines = [
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"link set {BRIDGE} addrgenmode none",
    ]
    lines += [f"addr add {NETWORK}.1/24 dev {BRIDGE}", f"link set {BRIDGE} up"]
    for i, host in enumerate(hosts, 1):
        lines += [f"link add host{i} type veth peer name {CARD} netns {host.holder.pid}"]
        lines += [f"link set host{i} addrgenmode none", f"link set host{i} master {BRIDGE} up"]
    _each(switch, "ip", lines, env)
    _each(
        switch,
        "tc",
        [
            line
            for i in range(1, len(hosts) + 1)
            for line in _limits(f"host{i}", lab, outwards=False)
        ],
        env,
    )
    for i, host in enumerate(hosts, 1):
        lines = [
            "link set lo up",
            f"link set {CARD} addrgenmode none",
            f"addr add {NETWORK}.{i + 1}/24 dev {CARD}",
        ]
        _each(host, "ip", [*lines, f"link set {CARD} up"], env)
        _each(host, "tc", _limits(CARD, lab, outwards=True), env)


def _limits(card: str, lab: Lab, outwards: bool) -> list[str]:
    """The queues through which `card` sends."""
    lines, parent = [], "root"
    if outwards and (lab.delay_s or lab.loss):
        # room for packets under way: the default of 1000 would lose more than asked for
        netem = f"netem limit 100000 delay {lab.delay_s * 1e6:.0f}us loss {lab.loss:.6%}"
        lines.append(f"qdisc add dev {card} root handle 1: {netem}")
        parent = "parent 1:1"
    if lab.rate_bits is not None:
        burst = max(SMALLEST_BURST_BYTES, lab.rate_bits / 8 * BURST_S)
        queue = f"tbf rate {lab.rate_bits:.0f}bit burst {burst:.0f} latency {QUEUE_S * 1e3:.0f}ms"
        lines.append(f"qdisc add dev {card} {parent} {queue}")
    return lines


def _each(where: Namespace, tool: str, lines: Sequence[str], env: Mapping[str, str]) -> None:
    if not lines:
        return
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(
        [*where.enter(), tool, "-batch", "-"], input=text, capture_output=True, text=True, env=env
    )
    if done.returncode:
        at = re.search(r"Command failed -:(\d+)", done.stderr)
        line = lines[int(at[1]) - 1] if at else lines[0]
        raise LaunchError(
            f"the lab's network could not be made: {tool} {line}: "
            f"{done.stderr.strip().splitlines()[0]}"
        )


# -- the command --


def _run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the command and pass signals on: it is in a session of its own, which Ctrl-C of the
    terminal does not reach."""
    process = subprocess.Popen(command, env=env, start_new_session=True)

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
            process.wait()
    return code if code >= 0 else 128 - code


# -- options --


def _number(
    option: str, given: str, units: Mapping[str, float], examples: str, least: float, most: float
) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z%]+)", given.strip().lower())
    if match is None or match[2] not in units:
        raise PlanError(
            f"{option} {given}; needed: a number with {' or '.join(units)}, e.g. {examples}"
        )
    value = float(match[1]) * units[match[2]]
    if not least <= value <= most:
        bounds = f"{_spelled(least, units)} to {_spelled(most, units)}"
        raise PlanError(f"{option} {given}; needed: {bounds}, e.g. {examples}")
    return value


def _spelled(value: float, units: Mapping[str, float]) -> str:
    unit = max(
        (u for u in units if units[u] <= value), key=lambda u: units[u], default=next(iter(units))
    )
    return f"{value / units[unit]:.10g}{unit}"
