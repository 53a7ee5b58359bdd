"""The steps in flight in a pipeline, as seen by stage 0. Pure.

A step is split where its sequences use different replicas, and its parts return one by
one. Sequences of one route stay together: one that is missing when the others of its
route return will never return. A missing sequence, and a step of which nothing returns,
indicate an undetected fault of a later stage.

A step that takes several times as long as others is *late*: other sequences no longer
wait for those in it, if another step may start. A late step is *passed* once a part of
it, or of a step after it, has returned: then it does not count towards ``max_steps``,
and its sequences are in no further step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from multiworld.serve.deadlines import COUNTED_S, GRACE_S, LATE_FACTOR, LATE_S
from multiworld.serve.wire.generation_messages import StepPart
from multiworld.serve.wire.protocol import Key

FORGET = 0.9  # minimum factor by which one step lowers ``_late_after_s``


@dataclass(slots=True)
class _Step:
    waits_for: set[Key]
    samples: Collection[Key]
    cost: float
    began: float
    # Seconds for which it has waited; None: no check has seen it yet.
    waited_s: float | None = None


def _sequences_of(steps: Iterable[_Step]) -> set[Key]:
    return {key for step in steps for key in step.waits_for}


class StepsInFlight:
    """Steps that have not returned completely."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self._steps: dict[int, _Step] = {}
        self._missing: dict[Key, float | None] = {}
        self._checked_at = self._now = 0.0
        self._late_after_s = math.inf  # infinite until a step has returned
        self._returned = 0  # number of the latest step of which a part has returned
        self.last_number = 0

    def __len__(self) -> int:
        return len(self._steps)

    def update(self, now: float) -> None:
        self._now = now

    def _is_late(self, step: _Step) -> bool:
        return self._now >= step.began + self._late_after_s

    def _is_passed(self, number: int, step: _Step) -> bool:
        return number <= self._returned and self._is_late(step)

    def _unpassed(self) -> list[_Step]:
        steps = self._steps.items()
        return [step for number, step in steps if not self._is_passed(number, step)]

    @property
    def unpassed_count(self) -> int:
        """Number of steps that are not passed."""
        return len(self._unpassed())

    def late(self) -> set[Key]:
        """Return the sequences in steps that are late."""
        return _sequences_of(s for s in self._steps.values() if self._is_late(s))

    def passed(self) -> set[Key]:
        """Return the sequences in steps that are passed."""
        steps = self._steps.items()
        return _sequences_of(step for n, step in steps if self._is_passed(n, step))

    @property
    def next_late_at(self) -> float:
        """Time at which the next step is late; infinite if none will be."""
        steps = (s for s in self._steps.values() if not self._is_late(s))
        return min((s.began for s in steps), default=math.inf) + self._late_after_s

    def __contains__(self, key: Key) -> bool:
        return any(key in step.waits_for for step in self._steps.values())

    @property
    def cost(self) -> float:
        """Total cost of the steps that are not passed, in rows."""
        return sum(step.cost for step in self._unpassed())

    def begin(self, parts: Collection[StepPart], cost: float = 0.0) -> int:
        """Add a step that costs ``cost`` rows; return its number."""
        self.last_number += 1
        waits_for = {part.key for part in parts}
        samples = frozenset(part.key for part in parts if part.samples)
        self._steps[self.last_number] = _Step(waits_for, samples, cost, self._now)
        for key in waits_for:
            self._missing.pop(key, None)
        return self.last_number

    def is_waited_for(self, number: int, key: Key) -> bool:
        step = self._steps.get(number)
        return step is not None and key in step.waits_for

    def samples(self, number: int, key: Key) -> bool:
        step = self._steps.get(number)
        return step is not None and key in step.samples

    def remove(self, number: int, key: Key) -> None:
        """Remove a sequence from a step: it has returned, or never will."""
        step = self._steps.get(number)
        if step is not None:
            step.waits_for.discard(key)
            if not step.waits_for:
                del self._steps[number]

    def record_return(self, number: int, now: float) -> None:
        """Record that a step has returned, at least in part."""
        step = self._steps.get(number)
        if step is None or self._is_passed(number, step):
            return  # a step that was passed does not show how long steps take
        self._returned = max(self._returned, number)
        late_after_s = LATE_FACTOR * (now - step.began)
        if math.isfinite(self._late_after_s):
            # Raise the limit by at most ``LATE_FACTOR``, so that one late step does not
            # hide later ones.
            late_after_s = min(late_after_s, LATE_FACTOR * self._late_after_s)
            late_after_s = max(late_after_s, FORGET * self._late_after_s)
        self._late_after_s = max(LATE_S, late_after_s)

    def leave(self, key: Key) -> None:
        """Record that a sequence does not return in any step."""
        self._missing.pop(key, None)
        for number in list(self._steps):
            self.remove(number, key)

    def record_missing(
        self,
        number: int,
        routes: Collection[Sequence[str]],
        route_of: Callable[[Key], Sequence[str]],
    ) -> None:
        """Record the sequences of ``routes`` that did not return with the others."""
        step = self._steps.get(number)
        for key in [] if step is None else list(step.waits_for):
            route = route_of(key)
            if route and route in routes:
                self.remove(number, key)
                self._missing[key] = None

    def excuse(self, now: float) -> None:
        """Restart the wait for missing sequences, because this process was stopped."""
        for key, since in self._missing.items():
            self._missing[key] = None if since is None else now

    def overdue(self, now: float, max_s: float) -> list[Key]:
        """Return sequences that are missing or overdue; call it periodically."""
        found: list[Key] = []
        for key, since in list(self._missing.items()):
            if since is None:
                self._missing[key] = now
            elif now - since >= GRACE_S:
                found.append(key)
        counted_s = min(now - self._checked_at, COUNTED_S)
        self._checked_at = now
        for step in self._steps.values():
            if step.waited_s is None:
                step.waited_s = 0.0
                continue
            step.waited_s += counted_s
            if step.waited_s > max_s:
                found += step.waits_for
        return found
