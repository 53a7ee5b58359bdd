"""The three tenants of the demo, and what each of them asks for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from multiworld.serve.load.generator import Check, Load, Target
from multiworld.serve.simulation.traces import generated

LONG_S = 900.0
"""Traces are made for so long; the demo ends before."""


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """A part of what a tenant asks, again and again.

    Attributes:
        times: Of the demo's rate.
        cv: Coefficient of variation of the distances; 1: as by chance.
    """

    times: float
    seconds: float
    cv: float = 1.0


@dataclass(frozen=True, slots=True)
class Guest:
    """A tenant.

    Attributes:
        settings: As ``multiworld tenants create`` has them.
        is_flood: It asks for much more than there is, when the story says so.
    """

    name: str
    model: str
    parts: tuple[LoadPhase, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    is_flood: bool = False


GUESTS = (
    Guest(
        "shop",
        "encoder",
        (LoadPhase(0.5, 15, 1.5), LoadPhase(3.0, 25, 1.5), LoadPhase(0.5, 20, 1.5)),
        {"weight": 2.0},
    ),
    Guest("bank", "search", (LoadPhase(0.5, 30),), {"models": ["search"]}),
    Guest(
        "lab",
        "encoder",
        (LoadPhase(12.0, 30),),
        {"weight": 0.5, "max_parallel_requests": 24},
        is_flood=True,
    ),
)


def load_of(guest: Guest, target: Target, key: str, rate: float, check: Check) -> Load:
    """Return the load of a tenant.

    Args:
        rate: Requests a second that the parts are multiples of.
    """
    texts = [
        f"gamma:rate={part.times * rate},seconds={part.seconds},cv={part.cv}"
        for part in guest.parts
    ]
    period_s = sum(part.seconds for part in guest.parts)
    due: list[float] = []
    for number in range(int(LONG_S / period_s)):
        found = generated("+".join(texts), seed=100 * number)
        due += [number * period_s + arrival.at for arrival in found]
    headers = {**target.headers, "Authorization": f"Bearer {key}"}
    asked = dataclasses.replace(target, headers=headers)
    return Load(asked, rate, check, due=due)
