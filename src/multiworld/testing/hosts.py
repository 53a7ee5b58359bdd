"""Emulated hosts and their network on one machine, with faults on demand.

Every host is a network namespace with its own interface on a bridge. The bridge is in
another namespace, so the machine's own network stays untouched. A process runs on a
host with ``ProcessFleet.start(..., host=host)`` or ``Host.command``::

    async with Hosts(3) as hosts, ProcessFleet() as fleet:
        child = fleet.start(body, f"tcp://{hosts[0].address}:29500", host=hosts[1])
        hosts[1].cut()          # drops all packets; no process is notified
        hosts[1].restore()
        hosts[1].cut_towards(hosts[0])   # in one direction only
        hosts[2].remove()       # power failure: its peers receive nothing more

This needs root and the ``ip`` command; ``unavailable()`` returns what is missing.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

COMMAND_S = 10.0
"""Maximum seconds for one network command."""

CLONE_NEWNET = 0x40000000
"""Flag of ``setns`` for a network namespace, from ``linux/sched.h``."""

NOWHERE = "02:00:00:00:00:01"
"""A hardware address that no interface has: packets to it are lost silently."""

BRIDGE = "bridge"
"""Name of the bridge in its namespace."""

_numbers = itertools.count(1)


class HostError(RuntimeError):
    """A network command failed."""


def _run(*command: str, may_fail: bool = False) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    if done.returncode and not may_fail:
        raise HostError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def unavailable() -> str | None:
    """Return the reason why this machine cannot emulate hosts, or None if it can."""
    if shutil.which("ip") is None:
        return "the command 'ip' is not installed; install the package iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root; run the tests as root"
    try:
        with Hosts(2):
            return None
    except (HostError, OSError, subprocess.TimeoutExpired) as error:
        return f"this machine does not allow network namespaces: {error}"


def enter_namespace(name: str) -> None:
    """Move the calling thread, and what it starts later, into a network namespace.

    Args:
        name: Name of the namespace, as ``Host.namespace``.

    Raises:
        OSError: The namespace cannot be entered.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter namespace {name}: {os.strerror(error)}")


class Host:
    """One emulated host of ``Hosts``; methods raise ``HostError`` if a command fails.

    Attributes:
        address: IPv4 address on the network of its ``Hosts``.
        namespace: Name of its network namespace.
    """

    def __init__(self, address: str, namespace: str, switch: str, port: str) -> None:
        self.address, self.namespace = address, namespace
        self._switch, self._port = switch, port

    def __repr__(self) -> str:
        return f"<Host {self.address} ({self.namespace})>"

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs ``command`` on this host.

        Args:
            command: Program and arguments.
        """
        return ["ip", "netns", "exec", self.namespace, *command]

    def processes(self) -> list[int]:
        """Return the ids of the processes that run on this host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]

    # Faults.

    def cut(self) -> None:
        """Drop all packets from and to this host, without notifying it.

        The link stays up: a lost carrier would notify the host, and restoring it would
        take longer, because the kernel checks carriers once a second.
        """
        self._plug("nomaster")

    def restore(self) -> None:
        """Undo ``cut``, ``cut_towards`` and ``throttle``."""
        _run("ip", "-n", self.namespace, "neigh", "flush", "nud", "permanent")
        device = ("dev", "eth0", "root")
        _run("tc", "-n", self.namespace, "qdisc", "del", *device, may_fail=True)
        self._plug("master", BRIDGE)

    def cut_towards(self, other: Host) -> None:
        """Drop packets from this host to another; the other direction still works.

        Args:
            other: Host that no longer receives from this one.
        """
        wrong = ("lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
        _run("ip", "-n", self.namespace, "neigh", "replace", other.address, *wrong)

    def throttle(self, bits_per_s: int) -> None:
        """Limit the rate at which this host sends.

        Args:
            bits_per_s: Maximum bits per second; ``restore`` removes the limit.
        """
        shape = ("rate", str(bits_per_s), "burst", "16kb", "latency", "100ms")
        device = ("dev", "eth0", "root")
        _run("tc", "-n", self.namespace, "qdisc", "replace", *device, "tbf", *shape)

    def remove(self) -> None:
        """Cut the host off and kill all its processes, like a power failure."""
        self.cut()
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _plug(self, *where: str) -> None:
        _run("ip", "-n", self._switch, "link", "set", "dev", self._port, *where)


class Hosts:
    """Context manager for a network of hosts; it removes the network at its end.

    Entering raises ``HostError`` where the machine forbids it; see ``unavailable``.

    Args:
        count: Number of hosts, up to 200.
        subnet: First three numbers of the IPv4 addresses; not visible from outside.
    """

    def __init__(self, count: int, *, subnet: str = "10.77.0") -> None:
        self._count, self._subnet = count, subnet
        self._prefix = f"mw{os.getpid()}-{next(_numbers)}"
        self._hosts: list[Host] = []

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._take_down()

    async def __aenter__(self) -> Hosts:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self._take_down()

    def _make(self) -> None:
        switch = f"{self._prefix}-switch"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", BRIDGE, "up")
        for number in range(self._count):
            self._hosts.append(self._add(switch, number))

    def _add(self, switch: str, number: int) -> Host:
        name, port = f"{self._prefix}-{number}", f"port{number}"
        address = f"{self._subnet}.{number + 1}"
        _run("ip", "netns", "add", name)
        ends = ("type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "-n", switch, "link", "add", port, *ends)
        _run("ip", "-n", switch, "link", "set", port, "master", BRIDGE, "up")
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        return Host(address, name, switch, port)

    def _take_down(self) -> None:
        for name in self._namespaces():
            _run("ip", "netns", "del", name, may_fail=True)
        self._hosts.clear()

    def _namespaces(self) -> list[str]:
        where = Path("/run/netns")
        if not where.is_dir():
            return []
        ours = f"{self._prefix}-"
        return [entry.name for entry in where.iterdir() if entry.name.startswith(ours)]
