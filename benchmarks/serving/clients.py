"""Clients that send requests in a closed loop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp

from benchmarks.serving.services import Service


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to one run of the clients.

    Attributes:
        latencies_s: Latency of each request, in seconds.
        took_s: Length of the run, in seconds.
    """

    latencies_s: list[float]
    took_s: float

    @property
    def rate(self) -> float:
        """Answered requests per second."""
        return len(self.latencies_s) / self.took_s

    def quantile_ms(self, share: float) -> float:
        """Return a quantile of the latencies, in milliseconds."""
        ordered = sorted(self.latencies_s)
        return 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def ask(
    http: aiohttp.ClientSession, service: Service, clients: int, seconds: float
) -> Answers:
    """Send requests from closed-loop clients until ``seconds`` have passed."""
    latencies: list[float] = []
    end = time.monotonic() + seconds

    async def client() -> None:
        while (begin := time.monotonic()) < end:
            async with http.post(service.url, json=service.body) as response:
                await response.read()
                if response.status != 200:
                    raise RuntimeError(
                        f"{service.name} answered with status {response.status}"
                    )
            latencies.append(time.monotonic() - begin)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Answers(latencies, time.monotonic() - began)
