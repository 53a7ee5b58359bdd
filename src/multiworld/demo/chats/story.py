"""Events of the pipeline demo, and how the service recovered from each."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import yaml

from multiworld.demo.pipeline.patience import STILL_S, Patience
from multiworld.errors import ServeError
from multiworld.serve.control.answers import (
    FaultInjected,
    ProcessShown,
    Scaled,
    StatusAnswer,
    Updated,
    decode,
)
from multiworld.serve.control.client import Service
from multiworld.serve.fleet.entries import HistoryEntry

T = TypeVar("T")

MODEL = "minilm"
"""Model that the demo serves, as the spec names it."""

END_S = 30.0
"""Seconds that the service may take to shut down."""

POLL_S = 0.05
"""Seconds between questions to the controller."""


class Clock(Protocol):
    """Anything with a start, such as a load."""

    began_at: float


class DemoFailedError(ServeError):
    """The service did not do what the demo shows."""


@dataclass(slots=True)
class Scene:
    """One event of the story.

    Attributes:
        title: Name of the event, for people.
        begin_s: Start of the event, in seconds since the load started.
        wall_s: Start of the event, in seconds since 1970.
        end_s: Time of the recovery, in seconds since the load started.
        detect_s: Seconds until the loss was detected; None if nothing was lost.
    """

    title: str
    begin_s: float
    wall_s: float = 0.0
    end_s: float = 0.0
    detect_s: float | None = None

    @property
    def recovery_s(self) -> float:
        """Seconds from the event to the recovery."""
        return self.end_s - self.begin_s


@dataclass(slots=True)
class ReplicaCounts:
    """Number of ready replicas at one moment.

    Attributes:
        at_s: Seconds since the load started.
        ready: Ready replicas under each label of ``Story.labels``.
    """

    at_s: float
    ready: tuple[int, ...]


class Story:
    """Runs the service as a user would, by its commands, and breaks it.

    Attributes:
        scenes: Events so far.
        replica_counts: Ready replicas over time.
    """

    def __init__(
        self, spec: Path, root: Path, tell: Callable[[str], None], model: str = MODEL
    ) -> None:
        self._spec, self._root, self.tell, self._model = spec, root, tell, model
        self._app = yaml.safe_load(spec.read_text())
        self._process: asyncio.subprocess.Process | None = None
        self._service: Service | None = None
        self._load: Clock | None = None
        self.scenes: list[Scene] = []
        self.replica_counts: list[ReplicaCounts] = []
        self._status: StatusAnswer | None = None

    @property
    def status(self) -> StatusAnswer:
        """Latest status of the service, which has been started."""
        assert self._status is not None
        return self._status

    @property
    def stages(self) -> list[str]:
        """Names of the model's stages."""
        return [s["name"] for s in self._app["models"][self._model]["stages"]]

    @property
    def labels(self) -> list[str]:
        """Labels that replicas are counted under: the names of the stages."""
        return self.stages

    def label_of(self, process: ProcessShown) -> str:
        """Return the label that a replica is counted under."""
        return self.stages[process.stage]

    async def start(self) -> str:
        """Start the service; return its URL when it is ready.

        Raises:
            DemoFailedError: The service ended, or nothing moved for a minute.

        Cancellation:
            The service may be running; ``end`` stops it.
        """
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
                f"the service did not start; its log ends with: {self._last_words()}"
            )
        self._service = Service(None, state)
        self._status = decode(text, StatusAnswer)
        return self._status.url

    async def _first_line(self, output: asyncio.StreamReader) -> bytes:
        """Return the first line of the service's output, empty if it never comes."""
        patience, log = Patience(), self._root / "serve.log"
        reading = asyncio.ensure_future(output.readline())
        while not reading.done() and patience.look(log.stat().st_size):
            await asyncio.wait([reading], timeout=POLL_S)
            if patience.is_time_to_tell():
                words = self._last_words(1) or "modules are imported"
                self.tell(f"waiting until the service is ready: {words}")
        if not reading.done():
            reading.cancel()
            return b""
        return reading.result()

    def _last_words(self, lines: int = 5) -> str:
        text = (self._root / "serve.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    async def end(self) -> None:
        """Shut the service down; kill its processes if that takes too long.

        Cancellation:
            The shutdown goes on, but nothing is killed if it hangs.
        """
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)

    async def ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        json: Mapping[str, object] | None = None,
        params: Mapping[str, str | float | bool] | None = None,
    ) -> T:
        """Send a request to the controller from a thread, and return its answer.

        Args:
            method: HTTP method.
            path: Path of the controller's API.
            kind: Type of the answer.
            json: Body of the request; None sends no body.
            params: Query of the request.

        Raises:
            ServeError: The controller refused, or did not answer.

        Cancellation:
            The request is still sent, and its answer dropped.
        """
        service = self._service
        assert service is not None
        return await asyncio.to_thread(
            lambda: service.ask(method, path, kind, json=json, params=params)
        )

    # Watching.

    async def watch(self, load: Clock) -> None:
        """Record the number of ready replicas until cancelled.

        Args:
            load: What the story's times are counted from.

        Cancellation:
            Ends the recording; this is the only way to end it.
        """
        self._load = load
        while True:
            try:
                self._status = await self.ask("GET", "/status", StatusAnswer)
            except ServeError:
                await asyncio.sleep(POLL_S)
                continue
            labels = self.labels
            ready = [0] * len(labels)
            for process in self.status.processes:
                if process.model and process.phase == "ready":
                    label = self.label_of(process)
                    if label in labels:
                        ready[labels.index(label)] += 1
            self.replica_counts.append(ReplicaCounts(self.now(), tuple(ready)))
            await asyncio.sleep(POLL_S)

    def now(self) -> float:
        """Return the seconds since the load started."""
        assert self._load is not None
        return asyncio.get_running_loop().time() - self._load.began_at

    # Events.

    async def break_replica(self, action: str, stage: str) -> None:
        """Break a replica, and wait until its replacement is ready.

        Args:
            action: Fault of ``multiworld chaos``: "kill" or "stop".
            stage: Name of the stage.

        Raises:
            DemoFailedError: The loss was not detected, or nothing replaced the replica.

        Cancellation:
            The replica stays broken and the service heals on its own.
        """
        scene = self.begin(f"{action} {stage}")
        since = await self.last_event()
        asked = {"action": action, "model": self._model, "stage": stage}
        harmed = await self.ask("POST", "/chaos", FaultInjected, json=asked)
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
        """Kill a replica of each stage, stop one, and scale the bottleneck to 3 and 1.

        Args:
            pause_s: Seconds before each event, and after the last.

        Raises:
            DemoFailedError: The service did not recover.

        Cancellation:
            The service heals on its own.
        """
        await asyncio.sleep(pause_s)
        for stage in self.stages:
            await self.break_replica("kill", stage)
            await asyncio.sleep(pause_s)
        await self.break_replica("stop", self.stages[1])
        await asyncio.sleep(pause_s)
        stage = await self.bottleneck()
        for replicas in (3, 1):
            await self.scale(stage, replicas)
            await asyncio.sleep(pause_s)

    async def scale(self, stage: str, replicas: int) -> None:
        """Scale a stage, and wait until it has this many replicas.

        Raises:
            DemoFailedError: It did not happen in time.
            ServeError: The service refused.

        Cancellation:
            The scaling goes on.
        """
        scene = self.begin(f"scale stage {stage} to {replicas}")
        asked = {"model": self._model, "stage": stage, "replicas": replicas}
        answer = await self.ask("POST", "/scale", Scaled, json=asked)
        self.tell(
            f"[cyan]scale[/] stage {stage} from {answer.before} to {answer.replicas}"
        )
        number = self.stages.index(stage)
        await self.wait_until(
            lambda: (
                self._count(number) == replicas and not self._count(number, going=True)
            )
        )
        self.finish(scene)

    async def update(self, version: str) -> None:
        """Update the model to a new version, and wait until the old one is gone.

        Raises:
            DemoFailedError: It did not happen in time.
            ServeError: The service refused.

        Cancellation:
            The update goes on.
        """
        scene = self.begin(f"version {version}")
        self._app["models"][self._model]["version"] = version
        text = yaml.safe_dump(self._app, sort_keys=False)
        asked = {"text": text, "where": "the demo"}
        await self.ask("POST", "/update", Updated, json=asked)
        self.tell(f"[cyan]update[/] to version {version}")
        await self.wait_until(
            lambda: all(
                (p.version, p.phase) == (version, "ready")
                for p in self.status.processes
                if p.model
            )
        )
        self.finish(scene)

    async def bottleneck(self) -> str:
        """Return the stage with the most computing time a request, over its replicas.

        Cancellation:
            Changes nothing.
        """
        params = {"reports": True}
        found = await self.ask("GET", "/status", StatusAnswer, params=params)
        busy: dict[int, list[float]] = {}
        for process in found.processes:
            if process.is_gateway:
                continue
            report = found.worker_report(process.name)
            if report is not None:
                requests = max(1, report.counts.get("requests", 0))
                share = report.computed_s / requests / self._wanted(process.stage)
                busy.setdefault(process.stage, []).append(share)
        return self.stages[max(busy, key=lambda s: max(busy[s]))]

    def _wanted(self, stage: int) -> int:
        return self.status.wanted.models[self._model].replicas[stage]

    def _count(self, stage: int, *, going: bool = False) -> int:
        phases = ("draining", "finishing") if going else ("ready",)
        return sum(
            bool(p.model) and p.stage == stage and p.phase in phases
            for p in self.status.processes
        )

    def begin(self, title: str) -> Scene:
        """Record the start of an event; return its scene."""
        scene = Scene(title, self.now(), time.time())
        self.scenes.append(scene)
        return scene

    def finish(self, scene: Scene) -> None:
        """Record that the service has recovered from an event."""
        scene.end_s = self.now()
        self.tell(f"recovered after {scene.recovery_s:.2f} s")

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds in a status that arrives after this call.

        Raises:
            DemoFailedError: Nothing has moved for a minute.

        Cancellation:
            Changes nothing.
        """
        patience = Patience()
        fresh = self.status
        while fresh is self.status or not condition():
            if not patience.look(self._progress()):
                raise DemoFailedError(f"{self._title()}: {self._standstill()}")
            if patience.is_time_to_tell():
                self.tell(f"still waiting: {self._unfinished()}")
            await asyncio.sleep(POLL_S)

    def _progress(self) -> Hashable:
        return frozenset((p.name, p.phase) for p in self.status.processes)

    def _unfinished(self) -> str:
        found = [
            f"{p.name} {p.phase}" for p in self.status.processes if p.phase != "ready"
        ]
        return ", ".join(found) or "no process is starting or ending"

    def _standstill(self) -> str:
        return f"nothing has moved for {STILL_S:g} s: {self._unfinished()}"

    def _title(self) -> str:
        return self.scenes[-1].title if self.scenes else "the beginning"

    async def last_event(self) -> int:
        """Return the number of the controller's last event; 0 if there is none.

        Cancellation:
            Changes nothing.
        """
        events = await self.ask("GET", "/events", list[HistoryEntry])
        return events[-1].number if events else 0

    async def event(
        self, since: int, kind: str, name: str | None = None, after: float = 0.0
    ) -> HistoryEntry:
        """Wait for an event of the controller, and return it.

        Args:
            since: Number of the last event to ignore.
            kind: Kind of the event: "lost", "ready" …
            name: Process that the event is about; None: any.
            after: Earliest time of the event, in seconds since 1970.

        Raises:
            DemoFailedError: No such event came, and nothing has moved for a minute.

        Cancellation:
            Changes nothing.
        """
        patience = Patience()
        last = 0
        while patience.look((last, self._progress())):
            params = {"since": since}
            found = await self.ask("GET", "/events", list[HistoryEntry], params=params)
            for event in found:
                last = event.number
                is_its = name in (None, event.name) and event.at >= after
                if event.kind == kind and is_its:
                    return event
            if patience.is_time_to_tell():
                self.tell(f"still waiting for {kind!r}: {self._unfinished()}")
            await asyncio.sleep(POLL_S)
        raise DemoFailedError(f"{self._title()}: no {kind!r}; {self._standstill()}")
