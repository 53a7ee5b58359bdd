"""Breakdown of the time and CPU of requests, as the service tells it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from multiworld.serve.load.summary import Sample, quantile

CPU = "multiworld_process_cpu_seconds_total"
"""Metric with the CPU time of each process."""

OUTSIDE = "outside"
"""Phase for what the service does not see: the client, the network, and the wait of a
generator that is late."""


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase of many requests.

    Attributes:
        phase: Its name.
        mean_s: Mean seconds of a request.
        p50_s: Median seconds.
        p99_s: 99 % quantile of the seconds.
    """

    phase: str
    mean_s: float
    p50_s: float
    p99_s: float


def phases_of(header: str | None) -> dict[str, float] | None:
    """Return the seconds in a ``Server-Timing`` header, by name.

    Args:
        header: Value of the header; None: not sent.

    Returns:
        The seconds; None if there are none or they cannot be read.
    """
    found: dict[str, float] = {}
    for part in (header or "").split(","):
        name, _, duration = part.strip().partition(";dur=")
        try:
            found[name] = float(duration) / 1000
        except ValueError:
            return None
    return found


def phases_in(samples: Iterable[Sample]) -> list[PhaseSummary]:
    """Return each phase of the requests that were answered with their phases."""
    columns: dict[str, list[float]] = {}
    for sample in samples:
        if sample.is_answered and sample.phases:
            inside = sum(sample.phases.values())
            outside = max(0.0, sample.latency_s - inside)
            for phase, seconds in {**sample.phases, OUTSIDE: outside}.items():
                columns.setdefault(phase, []).append(seconds)
    return [
        PhaseSummary(
            phase,
            sum(column) / len(column),
            quantile(column, 0.5),
            quantile(column, 0.99),
        )
        for phase, column in columns.items()
    ]


def cpu_in(metrics: str) -> dict[str, float]:
    """Return the seconds of CPU time of each process in the text of ``/metrics``."""
    return {
        sample.labels["process"]: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == CPU
    }


def cpu_between(
    before: dict[str, float], after: dict[str, float], requests: int
) -> dict[str, float]:
    """Return the seconds of CPU time that one request took, by process.

    Args:
        before: Seconds of each process before the requests.
        after: Seconds afterwards; a process that is only here has started meanwhile.
        requests: Number of requests.
    """
    if not requests:
        return {}
    return {
        name: max(0.0, seconds - before.get(name, 0.0)) / requests
        for name, seconds in sorted(after.items())
    }
