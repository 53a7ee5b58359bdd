"""Overseer of a city: it injects faults, and checks what follows."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import Child, ProcessFleet, Role
from multiworld.testing.fleet import ChildFailedError
from multiworld.testing.hosts import Hosts, unavailable
from tests.soak.plan import (
    ENDS,
    SILENCE_S,
    City,
    Fault,
    Verdicts,
    expected,
    left,
    make_city,
    next_fault,
)
from tests.soak.resident import resident

Rounds = dict[tuple[int, str], int]
"""Rounds made, by resident and world."""

PORT = 29500
SETTLE_S = 60.0
"""Seconds that a city may take to recover; a hang bound."""

ROUNDS = 3
"""Rounds that every world must make before the next fault."""

SLACK = {"threads": 8, "descriptors": 8, "tasks": 8, "children": 0}
"""Resources that a resident may hold beyond its first count.

Thread pools start when they are first needed, and links to peers of former worlds stay.
"""

LOOK_S = 0.1
LINGER_S = 12.0
"""Seconds that connections of closed worlds may take to close.

They stay for at most ``close_s``, so that the other side can read what was sent.
"""


@dataclass
class Account:
    seed: int
    hosts: int
    worlds: int = 0
    residents: int = 0
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    detection_ms: dict[str, list[float]] = field(default_factory=dict)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    rounds: int = 0
    incarnations: int = 0
    verdicts: int = 0
    false_alarms: list[str] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)
    wrong_answers: list[str] = field(default_factory=list)
    doubles: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    growth_bytes: int = 0

    def problems(self) -> list[str]:
        return [
            *self.false_alarms,
            *self.disagreements,
            *self.wrong_answers,
            *self.doubles,
            *self.stuck,
            *self.leaks,
        ]


@dataclass
class _Seen:
    ready: dict[str, int] = field(default_factory=dict)  # world -> epoch
    over: list[tuple[Any, ...]] = field(default_factory=list)
    left: set[str] = field(default_factory=set)


async def _store(role: Role, host: str) -> None:
    server = await StoreServer.listen(host, PORT)
    role.report("ready")
    try:
        await role.order()
    finally:
        await server.close()


class Overseer:
    def __init__(
        self,
        fleet: ProcessFleet,
        hosts: Hosts | None,
        seed: int,
        say: Callable[..., Any],
    ) -> None:
        self._fleet, self._hosts, self._say = fleet, hosts, say
        self._chance = random.Random(seed)
        count = 1 if hosts is None else len(hosts) - 1
        self.city: City = make_city(self._chance, count)
        self.account = Account(seed, count)
        self.account.worlds = len(self.city.worlds)
        self.account.residents = len(self.city.homes)
        # Without namespaces everybody is on loopback, and so is the store.
        self._store_host = "127.0.0.1" if hosts is None else hosts[-1].address
        self._children: dict[int, Child] = {}
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._seen: dict[int, _Seen] = {}
        self._statuses: dict[int, asyncio.Future[tuple[Any, Any]]] = {}
        self._nonces: dict[tuple[str, int], int] = {}
        self._first: dict[int, dict[str, int]] = {}
        self._rounds: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._store: Child | None = None

    # The city.

    async def start(self) -> None:
        await self._start_store()
        for number in range(len(self.city.homes)):
            self._start(number)
        await self._settle("start")

    async def _start_store(self) -> None:
        host = None if self._hosts is None else self._hosts[-1]
        self._store = self._fleet.start(_store, self._store_host, host=host)
        assert await self._store.report() == "ready"

    def _start(self, number: int) -> None:
        host = None if self._hosts is None else self._hosts[self.city.homes[number]]
        store = f"tcp://{self._store_host}:{PORT}"
        self._seen[number] = _Seen()
        child = self._fleet.start(
            resident, number, self.city.of(number), store, host=host
        )
        self._children[number] = child
        self._readers[number] = asyncio.create_task(self._read(number, child))

    async def _read(self, number: int, child: Child) -> None:
        while True:
            try:
                report = await child.report(limit_s=1e6)
            except ChildFailedError as error:
                if self._children.get(number) is child and "Traceback" in str(error):
                    self.account.stuck.append(f"resident {number}: {error}")
                return
            self._take(number, report)
            self._changed.set()

    def _take(self, number: int, report: tuple[Any, ...]) -> None:
        seen = self._seen[number]
        match report:
            case ("ready", world, epoch, nonce, _):
                seen.ready[world] = epoch
                self.account.incarnations += (world, epoch) not in self._nonces
                known = self._nonces.setdefault((world, epoch), nonce)
                if known != nonce:
                    self.account.doubles.append(f"{world} epoch {epoch} exists twice")
            case ("over", world, *_):
                seen.ready.pop(world, None)
                seen.over.append(report)
            case ("left", world):
                seen.ready.pop(world, None)
                seen.left.add(world)
            case ("wrong", world, epoch, what):
                self.account.wrong_answers.append(f"{world} epoch {epoch}: {what}")
            case ("status", rounds, footprint):
                waiting = self._statuses.pop(number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result((rounds, footprint))

    async def _status(self, number: int) -> tuple[dict[str, int], dict[str, int]]:
        future = asyncio.get_running_loop().create_future()
        self._statuses[number] = future
        self._children[number].order("status")
        async with asyncio.timeout(SETTLE_S):
            rounds, footprint = await future
        return rounds, footprint

    # Whole again.

    def _is_whole(self) -> bool:
        for world in self.city.worlds:
            epochs = {self._seen[m].ready.get(world.name) for m in world.members}
            if len(epochs) != 1 or None in epochs:
                return False
        return True

    async def _settle(self, after: str) -> None:
        """Wait until every world is ready on all members and passes messages."""
        try:
            async with asyncio.timeout(SETTLE_S):
                while not self._is_whole():
                    self._changed.clear()
                    await self._changed.wait()
            await self._all_advance()
        except TimeoutError:
            missing = [
                f"{w.name}: {[self._seen[m].ready.get(w.name) for m in w.members]}"
                for w in self.city.worlds
            ]
            self.account.stuck.append(f"not whole after {after}: {missing}")
            raise

    async def _all_advance(self) -> None:
        before = await self._all_rounds()
        async with asyncio.timeout(SETTLE_S):
            while True:
                await asyncio.sleep(LOOK_S)  # each look is a message to every resident
                now = await self._all_rounds()
                moved = [now[k] - before.get(k, 0) for k in now]
                if len(moved) >= len(before) and min(moved) >= ROUNDS:
                    return

    async def _all_rounds(self) -> Rounds:
        found: Rounds = {}
        for number in self._children:
            rounds, _ = await self._status(number)
            for world in self.city.of(number):
                found[number, world.name] = rounds.get(world.name, 0)
        return found

    # Faults.

    async def run(self, seconds: float) -> None:
        await self.start()
        await self._count_footprints()
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            fault = next_fault(self._chance, self.city)
            await self._one(fault)
            await self._count_footprints()
            self.account.seconds = time.monotonic() - begin
            self._say(self.account, fault)
        await self._end()

    async def _one(self, fault: Fault) -> None:
        for seen in self._seen.values():
            seen.over.clear()
            seen.left.clear()
        rounds = await self._all_rounds()
        wanted = expected(self.city, fault)
        at = time.monotonic()
        await self._inject(fault, rounds, wanted)
        await self._settle(fault.kind)
        faults, recovery_s = self.account.faults, self.account.recovery_s
        faults[fault.kind] = faults.get(fault.kind, 0) + 1
        recovery_s.setdefault(fault.kind, []).append(time.monotonic() - at)
        self._judge(fault, wanted, at)

    async def _inject(
        self,
        fault: Fault,
        rounds: dict[tuple[int, str], int],
        wanted: dict[str, Verdicts],
    ) -> None:
        # The sleeps are intended: a fault lasts for its number of seconds.
        child = self._children.get(fault.resident)
        match fault.kind:
            case "kill" | "segfault" | "exit":
                assert child is not None
                child.kill() if fault.kind == "kill" else child.order(fault.kind)
                await self._all_told(wanted)
                await self._undisturbed(fault, rounds, wanted)
                self._children[fault.resident].end()
                self._first.pop(fault.resident, None)
                self._rounds.pop(fault.resident, None)
                self._start(fault.resident)
            case "stop" | "short stop":
                assert child is not None
                child.stop()
                await asyncio.sleep(fault.seconds)
                await self._undisturbed(fault, rounds, wanted)
                child.go_on()
            case "blocked":
                assert child is not None
                child.order(("blocked", fault.seconds))
                await asyncio.sleep(fault.seconds)
            case "leave":
                assert child is not None
                child.order(("leave", fault.world))
                async with asyncio.timeout(SETTLE_S):
                    while fault.world not in self._seen[fault.resident].left:
                        self._changed.clear()
                        await self._changed.wait()
            case "store lost":
                assert self._store is not None
                self._store.end()
                await asyncio.sleep(fault.seconds)
                await self._undisturbed(fault, rounds, wanted)
                await self._start_store()
            case _:
                await self._cut(fault, rounds, wanted)

    async def _cut(
        self,
        fault: Fault,
        rounds: dict[tuple[int, str], int],
        wanted: dict[str, Verdicts],
    ) -> None:
        assert self._hosts is not None
        host = self._hosts[fault.host]
        if fault.kind == "one-way cut":
            host.cut_towards(self._hosts[fault.other])
        else:
            host.cut()
        try:
            await asyncio.sleep(fault.seconds)
            await self._undisturbed(fault, rounds, wanted)
        finally:
            host.restore()

    async def _all_told(self, wanted: dict[str, Verdicts]) -> None:
        async with asyncio.timeout(SETTLE_S):
            while not self._are_told(wanted):
                self._changed.clear()
                await self._changed.wait()

    def _are_told(self, wanted: dict[str, Verdicts]) -> bool:
        for world in self.city.worlds:
            for rank in wanted[world.name].named if world.name in wanted else ():
                over = self._seen[world.members[rank]].over
                if not any(report[1] == world.name for report in over):
                    return False
        return True

    async def _undisturbed(
        self,
        fault: Fault,
        before: Rounds,
        wanted: dict[str, Verdicts],
    ) -> None:
        if fault.kind in ("short cut", "short stop"):
            return  # affected worlds pause, and then continue
        for world in self.city.worlds:
            if world.name in wanted or fault.resident in world.members:
                continue
            number = world.members[0]
            rounds, _ = await self._status(number)
            moved = rounds.get(world.name, 0) - before[number, world.name]
            if not moved and fault.seconds > 1.0:
                self.account.disagreements.append(
                    f"{world.name} stood still during {fault}"
                )

    # Judging.

    def _judge(self, fault: Fault, wanted: dict[str, Verdicts], at: float) -> None:
        for world in self.city.worlds:
            for rank, member in enumerate(world.members):
                overs = [r for r in self._seen[member].over if r[1] == world.name]
                if world.name not in wanted:
                    self._check_spared(fault, world.name, rank, overs)
                else:
                    self._check_named(fault, wanted[world.name], rank, overs, at)

    def _check_spared(
        self, fault: Fault, world: str, rank: int, overs: list[tuple[Any, ...]]
    ) -> None:
        if world == left(self.city, fault):
            overs = [over for over in overs if "Left" not in over[4] + over[5]]
            overs = [over for over in overs if over[4] != "WorldClosedError"]
        for over in overs:
            self.account.false_alarms.append(f"{fault}: {world} rank {rank}: {over[5]}")

    def _check_named(
        self,
        fault: Fault,
        verdicts: Verdicts,
        rank: int,
        overs: list[tuple[Any, ...]],
        at: float,
    ) -> None:
        if not overs:
            if rank in verdicts.named:
                self.account.disagreements.append(f"{fault}: rank {rank} was not told")
            return
        _, world, _, _, _, text, named, is_stale, told_at = overs[0]
        self.account.verdicts += 1
        if is_stale:
            is_right = rank in verdicts.fenced
        else:
            is_right = named in verdicts.named.get(rank, frozenset())
        if not is_right:
            self.account.disagreements.append(f"{fault}: {world} rank {rank}: {text}")
        elif not is_stale:
            detection_ms = self.account.detection_ms.setdefault(fault.kind, [])
            detection_ms.append((told_at - at) * 1000)

    async def _count_footprints(self) -> None:
        for number in self._children:
            rounds, now = await self._status(number)
            self.account.rounds += sum(rounds.values()) - self._rounds.get(number, 0)
            self._rounds[number] = sum(rounds.values())
            first = self._first.setdefault(number, now)
            more = _grown(first, now)
            end = time.monotonic() + LINGER_S
            while more and time.monotonic() < end:
                await asyncio.sleep(LOOK_S)  # what is freed late has no event
                _, now = await self._status(number)
                more = _grown(first, now)
            if more:
                self.account.leaks.append(f"resident {number}: {more}")
                self._first[number] = now
            growth = now["bytes"] - first["bytes"]
            self.account.growth_bytes = max(self.account.growth_bytes, growth)

    async def _end(self) -> None:
        for child in self._children.values():
            child.order("end")
        # A resident's reader ends with it.
        await asyncio.wait(self._readers.values(), timeout=SETTLE_S)
        for reader in self._readers.values():
            reader.cancel()
        await asyncio.gather(*self._readers.values(), return_exceptions=True)


def _grown(first: dict[str, int], now: dict[str, int]) -> str:
    return ", ".join(
        f"{what} {first[what]} -> {now[what]}"
        for what, slack in SLACK.items()
        if now[what] > first[what] + slack
    )


@asynccontextmanager
async def overseer(
    seed: int, say: Callable[..., Any] = lambda *_: None
) -> AsyncIterator[Overseer]:
    """Yield an overseer of three hosts, or of one where namespaces are not allowed."""
    async with AsyncExitStack() as stack:
        hosts = None
        if unavailable() is None:
            hosts = stack.enter_context(Hosts(4))
        fleet = await stack.enter_async_context(ProcessFleet())
        yield Overseer(fleet, hosts, seed, say)


__all__ = ["ENDS", "SILENCE_S", "Account", "Overseer", "overseer"]
