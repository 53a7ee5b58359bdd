"""The demo's three tenants and their loads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from multiworld.serve.load.generator import Check, Load, Target
from multiworld.serve.simulation.traces import generated

LONG_S = 900.0
"""Seconds that a tenant's trace covers; the demo ends before."""


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """One phase of a tenant's load; the phases repeat.

    Attributes:
        rate_factor: Rate, as a multiple of the demo's base rate.
        seconds: Length of the phase.
        cv: Coefficient of variation of the times between requests; 1 is Poisson.
    """

    rate_factor: float
    seconds: float
    cv: float = 1.0


@dataclass(frozen=True, slots=True)
class DemoTenant:
    """A tenant and its load.

    Attributes:
        name: Name of the tenant.
        model: Model that it sends requests to.
        phases: Phases of its load, repeated in this order.
        settings: Options of ``multiworld tenants create``.
        is_flood: Sends only during the flood, much more than the service can answer.
    """

    name: str
    model: str
    phases: tuple[LoadPhase, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    is_flood: bool = False


TENANTS = (
    DemoTenant(
        "shop",
        "encoder",
        (LoadPhase(0.5, 15, 1.5), LoadPhase(3.0, 25, 1.5), LoadPhase(0.5, 20, 1.5)),
        {"weight": 2.0},
    ),
    DemoTenant("bank", "search", (LoadPhase(0.5, 30),), {"models": ["search"]}),
    DemoTenant(
        "lab",
        "encoder",
        (LoadPhase(12.0, 30),),
        {"weight": 0.5, "max_parallel_requests": 24},
        is_flood=True,
    ),
)


def load_of(
    tenant: DemoTenant, target: Target, key: str, rate: float, check: Check
) -> Load:
    """Return the load of a tenant.

    Args:
        tenant: The tenant.
        target: URL, bodies and headers to send, without the key.
        key: API key of the tenant.
        rate: Base rate that the phases multiply, in requests a second.
        check: Function that says whether an answer is right.
    """
    texts = [
        f"gamma:rate={phase.rate_factor * rate},seconds={phase.seconds},cv={phase.cv}"
        for phase in tenant.phases
    ]
    period_s = sum(phase.seconds for phase in tenant.phases)
    due: list[float] = []
    for number in range(int(LONG_S / period_s)):
        found = generated("+".join(texts), seed=100 * number)
        due += [number * period_s + arrival.at for arrival in found]
    headers = {**target.headers, "Authorization": f"Bearer {key}"}
    asked = dataclasses.replace(target, headers=headers)
    return Load(asked, rate, check, due=due)
