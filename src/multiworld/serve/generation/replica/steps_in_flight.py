"""The steps that the stages of a pipeline compute now, as stage 0 sees them. Pure.

A step may be split on its way, where its sequences use different replicas; the parts
come back one by one. Sequences of one route stay together, so one that is missing from
what came back of its route does not come back at all. That, and a step of which nothing
comes back, takes a fault of a later stage that nobody has noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from multiworld.serve.transport.generation_messages import StepPart
from multiworld.serve.transport.protocol import Key

GRACE_S = 1.0
"""Seconds for which a sequence may be missing: its end may be under way. Also the time
between two looks."""


@dataclass(slots=True)
class _Step:
    waits_for: set[Key]
    samples: Collection[Key]
    cost: float = 0.0
    seen_at: float | None = None


class StepsUnderWay:
    """Steps that have not come back completely."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._missing: dict[Key, float | None] = {}
        self.last_number = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, key: Key) -> bool:
        return any(key in step.waits_for for step in self._steps.values())

    @property
    def cost(self) -> float:
        """Cost of all steps in flight together, in rows."""
        return sum(step.cost for step in self._steps.values())

    def begin(self, parts: Collection[StepPart], cost: float = 0.0) -> int:
        """Add a step; return its number.

        Args:
            parts: Its parts.
            cost: What it costs, in rows.
        """
        self.last_number += 1
        waits_for = {part.key for part in parts}
        samples = frozenset(part.key for part in parts if part.samples)
        self._steps[self.last_number] = _Step(waits_for, samples, cost)
        for key in waits_for:
            self._missing.pop(key, None)
        return self.last_number

    def is_waited_for(self, number: int, key: Key) -> bool:
        """Tell whether a step waits for a sequence."""
        step = self._steps.get(number)
        return step is not None and key in step.waits_for

    def samples(self, number: int, key: Key) -> bool:
        """Tell whether a step samples the next token of a sequence."""
        step = self._steps.get(number)
        return step is not None and key in step.samples

    def came_back(self, number: int, key: Key) -> None:
        """Record that a sequence has come back, or will not."""
        step = self._steps.get(number)
        if step is not None:
            step.waits_for.discard(key)
            if not step.waits_for:
                del self._steps[number]

    def leave(self, key: Key) -> None:
        """Record that a sequence does not come back in any step."""
        self._missing.pop(key, None)
        for number in list(self._steps):
            self.came_back(number, key)

    def left_out(
        self,
        number: int,
        routes: Collection[Sequence[str]],
        route_of: Callable[[Key], Sequence[str]],
    ) -> None:
        """Record the sequences that should have come back with others, and did not.

        Args:
            number: Number of the step.
            routes: Replicas by stage of those that came back.
            route_of: Returns those of any.
        """
        step = self._steps.get(number)
        for key in [] if step is None else list(step.waits_for):
            route = route_of(key)
            if route and route in routes:
                self.came_back(number, key)
                self._missing[key] = None

    def excuse(self, now: float) -> None:
        """Measure all times from now on.

        Args:
            now: Time in seconds.
        """
        for key, since in self._missing.items():
            self._missing[key] = None if since is None else now
        for step in self._steps.values():
            step.seen_at = None if step.seen_at is None else now

    def overdue(self, now: float, most_s: float) -> list[Key]:
        """Return sequences that do not come back; call it again and again.

        Args:
            now: Time in seconds.
            most_s: Seconds that a step may take.
        """
        found: list[Key] = []
        for key, since in list(self._missing.items()):
            if since is None:
                self._missing[key] = now
            elif now - since >= GRACE_S:
                found.append(key)
        for step in self._steps.values():
            if step.seen_at is None:
                step.seen_at = now
            elif now - step.seen_at > most_s:
                found += step.waits_for
        return found
