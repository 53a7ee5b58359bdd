"""Service of a demo, its faults, and its recovery from each of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from multiworld.errors import ServeError
from multiworld.serve.controller import answers
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.controller.observe.facts import Facts

T = TypeVar("T")

END_S = 30.0  # seconds for the service to shut down
POLL_S = 0.05  # seconds between requests to the controller
LOOK_S = 0.5  # seconds between looks at the chains of streams
STILL_S = 60.0  # seconds without any change after which a wait fails
TELL_S = 10.0  # seconds between two lines that show what the demo waits for


class Clock(Protocol):
    """Anything with a start time, such as a load."""

    began_at: float


class DemoFailedError(ServeError):
    """The service did not behave as the demo expects."""


@dataclass(slots=True)
class Scene:
    """One event of the story; times count from the start of the load."""

    title: str
    begin_s: float
    wall_s: float = 0.0  # its start, in seconds since 1970
    end_s: float = 0.0  # end of the recovery
    detect_s: float | None = None  # time to detect the loss; None: nothing was lost

    @property
    def recovery_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(slots=True)
class ReplicaCounts:
    """Numbers of ready replicas at one moment."""

    at_s: float  # since the start of the load
    ready: tuple[int, ...]  # number of replicas for each of ``Story.labels``


@dataclass(slots=True)
class Chains:
    """Replica chains of streams, by request, as their gateways last reported them."""

    at_s: float  # since the start of the load
    of: dict[str, tuple[str, ...]]


async def until(
    probe: Callable[[], Awaitable[T | None]],
    progress: Callable[[], Hashable],
    tell: Callable[[], None],  # called every ``TELL_S`` seconds
) -> T:
    """Call ``probe`` until it returns a value; time out without progress."""
    seen = progress()
    changed_at = told_at = time.monotonic()
    while (found := await probe()) is None:
        now = time.monotonic()
        if (latest := progress()) != seen:
            seen, changed_at = latest, now
        if now - changed_at > STILL_S:
            raise TimeoutError
        if now - told_at >= TELL_S:
            told_at = now
            tell()
        await asyncio.sleep(POLL_S)
    return found


class Story:
    """Runs the service by its commands, as a user would, and injects faults."""

    def __init__(
        self, spec: Path, root: Path, tell: Callable[[str], None], model: str
    ) -> None:
        self._spec, self._root, self.tell, self._model = spec, root, tell, model
        self._stages: dict[str, list[str]] = {
            name: [stage["name"] for stage in described["stages"]]
            for name, described in yaml.safe_load(spec.read_text())["models"].items()
        }
        # Labels under which replicas are counted: the stages of the spec.
        self.labels = [stage for stages in self._stages.values() for stage in stages]
        self._process: asyncio.subprocess.Process | None = None
        self._service: Service | None = None
        self._load: Clock | None = None
        self.scenes: list[Scene] = []
        self.replica_counts: list[ReplicaCounts] = []
        self.chains: list[Chains] = []
        self._status: answers.StatusAnswer | None = None

    @property
    def status(self) -> answers.StatusAnswer:
        """Latest status of the service, which must have been started."""
        assert self._status is not None
        return self._status

    def label_of(self, process: answers.ProcessShown) -> str:
        """Return the label of a replica; empty if its model was added later."""
        stages = self._stages.get(process.model)
        return stages[process.stage] if stages else ""

    async def start(self) -> str:
        """Start the service; return its URL when it is ready."""
        state = self._root / "state"
        command = [sys.executable, "-m", "multiworld.cli.main", "serve"]
        command += [str(self._spec), "--state", str(state), "--json", "-v"]
        with open(self._root / "serve.log", "wb") as log:  # noqa: ASYNC230
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        text = await self._first_line(self._process.stdout)
        if not text:
            raise DemoFailedError(
                f"the service did not start; its log ends with: {self._log_end(5)}"
            )
        self._service = Service(None, state)
        self._status = answers.decode(text, answers.StatusAnswer)
        return self._status.url

    async def _first_line(self, output: asyncio.StreamReader) -> bytes:
        """Return the first line of the service's output; empty if it never comes."""
        log = self._root / "serve.log"
        reading = asyncio.ensure_future(output.readline())

        async def probe() -> bytes | None:
            return reading.result() if reading.done() else None

        def tell() -> None:
            words = self._log_end(1) or "importing modules"
            self.tell(f"waiting until the service is ready: {words}")

        try:
            return await until(probe, lambda: log.stat().st_size, tell)
        except TimeoutError:
            return b""
        finally:
            reading.cancel()

    def _log_end(self, lines: int) -> str:
        text = (self._root / "serve.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    async def end(self) -> None:
        """Shut the service down; kill its processes if that takes too long."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)

    async def ask(self, method: str, path: str, kind: type[T], **options: Any) -> T:
        """Send a request to the controller from a thread; see ``Service.ask``."""
        assert self._service is not None
        ask = self._service.ask
        return await asyncio.to_thread(lambda: ask(method, path, kind, **options))

    # Watching.

    async def watch(self, load: Clock) -> None:
        """Record the number of ready replicas until cancelled."""
        self._load = load  # its start is the origin of all times
        while True:
            try:
                self._status = await self.ask("GET", "/status", answers.StatusAnswer)
            except ServeError:
                await asyncio.sleep(POLL_S)
                continue
            ready = dict.fromkeys(self.labels, 0)
            for process in self.status.processes:
                if process.model and process.phase == "ready":
                    label = self.label_of(process)
                    if label:
                        ready[label] += 1
            counts = ReplicaCounts(self.now(), tuple(ready.values()))
            self.replica_counts.append(counts)
            if not self.chains or self.now() - self.chains[-1].at_s >= LOOK_S:
                await self._look()
            await asyncio.sleep(POLL_S)

    async def _look(self) -> None:
        try:
            facts = await self.ask("GET", "/facts", Facts)
        except ServeError:
            return
        streams = facts.streams.values()
        chains = {each.request: each.chain for each in streams if each.chain}
        self.chains.append(Chains(self.now(), chains))

    def now(self) -> float:
        assert self._load is not None
        return asyncio.get_running_loop().time() - self._load.began_at

    # Events.

    async def break_replica(self, action: str, stage: str) -> None:
        """Break a replica, and wait until its replacement is ready."""
        await self._break(action, self._model, stage)

    async def kill_gateway(self) -> None:
        """Kill a gateway, and wait until its replacement is ready."""
        await self._break("kill", "gateway", "")

    async def _break(self, action: str, model: str, stage: str) -> None:
        scene = self.begin(f"{action} {stage or model}")
        since = await self.last_event()
        asked = {"action": action, "model": model, "stage": stage}
        harmed = await self.ask("POST", "/chaos", answers.FaultInjected, json=asked)
        self.tell(f"[red]{action}[/] {harmed.name} (process {harmed.pid})")
        began = await self.event(since, "chaos", harmed.name)
        lost = await self.event(since, "lost", harmed.name)
        ready = await self.event(since, "ready", after=lost.at)
        scene.detect_s = lost.at - began.at
        scene.end_s = scene.begin_s + ready.at - began.at
        self.tell(
            f"loss detected after {scene.detect_s:.3f} s, replaced by {ready.name} "
            f"after {scene.recovery_s:.2f} s"
        )

    async def break_every_stage(self, pause_s: float) -> None:
        """Kill a replica of each stage and a gateway, stop one, scale a stage."""
        stages = self._stages[self._model]
        await asyncio.sleep(pause_s)
        for stage in stages:
            await self.break_replica("kill", stage)
            await asyncio.sleep(pause_s)
        await self.kill_gateway()
        await asyncio.sleep(pause_s)
        await self.break_replica("stop", stages[1])
        await asyncio.sleep(pause_s)
        bottleneck = await self._bottleneck()
        for replicas in (3, 1):
            await self._scale(bottleneck, replicas)
            await asyncio.sleep(pause_s)

    async def _scale(self, stage: str, replicas: int) -> None:
        """Scale a stage, and wait until it has this many replicas."""
        scene = self.begin(f"scale stage {stage} to {replicas}")
        asked = {"model": self._model, "stage": stage, "replicas": replicas}
        answer = await self.ask("POST", "/scale", answers.Scaled, json=asked)
        self.tell(
            f"[cyan]scale[/] stage {stage} from {answer.before} to {answer.replicas}"
        )
        number = self._stages[self._model].index(stage)

        def is_scaled() -> bool:
            phases: Counter[str] = Counter(
                p.phase for p in self.status.processes if p.model and p.stage == number
            )
            is_going = phases["draining"] or phases["finishing"]
            return phases["ready"] == replicas and not is_going

        await self.wait_until(is_scaled)
        self.finish(scene)

    async def _bottleneck(self) -> str:
        """Return the stage with the most computing time per request and replica."""
        params = {"reports": True}
        found = await self.ask("GET", "/status", answers.StatusAnswer, params=params)
        wanted = found.wanted.models[self._model].replicas
        busy = [0.0] * len(wanted)
        for process in found.processes:
            if process.is_gateway:
                continue
            report = found.worker_report(process.name)
            if report is not None:
                requests = max(1, report.counts.get("requests", 0))
                share = report.computed_s / requests / wanted[process.stage]
                busy[process.stage] = max(busy[process.stage], share)
        return self._stages[self._model][busy.index(max(busy))]

    def begin(self, title: str) -> Scene:
        """Record the start of an event; return its scene."""
        scene = Scene(title, self.now(), time.time())
        self.scenes.append(scene)
        return scene

    def finish(self, scene: Scene) -> None:
        scene.end_s = self.now()
        self.tell(f"recovered after {scene.recovery_s:.2f} s")

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds in a status that arrives after this call."""
        old = self.status

        async def probe() -> bool | None:
            return (self.status is not old and condition()) or None

        await self._until("", probe, self._progress)

    async def last_event(self) -> int:
        """Return the number of the controller's last event; 0 if there is none."""
        events = await self.ask("GET", "/events", list[HistoryEntry])
        return events[-1].number if events else 0

    async def event(
        self, since: int, kind: str, name: str | None = None, after: float = 0.0
    ) -> HistoryEntry:
        """Wait for an event after number ``since``; ``name`` None: any process."""
        last = 0

        async def probe() -> HistoryEntry | None:
            nonlocal last
            params = {"since": since}
            found = await self.ask("GET", "/events", list[HistoryEntry], params=params)
            for event in found:
                last = event.number
                is_its = name in (None, event.name) and event.at >= after
                if event.kind == kind and is_its:
                    return event
            return None

        what = f" for {kind!r}"
        return await self._until(what, probe, lambda: (last, self._progress()))

    async def _until(
        self,
        what: str,
        probe: Callable[[], Awaitable[T | None]],
        progress: Callable[[], Hashable],
    ) -> T:
        def tell() -> None:
            self.tell(f"still waiting{what}: {self._unfinished()}")

        try:
            return await until(probe, progress, tell)
        except TimeoutError as error:
            title = self.scenes[-1].title if self.scenes else "the start"
            raise DemoFailedError(
                f"{title}: nothing has changed for {STILL_S:g} s while waiting{what}: "
                f"{self._unfinished()}"
            ) from error

    def _progress(self) -> Hashable:
        return frozenset((p.name, p.phase) for p in self.status.processes)

    def _unfinished(self) -> str:
        found = [
            f"{p.name} {p.phase}" for p in self.status.processes if p.phase != "ready"
        ]
        return ", ".join(found) or "no process is starting or ending"
