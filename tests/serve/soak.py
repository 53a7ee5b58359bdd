"""Soak test of a service: random faults under a load that checks every answer."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from multiworld.cli.ending import end_as_ctrl_c
from multiworld.errors import ServeError
from multiworld.serve.controller.answers import Drained
from multiworld.serve.load.summary import summarise
from tests.serve.harness import Served, Traffic, served, spec_with
from tests.serve.sizes import Size, grown, sizes_of

RATE = 50.0
PAUSE_S = (0.3, 2.5)
"""Minimum and maximum seconds between two faults."""
QUIET_S = 3.0
"""Seconds without load before the sizes of processes are compared."""
STAGES = ("double", "add", "square")
FAULTS = {"kill": 6, "stop": 2, "cut": 1, "drain": 2, "scale": 2, "update": 1}


@dataclass(slots=True)
class Outcome:
    seed: int
    minutes: float
    faults: dict[str, int] = field(default_factory=dict)
    sent: int = 0
    answered: int = 0
    lost: int = 0
    wrong: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0
    examples: list[str] = field(default_factory=list)
    before: dict[str, Size] = field(default_factory=dict)
    after: dict[str, Size] = field(default_factory=dict)
    each_minute: list[dict[str, Size]] = field(default_factory=list)

    @property
    def grown(self) -> list[str]:
        return grown(self.before, self.after)

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.wrong or self.grown)


class Soak:
    def __init__(self, service: Served, seed: int, minutes: float) -> None:
        self._service = service
        self._chance = random.Random(seed)
        self._version = 1
        self.outcome = Outcome(seed, minutes)
        self._faults: Counter[str] = Counter()

    async def run(self) -> Outcome:
        await asyncio.sleep(QUIET_S)
        self.outcome.before = sizes_of(self._service)
        traffic = Traffic(self._service, RATE)
        running = asyncio.ensure_future(traffic.load.run())
        end = time.monotonic() + 60 * self.outcome.minutes
        look_at = time.monotonic()
        try:
            while time.monotonic() < end:
                await asyncio.sleep(self._chance.uniform(*PAUSE_S))
                await self._one()
                if time.monotonic() >= look_at:
                    look_at += 60
                    self.outcome.each_minute.append(sizes_of(self._service))
            await asyncio.to_thread(self._service.until, self._is_ready, "the end")
        finally:
            traffic.load.end()
            await running
        await asyncio.sleep(QUIET_S)
        found = summarise(traffic.load.samples)
        self.outcome.after = sizes_of(self._service)
        self.outcome.faults = dict(self._faults)
        self.outcome.sent, self.outcome.answered = traffic.load.sent, found.answered
        self.outcome.lost = traffic.load.sent - found.answered
        self.outcome.wrong = found.wrong
        self.outcome.p50_s, self.outcome.p99_s = found.p50_s, found.p99_s
        self.outcome.max_s = found.max_s
        self.outcome.examples = [str(sample) for sample in traffic.bad[:5]]
        return self.outcome

    def _is_ready(self) -> bool:
        return self._service.status().is_ready

    async def _one(self) -> None:
        kinds, weights = list(FAULTS), list(FAULTS.values())
        (kind,) = self._chance.choices(kinds, weights)
        stage = self._chance.choice(STAGES)
        try:
            await asyncio.to_thread(self._do, kind, stage)
            self._faults[kind] += 1
        except ServeError:
            pass  # no replica is ready there: the service still heals the last fault

    def _do(self, kind: str, stage: str) -> None:
        service = self._service
        match kind:
            case "scale":
                service.scale(stage, self._chance.randint(1, 3))
            case "update":
                self._version += 1
                text = yaml.safe_dump(spec_with(m_version=str(self._version)))
                service.update(text)
            case "drain":
                names = [p.name for p in service.status().processes if p.model]
                what = {"name": self._chance.choice(names)}
                service.ask("POST", "/drain", Drained, json=what)
            case _:
                seconds = self._chance.uniform(0.5, 4.0)
                service.break_replica(kind, stage, seconds=seconds)
        service.note()


def soak(folder: Path, seed: int, minutes: float) -> Outcome:
    with served(folder, spec_with()) as service:
        return asyncio.run(Soak(service, seed, minutes).run())


def main() -> int:
    """Run the soak, and print its results; return 1 if anything was lost or leaked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    end_as_ctrl_c()
    with tempfile.TemporaryDirectory() as folder:
        outcome = soak(Path(folder), given.seed, given.minutes)
    shown = {**asdict(outcome), "grown": outcome.grown}
    if not outcome.grown:  # otherwise they show what has grown
        for name in ("before", "after", "each_minute"):
            del shown[name]
    print(json.dumps(shown, indent=2))  # noqa: T201
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
