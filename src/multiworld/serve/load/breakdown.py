"""Breakdown of the time and CPU of requests, as reported by the service. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from multiworld.serve.load.summary import Sample, quantile

CPU = "multiworld_process_cpu_seconds_total"  # CPU time of each process

# Time outside the service: in the client, the network, or a late generator.
OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    phase: str
    mean_s: float
    p50_s: float
    p99_s: float


def phases_of(header: str | None) -> dict[str, float] | None:
    """Return the seconds of each phase in a ``Server-Timing`` header, or None."""
    found: dict[str, float] = {}
    for part in (header or "").split(","):
        name, _, duration = part.strip().partition(";dur=")
        try:
            found[name] = float(duration) / 1000
        except ValueError:
            return None
    return found


def phases_in(samples: Iterable[Sample]) -> list[PhaseSummary]:
    """Summarise each phase over the answered requests that reported phases."""
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
    """Return each process's CPU time, from the text of ``/metrics``."""
    return {
        sample.labels["process"]: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == CPU
    }


def cpu_between(
    before: dict[str, float], after: dict[str, float], requests: int
) -> dict[str, float]:
    """Return the CPU time per request, by process."""
    if not requests:
        return {}
    return {
        name: max(0.0, seconds - before.get(name, 0.0)) / requests
        for name, seconds in sorted(after.items())
    }
