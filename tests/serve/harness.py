"""Services run by their command, and a load that checks every answer."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import orjson
import psutil
import yaml

from multiworld.serve.controller.answers import (
    FaultInjected,
    Scaled,
    StatusAnswer,
    Updated,
    decode,
)
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.controller.launchers.base import began_at
from multiworld.serve.load.generator import Load, inference
from multiworld.serve.load.summary import Sample
from tests.serve import warm
from tests.serve.models import FINE, expected

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
START_S = 90.0
READY_S = 300.0
"""Seconds that a service may take to start; Ray on a busy machine takes longest."""

WAIT_S = 40.0
"""Seconds that a step may take; a hang bound, not a timing."""

LOOK_S = 0.1
"""Seconds between two checks; each is a request to the controller."""

ENOUGH = 10
"""Answers before and after an event under a load; fewer would prove nothing."""

SPEC: dict[str, Any] = {
    "app": "under-test",
    "models": {
        "m": {
            "version": "1",
            "factory": "tests.serve.models:model",
            "deadline_s": 30.0,
            "stages": [
                {"name": "double"},
                {"name": "add", "replicas": 2, "compute_s": 3.0},
                {"name": "square"},
            ],
        }
    },
    "gateway": {"port": 0},
    "orphan_s": 2.0,
}


def spec_with(**changes: Any) -> dict[str, Any]:
    """Return the spec with changes to the app or, prefixed ``m_``, to the model."""
    spec: dict[str, Any] = json.loads(json.dumps(SPEC))
    for name, value in changes.items():
        if name.startswith("m_"):
            spec["models"]["m"][name[2:]] = copy.deepcopy(value)
        else:
            spec[name] = copy.deepcopy(value)
    return spec


def body(x: float, code: int = FINE) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1], "data": [x]},
            {"name": "code", "datatype": "INT64", "shape": [1], "data": [code]},
        ]
    }


def wait_for_exit(pid: int, began: int | None = None) -> None:
    """Wait until a process exits; ``began`` excludes a later process with its id."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if began is not None and began_at(pid) != began:
            return
        ended, _, _ = select.select([handle], [], [], WAIT_S)
        assert ended, f"still there: {pid}"
    finally:
        os.close(handle)


class Served:
    def __init__(self, folder: Path, spec: dict[str, Any], cwd: Path = ROOT) -> None:
        self.folder, self.spec, self.cwd = folder, spec, cwd
        self.path = folder / "app.yaml"
        self.state = folder / "state"
        self.target: list[str] = []  # what to serve in place of the spec
        self.process: subprocess.Popen[str] | warm.Command | None = None
        self.url = ""
        self.pids: set[tuple[int, int]] = set()

    def start(self) -> None:
        """Start the service or restart its controller, and wait until it is ready."""
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
        self.path.write_text(yaml.safe_dump(self.spec, sort_keys=False))
        target = self.target or [str(self.path)]
        words = ["serve", "--json", *target, "--state", str(self.state)]
        with open(self.folder / "serve.log", "ab") as log:
            self.process = warm.start(words, self.cwd, log)
        assert self.process.stdout is not None
        said, _, _ = select.select([self.process.stdout], [], [], READY_S)
        line = self.process.stdout.readline() if said else ""
        if said and not line:
            self.process.wait(WAIT_S)
        if not line:
            logs = self.logs()
            self.end()  # with the processes that it has started
            raise AssertionError(logs)
        self.url = decode(line, StatusAnswer).url
        self.note()

    def logs(self) -> str:
        paths = [self.folder / "serve.log", *sorted(self.state.rglob("*.log"))]
        texts = [f"{p.name}:\n{p.read_text()[-2000:]}" for p in paths if p.exists()]
        return "\n".join(texts)

    def command(self, *words: str) -> Any:
        """Run a command of the CLI with ``--json``; return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "multiworld.cli.main", *words, "--json"],
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def note(self) -> None:
        """Record every process of the service, for ``living`` to check."""
        pids = [p.pid for p in self.status().processes if p.pid]
        record = Service(None, self.state).folder.load()
        assert record is not None
        assert record.store is not None
        for pid in [*pids, record.store.pid, self.keeper()]:
            began = began_at(pid)
            if began is not None:
                self.pids.add((pid, began))

    def ask(self, method: str, path: str, kind: type[T], **what: Any) -> T:
        return Service(None, self.state).ask(method, path, kind, **what)

    def status(self, *, reports: bool = False) -> StatusAnswer:
        return self.ask("GET", "/status", StatusAnswer, params={"reports": reports})

    def scale(self, stage: str, replicas: int) -> Scaled:
        what = {"model": "m", "stage": stage, "replicas": replicas}
        return self.ask("POST", "/scale", Scaled, json=what)

    def update(self, text: str) -> Updated:
        return self.ask("POST", "/update", Updated, json={"text": text})

    def break_replica(self, action: str, stage: str, **more: Any) -> FaultInjected:
        what = {"action": action, "model": "m", "stage": stage, **more}
        return self.ask("POST", "/chaos", FaultInjected, json=what)

    def infer(self, x: float, code: int = FINE, **options: Any) -> httpx.Response:
        url = f"{self.url}/v2/models/m/infer"
        return httpx.post(url, json=body(x, code), timeout=WAIT_S, **options)

    def stages(self) -> list[int]:
        found = [0, 0, 0]
        for process in self.status().processes:
            if process.model and process.phase == "ready":
                found[process.stage] += 1
        return found

    def until(
        self, is_so: Callable[[], bool], what: str, limit_s: float = WAIT_S
    ) -> None:
        limit = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < limit, f"{what}: {self.status()}"
            time.sleep(LOOK_S)  # a condition of any kind has no event
        self.note()

    def events(self, kind: str = "") -> list[HistoryEntry]:
        found = self.ask("GET", "/events", list[HistoryEntry])
        return [e for e in found if kind in ("", e.kind)]

    def fork_server(self) -> int:
        assert self.process is not None
        found: list[int] = [
            child.pid
            for child in psutil.Process(self.process.pid).children()
            if child.cmdline()[:1] == ["multiworld fork server"]
        ]
        return found[0]

    def keeper(self) -> int:
        """Return the process id of the stream keeper, the controller's child; or 0."""
        path = str(self.state / "keep.sock")
        for process in psutil.process_iter(["cmdline"]):
            if path in (process.info["cmdline"] or []):
                return int(process.pid)
        return 0

    def heartbeat_helpers(self) -> list[int]:
        return [
            child.pid
            for process in self.status().processes
            for child in psutil.Process(process.pid).children()
            if any("heartbeat_helper" in word for word in child.cmdline())
        ]

    def store(self) -> int:
        pid: int = self._store_record()["pid"]
        return pid

    def store_port(self) -> int:
        address: str = self._store_record()["address"]
        return int(address.rpartition(":")[2])

    def _store_record(self) -> dict[str, Any]:
        record = json.loads((self.state / "record.json").read_text())
        found: dict[str, Any] = record["store"]
        return found

    def living(self) -> list[int]:
        return [pid for pid, began in self.pids if began_at(pid) == began]

    def wait_gone(self) -> None:
        for pid, began in self.pids:
            wait_for_exit(pid, began)

    def kill_controller(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill_all(self) -> None:
        """Kill the controller, the store and all processes, as a power cut does."""
        self.note()
        helpers = self.heartbeat_helpers()
        self.kill_controller()
        for pid in [*(pid for pid, _ in self.pids), *helpers]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_gone()

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Shut the service down; the caller checks that no process is left."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(WAIT_S)
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()

    def destroy(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
        for pid, began in self.pids:
            if began_at(pid) == began:
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def served(
    folder: Path,
    spec: dict[str, Any],
    cwd: Path = ROOT,
    target: Sequence[str] = (),
) -> Iterator[Served]:
    """Run a service, and check that no process of it is left."""
    folder.mkdir(parents=True, exist_ok=True)
    service = Served(folder, spec, cwd)
    service.target = list(target)
    try:
        service.start()
        yield service
        service.end()
        service.wait_gone()
    finally:
        service.destroy()


class Traffic:
    def __init__(self, service: Served, rate: float, code: int = FINE) -> None:
        self._numbers = [n / 4 for n in range(400)]
        bodies = [orjson.dumps(body(x, code)) for x in self._numbers]
        self.load = Load(inference(service.url, "m", bodies), rate, self._check)
        self._answered = 0
        self._has_answered = asyncio.Event()

    def _check(self, number: int, answer: Any) -> bool:
        self._answered += 1
        self._has_answered.set()
        x = self._numbers[number % len(self._numbers)]
        values: list[float] = answer["outputs"][0]["data"]
        return values == [expected(x)]

    async def goes_on(self, answers: int = ENOUGH) -> None:
        """Wait until this many more requests have been answered, from now."""
        wanted = self._answered + answers
        try:
            async with asyncio.timeout(WAIT_S):
                while self._answered < wanted:
                    self._has_answered.clear()
                    await self._has_answered.wait()
        except TimeoutError:
            raise AssertionError(f"answers stay out: {self.bad[:5]}") from None

    @property
    def bad(self) -> list[Sample]:
        return [s for s in self.load.samples if not (s.is_answered and s.is_right)]


@contextlib.asynccontextmanager
async def traffic(
    service: Served, rate: float = 40.0, code: int = FINE
) -> AsyncIterator[Traffic]:
    """Send requests during the block; all must be answered, and correctly.

    Requests are being answered when the block begins, and again when it has ended.
    """
    made = Traffic(service, rate, code)
    running = asyncio.ensure_future(made.load.run())
    try:
        await made.goes_on()
        yield made
        await made.goes_on()
    finally:
        made.load.end()
        await running
    assert made.load.sent == len(made.load.samples)
    assert not made.bad, made.bad[:5]
