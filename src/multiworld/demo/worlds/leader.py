"""Leader of the demo: has one world with each worker, and kills a worker.

Phases: both workers serve. The second is killed (SIGKILL). The first serves alone until
a replacement has joined under the broken world's name. Both serve again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from multiworld import (
    Bundle,
    MemberLost,
    MultiWorldError,
    World,
    WorldBroken,
    WorldManager,
    WorldReady,
)
from multiworld.demo.worlds.ledger import RequestLedger, WorldAccount, percentile_99
from multiworld.demo.worlds.model import Digits

BATCH = 8
"""Images in one batch."""

WINDOW = 2
"""Batches in flight at each worker: one being computed, one on its way."""

SURVIVOR, VICTIM = "world1", "world2"
MIN_PAUSE_S = 0.25
"""Pause of the survivor that is always accepted, in seconds."""

PAUSE_FACTOR = 5
"""Longest accepted pause, as a multiple of the p99 gap before the kill."""

MIN_ACCURACY = 0.95
"""Lowest accepted share of right answers."""

REJOIN_LIMIT_S = 60.0
"""Seconds that workers may take to join, and a replacement to answer."""


@dataclass(slots=True)
class DemoOutcome:
    """Measurements of the demo; all times are in seconds."""

    images: dict[str, int] = field(default_factory=dict)
    replacement_images: int = 0
    sent: int = 0
    lost: int = 0
    resent: int = 0
    accuracy: float = 0.0
    p99_before_s: float = 0.0
    longest_pause_s: float = 0.0
    pause_limit_s: float = 0.0
    detect_s: float | None = None
    recover_s: float | None = None
    lost_rank: int | None = None
    lost_reason: str = ""
    failures: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Add every promise that did not hold to ``failures``."""
        checks = [
            (self.accuracy >= MIN_ACCURACY, f"accuracy is {self.accuracy:.3f}"),
            (self.lost == 0, f"{self.lost} images were never answered"),
            (
                self.longest_pause_s <= self.pause_limit_s,
                f"the surviving world paused for {self.longest_pause_s * 1e3:.0f} ms",
            ),
            (self.detect_s is not None, "the loss was not detected"),
            (self.lost_rank == 1, f"the error named rank {self.lost_rank}, not rank 1"),
            (self.recover_s is not None, "the replacement answered nothing"),
            (self.replacement_images > 0, "the replacement got no work"),
            (all(self.images.values()), "a worker answered nothing"),
        ]
        self.failures += [text for held, text in checks if not held]


Tell = Callable[[str], None]


class Leader:
    """Runs the demo once."""

    def __init__(
        self, test: Digits, weights: Path, backend: str, phase_s: float, tell: Tell
    ) -> None:
        self._test, self._weights, self._backend = test, weights, backend
        self._phase_s, self._tell = phase_s, tell
        self._store = f"tcp://127.0.0.1:{_free_port()}"
        self._workers: dict[str, asyncio.subprocess.Process] = {}
        self._logs = tempfile.TemporaryDirectory(prefix="multiworld-demo-")
        self._began = time.monotonic()
        self._killed_at: float | None = None
        self._is_draining = False
        self._joined = {SURVIVOR: asyncio.Event(), VICTIM: asyncio.Event()}
        self._replaced = asyncio.Event()
        self.ledger = RequestLedger(len(test.labels), BATCH)
        self.outcome = DemoOutcome()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the leader was created."""
        return time.monotonic() - self._began

    async def run(self) -> DemoOutcome:
        """Run all phases, and return the measurements.

        Raises:
            ExceptionGroup: With a TimeoutError if a worker did not join, or the
                replacement did not answer, within ``REJOIN_LIMIT_S``.

        Cancellation:
            The workers are killed.
        """
        try:
            async with WorldManager() as manager, asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(manager))
                serving = [
                    group.create_task(self._serve(manager, name))
                    for name in (SURVIVOR, VICTIM)
                ]
                for name in (SURVIVOR, VICTIM):
                    await self._launch(name)
                await self._run_phases()
                self._is_draining = True
                await asyncio.wait(serving)
                watching.cancel()
            await self._wait_for_workers()
        finally:
            self._kill_all()
            self._logs.cleanup()
        self._sum_up()
        return self.outcome

    async def _run_phases(self) -> None:
        async with asyncio.timeout(REJOIN_LIMIT_S):
            for joined in self._joined.values():
                await joined.wait()
        self._settled_at = time.monotonic()
        await asyncio.sleep(self._phase_s)
        victim = self._workers[VICTIM]
        self._tell(f"killing the worker of {VICTIM} (process {victim.pid}, SIGKILL)")
        self._killed_at = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        await victim.wait()
        await self._launch(VICTIM)
        async with asyncio.timeout(REJOIN_LIMIT_S):
            await self._replaced.wait()
        await asyncio.sleep(self._phase_s)
        self._ended_at = time.monotonic()

    # Processes.

    async def _launch(self, world: str) -> None:
        log = Path(self._logs.name) / f"{world}.log"
        with log.open("ab") as output:
            self._workers[world] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "multiworld.demo.worlds.worker"),
                *("--world", world, "--store", self._store),
                *("--backend", self._backend, "--weights", str(self._weights)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._tell(f"started a worker for {world} (process {self._pid(world)})")

    def _pid(self, world: str) -> int:
        return self._workers[world].pid

    async def _wait_for_workers(self) -> None:
        for world, process in self._workers.items():
            try:
                async with asyncio.timeout(10):
                    code = await process.wait()
            except TimeoutError:
                code = None
            if code != 0:
                log = (Path(self._logs.name) / f"{world}.log").read_text()
                self.outcome.failures.append(
                    f"the worker of {world} exited with {code}; its log ends with "
                    f"{log[-500:].strip()}"
                )

    def _kill_all(self) -> None:
        for process in self._workers.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    # Worlds.

    async def _watch(self, manager: WorldManager) -> None:
        async for event in manager.events():
            account = self.ledger.worlds[event.world]
            match event:
                case WorldReady():
                    account.state, account.epoch = "ready", event.epoch
                    self._tell(f"{event.world} is ready, epoch {event.epoch}")
                case MemberLost():
                    self._note_loss(event)
                case WorldBroken():
                    account.state = "broken, waiting for a replacement"

    def _note_loss(self, event: MemberLost) -> None:
        if self._killed_at is None or event.world != VICTIM:
            self._tell(f"{event.world} lost rank {event.rank}: {event.reason}")
            return
        outcome = self.outcome
        outcome.detect_s = time.monotonic() - self._killed_at
        outcome.lost_rank, outcome.lost_reason = event.rank, event.reason
        self._tell(
            f"{event.world} lost rank {event.rank}: {event.reason} ({event.evidence}); "
            f"detected {outcome.detect_s * 1e3:.1f} ms after the kill"
        )

    async def _serve(self, manager: WorldManager, name: str) -> None:
        """Join a world and work in it; join it again each time it breaks."""
        account = self.ledger.worlds.setdefault(name, WorldAccount())
        while not self._is_draining:
            account.state = "waiting for its worker"
            try:
                world = await manager.join(
                    name, rank=0, size=2, store=self._store, backend=self._backend
                )
                self._joined[name].set()
                await self._pump(world)
                await manager.leave(name)
            except* MultiWorldError as errors:
                images = self.ledger.give_back(name)
                if images:
                    self._tell(f"resending {images} images in flight at {name}")
                elif not self._joined[name].is_set():
                    self._tell(str(errors.exceptions[0]))
        account.state = "done"

    async def _pump(self, world: World) -> None:
        """Keep ``WINDOW`` batches in flight until the leader drains."""
        async with asyncio.TaskGroup() as slots:
            for _ in range(WINDOW):
                slots.create_task(self._ask_and_collect(world))

    async def _ask_and_collect(self, world: World) -> None:
        """Fill one slot of the window; answers arrive in the order of the requests."""
        while not self._is_draining or self.ledger.has_returned:
            batch, images = self.ledger.take(world.name, time.monotonic())
            tensors = {"images": self._test.images[images]}
            await world.send_bundle(tensors, meta={"batch": batch}, dst=1)
            self._note_answer(world, await world.recv_bundle(src=1))

    def _note_answer(self, world: World, answer: Bundle) -> None:
        now = time.monotonic()
        images = self.ledger.answer(world.name, int(answer.meta["batch"]), now)
        if images is not None:
            right = answer.tensors["digits"] == self._test.labels[images]
            self.ledger.correct += int(right.sum())
            self._note_replacement(world, len(images), now)

    def _note_replacement(self, world: World, images: int, now: float) -> None:
        if world.name != VICTIM or self._killed_at is None or world.epoch < 2:
            return
        if not self._replaced.is_set():
            self.outcome.recover_s = now - self._killed_at
            self._replaced.set()
        self.outcome.replacement_images += images

    # Report.

    def _sum_up(self) -> None:
        outcome, ledger = self.outcome, self.ledger
        assert self._killed_at is not None
        outcome.images = {name: w.images for name, w in ledger.worlds.items()}
        outcome.sent, outcome.lost = ledger.sent, ledger.lost
        outcome.resent, outcome.accuracy = ledger.resent, ledger.accuracy
        survivor = ledger.worlds[SURVIVOR]
        before = survivor.gaps(self._settled_at, self._killed_at)
        after = survivor.gaps(self._killed_at, self._ended_at)
        outcome.p99_before_s = percentile_99(before)
        outcome.longest_pause_s = max(after, default=float("inf"))
        outcome.pause_limit_s = max(MIN_PAUSE_S, PAUSE_FACTOR * outcome.p99_before_s)
        outcome.judge()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
