"""Leader of the demo: rank 0 of every world. It kills a worker and starts another."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from multiworld import MemberLostError, World, WorldManager

# Worlds of each worker, in which it is rank 1.
WORKERS = {"A": ("red",), "B": ("blue", "green")}

SURVIVOR, VICTIM = "A", "B"
WORLDS = WORKERS[SURVIVOR] + WORKERS[VICTIM]

STEP_S = 0.001  # seconds between two round trips in a world
REPORT_S = 2.0  # seconds between two lines of progress
MIN_PAUSE_S = 0.25  # seconds of pause that are always accepted in the surviving world
# Maximum accepted pause, as a multiple of the longest pause before the kill.
PAUSE_FACTOR = 5
LIMIT_S = 25.0  # seconds to start workers, and to notice and replace the lost one
END_S = 5.0  # seconds for workers to exit


@dataclass(slots=True)
class Outcome:
    """Measurements of the demo; all times are in seconds."""

    round_trips: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    broken: list[str] = field(default_factory=list)
    lost_rank: int | None = None
    lost_reason: str = ""
    detect_s: float | None = None
    recover_s: float | None = None
    pause_before_s: float = 0.0
    pause_after_s: float = 0.0
    pause_limit_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Append to ``failures`` every guarantee that did not hold."""
        checks = [
            (not self.wrong, f"{self.wrong} answers were wrong"),
            (all(self.round_trips.values()), "there was no traffic in a world"),
            (
                sorted(self.broken) == sorted(WORKERS[VICTIM]),
                f"broken: {', '.join(self.broken) or 'no world'}",
            ),
            (self.lost_rank == 1, f"the error named rank {self.lost_rank}, not rank 1"),
            (self.recover_s is not None, "the replacement did not answer"),
            (
                self.pause_after_s <= self.pause_limit_s,
                f"the surviving world paused for {self.pause_after_s * 1e3:.0f} ms",
            ),
        ]
        self.failures += [text for held, text in checks if not held]


class Leader:
    """Runs the demo once, with ``phase_s`` before the kill and after the recovery."""

    def __init__(
        self, backend: str, phase_s: float, tell: Callable[[str], None]
    ) -> None:
        self._backend, self._phase_s, self._tell = backend, phase_s, tell
        self._store = f"tcp://127.0.0.1:{_free_port()}"
        self._workers: dict[str, asyncio.subprocess.Process] = {}
        self._ready = {name: asyncio.Event() for name in WORLDS}
        self._replaced = {name: asyncio.Event() for name in WORKERS[VICTIM]}
        self._answered_at: dict[str, list[float]] = {name: [] for name in WORLDS}
        self._state = dict.fromkeys(WORLDS, "waiting for its worker")
        self._settled_at, self._killed_at = 0.0, float("inf")
        self._is_over = False
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Run the demo, and return its measurements; takes a bounded time."""
        limit_s = 2 * self._phase_s + LIMIT_S
        try:
            async with (
                asyncio.timeout(limit_s),
                WorldManager() as manager,
                asyncio.TaskGroup() as group,
            ):
                reporting = group.create_task(self._report())
                for name in WORLDS:
                    group.create_task(self._talk(manager, name))
                await self._play()
                self._is_over = True
                reporting.cancel()
            await asyncio.wait_for(self._wait_for_workers(), END_S)
        except TimeoutError:
            states = ", ".join(f"{name} {text}" for name, text in self._state.items())
            self.outcome.failures.append(f"not done after {limit_s:g} s: {states}")
        finally:
            for process in self._workers.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        self._sum_up()
        return self.outcome

    async def _play(self) -> None:
        for worker in WORKERS:
            await self._start(worker)
        for ready in self._ready.values():
            await ready.wait()
        self._settled_at = time.monotonic()
        await asyncio.sleep(self._phase_s)
        victim = self._workers[VICTIM]
        self._tell(f"[red]killing[/] worker {VICTIM} (process {victim.pid}, SIGKILL)")
        self._killed_at = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        await victim.wait()
        await self._start(VICTIM)
        for replaced in self._replaced.values():
            await replaced.wait()
        self.outcome.recover_s = time.monotonic() - self._killed_at
        await asyncio.sleep(self._phase_s)

    async def _start(self, worker: str) -> None:
        names = WORKERS[worker]
        self._workers[worker] = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "multiworld.demo.worlds.worker"),
            *(self._store, self._backend, *names),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            # In its own session, the worker does not get the terminal's Ctrl-C: only
            # the leader does, and it kills the worker.
            start_new_session=True,
        )
        self._tell(
            f"started worker {worker} for {' and '.join(names)} (process {process.pid})"
        )

    async def _wait_for_workers(self) -> None:
        for worker, process in self._workers.items():
            if code := await process.wait():
                self.outcome.failures.append(f"worker {worker} exited with {code}")

    async def _talk(self, manager: WorldManager, name: str) -> None:
        """Exchange messages in a world, and join it again when it breaks."""
        async for world in manager.keep(
            name, rank=0, size=2, store=self._store, backend=self._backend
        ):
            self._state[name] = "ready"
            self._tell(f"[green]{name}[/] is ready, epoch {world.epoch}")
            self._ready[name].set()
            try:
                while not self._is_over:
                    await self._make_round_trip(world)
                    await asyncio.sleep(STEP_S)
                return
            except MemberLostError as error:
                self._note_loss(error)

    async def _make_round_trip(self, world: World) -> None:
        times = self._answered_at[world.name]
        sent = torch.arange(256.0) + len(times)
        await world.send(sent, dst=1)
        answer = await world.recv(src=1)
        times.append(time.monotonic())
        self.outcome.wrong += not torch.equal(answer, 2 * sent)
        if world.epoch > 1 and world.name in self._replaced:
            self._replaced[world.name].set()

    def _note_loss(self, error: MemberLostError) -> None:
        outcome, after_s = self.outcome, time.monotonic() - self._killed_at
        self._state[error.world] = "broken"
        outcome.broken.append(error.world)
        outcome.lost_rank, outcome.lost_reason = error.rank, error.reason
        outcome.detect_s = max(outcome.detect_s or 0.0, after_s)
        self._tell(f"[red]{error}[/], noticed after {after_s * 1e3:.1f} ms")

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            counts = [
                f"{name} {len(self._answered_at[name]):,} ({state})"
                for name, state in self._state.items()
            ]
            self._tell(f"[dim]round trips: {' · '.join(counts)}[/]")

    def _sum_up(self) -> None:
        outcome, times = self.outcome, self._answered_at
        outcome.round_trips = {name: len(found) for name, found in times.items()}
        for name in WORKERS[SURVIVOR]:
            for early, late in itertools.pairwise(times[name]):
                if late >= self._killed_at:
                    outcome.pause_after_s = max(outcome.pause_after_s, late - early)
                elif early >= self._settled_at:
                    outcome.pause_before_s = max(outcome.pause_before_s, late - early)
        outcome.pause_limit_s = max(MIN_PAUSE_S, PAUSE_FACTOR * outcome.pause_before_s)
        outcome.judge()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
