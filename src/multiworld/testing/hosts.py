"""Several hosts on one machine, and their network, to break on purpose. Shell.

Every host is a network namespace with an interface of its own on a bridge, which lives
in yet another namespace: nothing of the machine's own network is touched. Processes run
in a host with ``ProcessFleet.start(..., host=host)`` or ``Host.command``.

::

    async with Hosts(3) as hosts, ProcessFleet() as fleet:
        child = fleet.start(body, f"tcp://{hosts[0].address}:29500", host=hosts[1])
        hosts[1].cut()          # no packet comes or goes, and nobody is told
        hosts[1].restore()
        hosts[1].cut_towards(hosts[0])   # in one direction only
        hosts[2].remove()       # power failure: no goodbye leaves it

It needs root and the ``ip`` command; ``unavailable()`` says what is missing.
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
from types import TracebackType

COMMAND_S = 10.0
"""How long one network command may take."""

CLONE_NEWNET = 0x40000000
NOWHERE = "02:00:00:00:00:01"
"""A hardware address that no interface has: what is sent there is lost in silence."""

BRIDGE = "bridge"

_numbers = itertools.count(1)


class HostError(RuntimeError):
    """A network command failed."""


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    if done.returncode:
        raise HostError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def unavailable() -> str | None:
    """Say why this machine cannot make hosts, or None if it can."""
    if shutil.which("ip") is None:
        return "the command 'ip' (package iproute2) is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Hosts(2):
            return None
    except (HostError, OSError, subprocess.TimeoutExpired) as error:
        return f"this machine does not allow network namespaces: {error}"


def enter_namespace(name: str) -> None:
    """Move the calling thread, and what it starts from now on, into a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter {name}: {os.strerror(error)}")


class Host:
    """One host. Made by ``Hosts``.

    Attributes:
        address: Its address on the network of its ``Hosts``.
        namespace: Name of its network namespace.
    """

    def __init__(self, address: str, namespace: str, switch: str, port: str) -> None:
        self.address, self.namespace = address, namespace
        self._switch, self._port = switch, port

    def __repr__(self) -> str:
        return f"<Host {self.address} ({self.namespace})>"

    def command(self, *command: str) -> list[str]:
        """Return ``command`` as one that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def processes(self) -> list[int]:
        """Return the processes that run on this host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]

    # Breaking it.

    def cut(self) -> None:
        """Cut it off in silence: no packet comes or goes from now on.

        The wire stays, the switch no longer knows it. Taking the link down instead
        would be told to the host by the loss of its carrier, and coming up again take
        up to a second more, which is how often the kernel looks at carriers.
        """
        self._plug("nomaster")

    def restore(self) -> None:
        """Undo ``cut``, ``cut_towards`` and ``throttle``."""
        _run("ip", "-n", self.namespace, "neigh", "flush", "nud", "permanent")
        subprocess.run(
            ["tc", "-n", self.namespace, "qdisc", "del", "dev", "eth0", "root"],
            capture_output=True,
            timeout=COMMAND_S,
            check=False,
        )
        self._plug("master", BRIDGE)

    def cut_towards(self, other: Host) -> None:
        """Lose what this host sends to ``other``; the other direction works."""
        wrong = ("lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
        _run("ip", "-n", self.namespace, "neigh", "replace", other.address, *wrong)

    def restore_towards(self, other: Host) -> None:
        """Undo ``cut_towards``."""
        _run("ip", "-n", self.namespace, "neigh", "del", other.address, "dev", "eth0")

    def throttle(self, bits_per_s: int) -> None:
        """Let it send no faster than that."""
        shape = ("rate", str(bits_per_s), "burst", "16kb", "latency", "100ms")
        device = ("dev", "eth0", "root")
        _run("tc", "-n", self.namespace, "qdisc", "replace", *device, "tbf", *shape)

    def remove(self) -> None:
        """Let it fail like a machine without power: nothing more leaves it, and all of
        its processes are gone."""
        self.cut()
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _plug(self, *where: str) -> None:
        _run("ip", "-n", self._switch, "link", "set", "dev", self._port, *where)


class Hosts:
    """A network of ``count`` hosts; a context manager that takes it down at the end.

    Args:
        count: How many, up to 200.
        subnet: The first three numbers of their addresses; nothing outside sees them.

    Raises:
        HostError: The machine does not allow it; see ``unavailable``.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._take_down()

    async def __aenter__(self) -> Hosts:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            subprocess.run(
                ["ip", "netns", "del", name],
                capture_output=True,
                timeout=COMMAND_S,
                check=False,
            )
        self._hosts.clear()

    def _namespaces(self) -> list[str]:
        where = Path("/run/netns")
        if not where.is_dir():
            return []
        ours = f"{self._prefix}-"
        return [entry.name for entry in where.iterdir() if entry.name.startswith(ours)]
