"""Who is next where several tenants wait: weighted fair shares. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Every piece of work gets
a start tag: where its tenant's last piece ends, in a time that runs with what is
served, or now if that was earlier. The smallest tag is next. So a tenant with much that
waits gets its share and no more, one that asks seldom is next as soon as it asks, and
what nobody else wants is had by whoever wants it. Of one tenant's work, what came first
is first.
"""

from __future__ import annotations

from dataclasses import dataclass

MANY = 1024
"""Tenants that are remembered before those without claims are forgotten."""


@dataclass(frozen=True, slots=True)
class Share:
    """Whose work it is, and what that counts.

    Attributes:
        tenant: Its name; empty for whoever has none.
        weight: Of its share beside others'.
        priority: Work of a higher one comes first, always.
    """

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0


NOBODYS = Share()

Turn = tuple[int, float, int]
"""What orders work: the smallest is next."""


class FairOrder:
    """The turns at one queue."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def turn(self, share: Share, cost: float, number: int) -> Turn:
        """Return the turn of a piece of work that has come.

        Args:
            cost: What it takes, in any unit: rows, say.
            number: Orders what has come at the same moment.
        """
        start = max(self._now, self._ends.get(share.tenant, 0.0))
        self._ends[share.tenant] = start + cost / share.weight
        if len(self._ends) > MANY:
            self._ends = {n: end for n, end in self._ends.items() if end > self._now}
        return -share.priority, start, number

    def served(self, turn: Turn) -> None:
        """Take note that work is served: time goes on."""
        self._now = max(self._now, turn[1])

    def withdrawn(self, share: Share, cost: float) -> None:
        """Take note that work has gone without having been served: it costs nothing."""
        end = self._ends.get(share.tenant)
        if end is not None:
            self._ends[share.tenant] = max(self._now, end - cost / share.weight)
