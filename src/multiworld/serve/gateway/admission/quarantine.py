"""Quarantine: refusal of poison requests, and of tenants that send several. Pure.

A poison request kills the replicas that compute it. A gateway identifies such a request
after it has killed two replicas in isolation. For ``POISON_S`` after that, the same
request of the same tenant is refused. A tenant that sends ``POISON_LIMIT`` poison
requests to a model within ``WINDOW_S`` is quarantined: all its requests to that model
are refused, for a longer time with each quarantine. Other tenants are not affected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

POISON_S = 3600.0  # seconds for which a poison request is refused
MAX_POISON = 1024  # poison requests remembered per tenant and model
# ``POISON_LIMIT`` poison requests within ``WINDOW_S`` seconds quarantine a tenant.
POISON_LIMIT, WINDOW_S = 3, 300.0

# Seconds of a tenant's first quarantine, and of its longest one. Each quarantine is
# twice as long as the previous one.
FIRST_QUARANTINE_S, LONGEST_QUARANTINE_S = 30.0, 3600.0

TenantModel = tuple[str, Hashable]


@dataclass(slots=True)
class _Record:
    # Time at which each poison request was last found, by digest of the request.
    poison: OrderedDict[str, float] = field(default_factory=OrderedDict)
    # Times of poison requests that count towards a quarantine.
    found_at: list[float] = field(default_factory=list)
    quarantined_until: float = 0.0
    quarantines: int = 0


class Quarantine:
    """Poison requests and quarantines, by tenant and model."""

    def __init__(self) -> None:
        self._records: dict[TenantModel, _Record] = {}

    def has_records(self, tenant: str, model: Hashable) -> bool:
        """Return whether a tenant sent poison requests, so that digests are needed."""
        return (tenant, model) in self._records

    def add(self, tenant: str, model: Hashable, digest: str, now: float) -> float:
        """Record a poison request; return the resulting quarantine in seconds, or 0."""
        record = self._records.setdefault((tenant, model), _Record())
        record.poison[digest] = now
        record.poison.move_to_end(digest)
        while len(record.poison) > MAX_POISON:
            record.poison.popitem(last=False)
        record.found_at = [at for at in record.found_at if now - at < WINDOW_S] + [now]
        # Clients without a key share the tenant "", which is never quarantined. After a
        # tenant's first quarantine, a single poison request causes the next one.
        if tenant and (len(record.found_at) >= POISON_LIMIT or record.quarantines):
            length = min(
                LONGEST_QUARANTINE_S, FIRST_QUARANTINE_S * 2.0**record.quarantines
            )
            record.quarantined_until = now + length
            record.quarantines += 1
            record.found_at.clear()
            return length
        return 0.0

    def remaining_s(self, tenant: str, model: Hashable, now: float) -> float:
        record = self._records.get((tenant, model))
        return 0.0 if record is None else max(0.0, record.quarantined_until - now)

    def is_poison(self, tenant: str, model: Hashable, digest: str, now: float) -> bool:
        record = self._records.get((tenant, model))
        at = None if record is None else record.poison.get(digest)
        return at is not None and now - at < POISON_S

    def prune(self, now: float) -> None:
        """Forget poison requests and quarantines that are too old to matter."""
        for tenant_model, record in list(self._records.items()):
            for digest, at in list(record.poison.items()):
                if now - at >= POISON_S:
                    del record.poison[digest]
            if (
                not record.poison
                and record.quarantined_until < now - LONGEST_QUARANTINE_S
            ):
                del self._records[tenant_model]
