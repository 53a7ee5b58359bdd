"""Simulated service of 200 replicas and 500 streams, whose numbers all change."""

from __future__ import annotations

import random
import time
from typing import Any

from multiworld.serve.controller.observe.facts import (
    Facts,
    ModelFacts,
    ReplicaFacts,
    Series,
    StageFacts,
    StreamFacts,
)

STAGES, REPLICAS, STREAMS = 4, 50, 500


class LargeService:
    """Stand-in for a controller's client."""

    def __init__(self) -> None:
        self._draw, self._looks = random.Random(1), 0

    def ask(self, method: str, path: str, kind: type, **more: Any) -> Any:
        if path == "/series":
            return Series({})
        self._looks += 1
        return Facts(
            app="large",
            url="http://127.0.0.1:1",
            at=time.time(),
            is_ready=True,
            controller=1,
            trouble="",
            models={"m": self._model()},
            replicas={
                name: self._replica(stage)
                for stage in range(STAGES)
                for name in names_of(stage)
            },
            gateways={},
            tenants={},
            nodes={},
            events=(),
            thoughts=(),
            streams={f"gateway/1/{n}": self._stream(n) for n in range(STREAMS)},
            tokens=1000 * self._looks,
        )

    def _model(self) -> ModelFacts:
        stages = (StageFacts(f"s{k}", REPLICAS, names_of(k)) for k in range(STAGES))
        chains = tuple((chain_of(n), STREAMS // REPLICAS) for n in range(REPLICAS))
        speed = self._draw.uniform(9e3, 1e4)
        return ModelFacts(
            version="1", stages=tuple(stages), tokens_s=speed, chains=chains
        )

    def _replica(self, stage: int) -> ReplicaFacts:
        return ReplicaFacts(
            model="m",
            version="1",
            stage=stage,
            phase="ready",
            since_s=self._looks,
            pid=1,
            node="here",
            load=self._draw.randint(0, 20),
            kv_usage=self._draw.random(),
            memory_bytes=self._draw.randint(2**29, 2**30),
            booked_memory_bytes=2**30,
            cores=round(self._draw.random(), 2),
            step_s=self._draw.random() / 100,
            next=names_of(stage + 1) if stage + 1 < STAGES else (),
        )

    def _stream(self, number: int) -> StreamFacts:
        return StreamFacts(
            request=f"r-{number:032x}",
            gateway="gateway/1",
            tenant="acme",
            model="m",
            prompt=300,
            made=30 * self._looks + number,
            began_at=1e9 + number,
            phase="computing",
            chain=chain_of(number % REPLICAS),
            attempt=0,
            losses=0,
            longest_s=0.1,
        )


def names_of(stage: int) -> tuple[str, ...]:
    return tuple(f"m/{stage}/{REPLICAS * stage + n}" for n in range(REPLICAS))


def chain_of(number: int) -> tuple[str, ...]:
    return tuple(names_of(stage)[number] for stage in range(STAGES))
