"""Clients that ask in a closed loop. Shell."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp

from multiworld.bench.serving.services import Service


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of asking for a while."""

    latencies_s: list[float]
    took_s: float

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.latencies_s) / self.took_s

    def quantile_ms(self, share: float) -> float:
        """Milliseconds in which this share of the requests was answered."""
        ordered = sorted(self.latencies_s)
        return 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def ask(
    http: aiohttp.ClientSession, service: Service, clients: int, seconds: float
) -> Answers:
    """Let as many clients ask, each its next question after its last answer.

    Raises:
        RuntimeError: An answer was not 200.
    """
    latencies: list[float] = []
    end = time.monotonic() + seconds

    async def client() -> None:
        while (begin := time.monotonic()) < end:
            async with http.post(service.url, json=service.body) as response:
                await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{service.name} answered {response.status}")
            latencies.append(time.monotonic() - begin)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Answers(latencies, time.monotonic() - began)
