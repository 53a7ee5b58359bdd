"""Which requests of whom are not tried again, as they kill what computes them. Pure.

A router finds out which request kills replicas, at the price of two of them. The same
request of the same tenant is then refused at once; and a tenant of which several have
been found in a short time is refused for that model for a while, longer each time. What
others ask is not touched by it, not even the very same request.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

POISON_S = 3600.0
"""A request that was found poisonous is refused for so long."""

MAX_POISON = 1024
"""Most of them that are remembered, of one tenant."""

POISON_LIMIT, WINDOW_S = 3, 300.0
"""A tenant of which so many are found in so short a time is refused for a while …"""

FIRST_QUARANTINE_S, LONGEST_QUARANTINE_S = 30.0, 3600.0
"""… of this length at first, and twice as long each time."""

TenantModel = tuple[str, str]
"""Tenant and model."""


@dataclass(slots=True)
class _Record:
    poison: OrderedDict[str, float] = field(default_factory=OrderedDict)
    found_at: list[float] = field(default_factory=list)
    quarantined_until: float = 0.0
    quarantines: int = 0


class Quarantine:
    """What is known of poisonous requests, by tenant and model."""

    def __init__(self) -> None:
        self._records: dict[TenantModel, _Record] = {}

    def has_records(self, tenant: str, model: str) -> bool:
        """Return whether anything is known: only then is a digest needed."""
        return (tenant, model) in self._records

    def add(self, tenant: str, model: str, digest: str, now: float) -> float:
        """Take note of a poisonous request; return for how long its tenant is refused.

        0: it is not; only this request is.
        """
        record = self._records.setdefault((tenant, model), _Record())
        record.poison[digest] = now
        record.poison.move_to_end(digest)
        while len(record.poison) > MAX_POISON:
            record.poison.popitem(last=False)
        record.found_at = [at for at in record.found_at if now - at < WINDOW_S] + [now]
        # Once it was refused for a while, one more is enough: it was warned.
        if tenant and (len(record.found_at) >= POISON_LIMIT or record.quarantines):
            length = min(
                LONGEST_QUARANTINE_S, FIRST_QUARANTINE_S * 2.0**record.quarantines
            )
            record.quarantined_until, record.quarantines = (
                now + length,
                record.quarantines + 1,
            )
            record.found_at.clear()
            return length
        return 0.0

    def remaining_s(self, tenant: str, model: str, now: float) -> float:
        """Return for how long all of a tenant's requests for a model are refused."""
        record = self._records.get((tenant, model))
        return 0.0 if record is None else max(0.0, record.quarantined_until - now)

    def is_poison(self, tenant: str, model: str, digest: str, now: float) -> bool:
        """Return whether this request was found poisonous not long ago."""
        record = self._records.get((tenant, model))
        at = None if record is None else record.poison.get(digest)
        return at is not None and now - at < POISON_S

    def prune(self, now: float) -> None:
        """Forget what is long ago."""
        for tenant_model, record in list(self._records.items()):
            for digest, at in list(record.poison.items()):
                if now - at >= POISON_S:
                    del record.poison[digest]
            if (
                not record.poison
                and record.quarantined_until < now - LONGEST_QUARANTINE_S
            ):
                del self._records[tenant_model]
