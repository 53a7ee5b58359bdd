"""Time to detect a fault and to recover from it: worlds, plain Gloo and Ray.

There are two processes, a survivor and a victim. The clock starts when the fault has
been injected: when ``os.kill``, or the command that cuts the network, has returned. It
stops when the survivor's program has received the error. Processes of one machine share
this clock (``CLOCK_MONOTONIC``). Systems alternate within every round.

Recovery lasts from the fault until the first message of a replacement has arrived. The
replacement is started after detection and joins under the same name.

``--ray PYTHON`` names an interpreter that has Ray, which is measured in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.rivals.environment import HERE
from multiworld import MemberLost, WorldBrokenError, WorldConfig, WorldManager
from multiworld.backends.torch_names import new_gloo
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import Child, ProcessFleet, Role
from multiworld.testing.hosts import Hosts, unavailable

GIVE_UP_S = 5.0
"""Seconds after which a fault counts as not detected.

Plain Gloo detects a stopped process only after its timeout of 30 minutes.
"""

SLOW_ROUNDS = 3
"""Maximum number of rounds for faults that take seconds."""

GIB = 1 << 30


@dataclass
class Result:
    """Measurements of one system and one fault.

    Attributes:
        system: Name of the system.
        fault: Name of the fault.
        detected_ms: Milliseconds to detection; None: not within ``GIVE_UP_S``.
        recovered_ms: Milliseconds to recovery.
    """

    system: str
    fault: str
    detected_ms: list[float | None] = field(default_factory=list)
    recovered_ms: list[float] = field(default_factory=list)


def free_port() -> int:
    """Return a TCP port of loopback that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# Victims.


async def victim(role: Role, store: str, backend: str, gib: float) -> None:
    """Join a world as rank 1, hold some memory, and wait for the fault."""
    ballast = torch.ones(int(gib * GIB) // 4) if gib else None
    async with WorldManager(config=WorldConfig(join_s=30)) as manager:
        world = await manager.join("w", rank=1, size=2, store=store, backend=backend)
        await world.send(torch.ones(1), dst=0)
        role.report("ready")
        await asyncio.Event().wait()
    del ballast


async def plain_victim(role: Role, own: str, host: str, port: int) -> None:
    """Join a plain Gloo group as rank 1, and wait for the fault."""
    group = _plain_group(1, own, host, port)
    group.send([torch.ones(1)], 0, 0).wait()
    role.report("ready")
    await asyncio.Event().wait()


def _plain_group(rank: int, own: str, host: str, port: int) -> Any:
    store = dist.TCPStore(host, port, 2, rank == 0, timeout=timedelta(seconds=30))
    limit_s = 1800.0
    return new_gloo(store, rank, 2, host=own, connect_s=limit_s, timeout_s=limit_s)


# Survivors: each reports when it was ready and when it detected the loss, in seconds of
# the monotonic clock.


async def survive(
    role: Role, store: str, backend: str, busy: bool, repeat: int
) -> None:
    """Join a world as rank 0, report when the loss is detected, and join again."""
    async with WorldManager(config=WorldConfig(join_s=30)) as manager:
        for _ in range(repeat + 1):
            world = await manager.join(
                "w", rank=0, size=2, store=store, backend=backend
            )
            events = manager.events()
            await world.recv(src=1)
            role.report(("ready", time.monotonic()))
            if busy:
                with contextlib.suppress(WorldBrokenError):
                    await world.recv(src=1)
            else:
                async for event in events:
                    if isinstance(event, MemberLost):
                        break
            role.report(("noticed", time.monotonic()))


async def plain_survive(role: Role, own: str, host: str, port: int, busy: bool) -> None:
    """Join a plain Gloo group as rank 0, and report when a receive fails."""
    # An idle member of a plain Gloo group detects nothing.
    group = _plain_group(0, own, host, port)
    tensor = torch.empty(1)
    group.recv([tensor], 1, 0).wait()
    role.report(("ready", time.monotonic()))
    if not busy:
        await asyncio.Event().wait()

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            group.recv([tensor], 1, 0).wait()
        role.report(("noticed", time.monotonic()))

    threading.Thread(target=wait, daemon=True).start()
    await asyncio.Event().wait()


# One measurement.


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        name: Name of the fault.
        inject: Function that injects it, given the victim and the hosts.
        busy: Whether the survivor waits in a receive; otherwise nothing is pending.
        gib: GiB of memory that the victim holds.
        network: Whether the fault needs hosts (network namespaces).
    """

    name: str
    inject: Callable[[Child, Any], None]
    busy: bool = True
    gib: float = 0.0
    network: bool = False


def _kill(child: Child, hosts: Any) -> None:
    os.kill(child.pid, signal.SIGKILL)


CASES = [
    Case("killed, survivor idle", _kill, busy=False),
    Case("killed, survivor in recv", _kill),
    Case("killed, 1 GiB resident", _kill, gib=1),
    Case("killed, 4 GiB resident", _kill, gib=4),
    Case("killed, 8 GiB resident", _kill, gib=8),
    Case("stopped (SIGSTOP)", lambda child, _: os.kill(child.pid, signal.SIGSTOP)),
    Case("network cut in silence", lambda _, hosts: hosts[1].cut(), network=True),
    Case("host without power", lambda _, hosts: hosts[1].remove(), network=True),
]


async def measure_world(backend: str, case: Case, result: Result) -> None:
    """Measure the detection of one fault by a world, and the recovery from it."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(3)) if case.network else None
        places = (None, None, None) if hosts is None else tuple(hosts)
        address = "127.0.0.1" if hosts is None else hosts[0].address
        async with ProcessFleet() as fleet:
            keeper = fleet.start(serve, address, host=places[0])
            store = f"tcp://{address}:{await keeper.report()}"
            survivor = fleet.start(
                survive, store, backend, case.busy, 1, host=places[0]
            )
            child = fleet.start(victim, store, backend, case.gib, host=places[1])
            assert await child.report(60) == "ready"
            await survivor.report(60)
            await asyncio.sleep(0.3)
            case.inject(child, hosts)
            at = time.monotonic()
            _, noticed = await survivor.report(60)
            result.detected_ms.append((noticed - at) * 1000)
            fleet.start(victim, store, backend, 0.0, host=places[2])
            _, again = await survivor.report(60)
            result.recovered_ms.append((again - at) * 1000)


async def serve(role: Role, host: str) -> None:
    """Run a store until the parent closes its pipe."""
    server = await StoreServer.listen(host, 0)
    role.report(server.port)
    with contextlib.suppress(EOFError):
        await role.order()


async def measure_plain(case: Case, result: Result) -> None:
    """Measure the detection of one fault by plain Gloo."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(2)) if case.network else None
        places = (None, None) if hosts is None else tuple(hosts)
        loopback = "127.0.0.1"
        address, other = (
            (loopback,) * 2 if hosts is None else [h.address for h in hosts]
        )
        port = free_port()
        async with ProcessFleet() as fleet:
            args = (address, port)
            survivor = fleet.start(
                plain_survive, address, *args, case.busy, host=places[0]
            )
            child = fleet.start(plain_victim, other, *args, host=places[1])
            assert await child.report(60) == "ready"
            await survivor.report(60)
            await asyncio.sleep(0.3)
            case.inject(child, hosts)
            at = time.monotonic()
            try:
                _, noticed = await survivor.report(GIVE_UP_S)
                result.detected_ms.append((noticed - at) * 1000)
            except AssertionError:
                result.detected_ms.append(None)


def measure_ray(python: str, rounds: int) -> list[Result]:
    """Measure Ray with another interpreter."""
    done = subprocess.run(
        [python, HERE / "ray_detection.py", str(rounds)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    return [Result("Ray actors", **row) for row in rows]


async def run(rounds: int, python: str | None, console: Console) -> list[Result]:
    """Measure every fault on every system, alternately."""
    systems = ("world on direct", "world on gloo", "plain gloo")
    results: dict[tuple[str, str], Result] = {}
    for number in range(rounds):
        for case in CASES:
            is_slow = case.network or "stopped" in case.name or case.gib >= 4
            if (case.network and unavailable()) or (is_slow and number >= SLOW_ROUNDS):
                continue
            for system in systems:
                key = system, case.name
                result = results.setdefault(key, Result(system, case.name))
                if system != "plain gloo":
                    await measure_world(system.rpartition(" ")[2], case, result)
                elif case.gib == 0 and (case.busy or number < SLOW_ROUNDS):
                    await measure_plain(case, result)
        console.print(f"round {number + 1} of {rounds}", highlight=False)
    found = list(results.values())
    if python:
        found += measure_ray(python, rounds)
    return [result for result in found if result.detected_ms]


# Results.


def percentile(values: list[float], part: float) -> float:
    """Return the quantile ``part`` (0 to 1) of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def in_words(values: list[float | None], point: Callable[[list[float]], float]) -> str:
    """Return a statistic as text, such as "> 5000" if a fault was not detected."""
    found = point([math.inf if value is None else value for value in values])
    return f"{found:.0f}" if found < math.inf else f"> {GIVE_UP_S * 1000:.0f}"


def show(results: list[Result], console: Console) -> None:
    table = Table(title="milliseconds from the fault")
    table.add_column("fault")
    table.add_column("system")
    for column in ("rounds", "detected p50", "p99", "max", "recovered p50"):
        table.add_column(column, justify="right")
    for result in sorted(results, key=lambda row: row.fault):
        recovered = result.recovered_ms
        table.add_row(
            result.fault,
            result.system,
            str(len(result.detected_ms)),
            in_words(result.detected_ms, statistics.median),
            in_words(result.detected_ms, lambda v: percentile(v, 0.99)),
            in_words(result.detected_ms, max),
            f"{statistics.median(recovered):.0f}" if recovered else "-",
        )
    console.print(table)


def plot(results: list[Result], path: Path) -> None:
    """Draw detection times, with a row for each fault and a colour for each system."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    faults = list(dict.fromkeys(result.fault for result in results))
    systems = list(dict.fromkeys(result.system for result in results))
    figure, axes = plt.subplots(figsize=(9, 0.6 * len(faults) + 1.6))
    for number, system in enumerate(systems):
        for result in results:
            if result.system != system:
                continue
            row = faults.index(result.fault) + 0.18 * (number - len(systems) / 2)
            seen = [value for value in result.detected_ms if value is not None]
            colour = f"C{number}"
            axes.plot(seen, [row] * len(seen), "|", color=colour, markersize=11)
            if not seen:
                axes.plot([GIVE_UP_S * 1000], [row], ">", color=colour, markersize=8)
        axes.plot([], [], "|", color=f"C{number}", label=system, markersize=11)
    axes.set_xscale("log")
    axes.set_xlim(1, 20_000)
    axes.set_yticks(range(len(faults)), faults)
    axes.invert_yaxis()
    axes.set_xlabel(
        f"milliseconds until the survivor detects it (>: not in {GIVE_UP_S:.0f} s)"
    )
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.18), ncol=4, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _system() -> str:
    release = ".".join(platform.release().split(".")[:2])
    return f"{platform.system()} {release}, {platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__ or "")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ray", help="an interpreter that has Ray")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--plot", type=Path, help="draw a picture")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    results = asyncio.run(run(args.rounds, args.ray, console))
    show(results, console)
    if args.json:
        about = {
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores, {_system()}",
            "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
            "silence_s": WorldConfig().silence_s,
        }
        rows = [asdict(result) for result in results]
        args.json.write_text(json.dumps({**about, "results": rows}, indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
