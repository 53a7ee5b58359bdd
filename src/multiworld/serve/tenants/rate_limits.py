"""How much a tenant may ask for: requests a minute, at a time, bytes a second. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from multiworld.serve.tenants.directory import Tenant

MINUTE_S = 60
BURST_S = 2.0
"""Bytes of so many seconds may come at once."""


@dataclass(frozen=True, slots=True)
class RateLimited:
    """Why a request is not taken, and when it may be.

    Attributes:
        what: The name of the limit.
    """

    limit: str
    text: str
    retry_after_s: float


@dataclass(slots=True)
class RecentUse:
    """What a tenant has used lately, at one gateway."""

    minute: deque[list[int]] = field(default_factory=deque)
    """Seconds, and how many requests came in each."""
    in_flight: int = 0
    bytes_left: float | None = None
    at: float = 0.0


class RateLimiter:
    """The limits of all tenants at one gateway."""

    def __init__(self) -> None:
        self._used: dict[str, RecentUse] = {}

    def in_flight(self, tenant: str) -> int:
        """Return how many requests of a tenant are under way."""
        used = self._used.get(tenant)
        return 0 if used is None else used.in_flight

    def admit(self, tenant: Tenant, gateways: int, now: float) -> RateLimited | None:
        """Let a request in, or say why not.

        Args:
            gateways: Between which the limits are divided, rounded up.
        """
        used = self._used.setdefault(tenant.name, RecentUse(at=now))
        refusal = (
            _parallel(tenant, used, gateways)
            or _per_minute(tenant, used, gateways, now)
            or _bytes(tenant, used, gateways, now)
        )
        if refusal is None:
            used.in_flight += 1
            second = math.floor(now)
            if tenant.rpm_limit is not None:
                if not used.minute or used.minute[-1][0] != second:
                    used.minute.append([second, 0])
                used.minute[-1][1] += 1
        return refusal

    def spend(self, tenant: Tenant, size: int) -> None:
        """Take bytes from what a tenant has left; it may owe some afterwards."""
        used = self._used.get(tenant.name)
        if used is not None and used.bytes_left is not None:
            used.bytes_left -= size

    def release(self, tenant: Tenant) -> None:
        """Take note that a request has ended, however."""
        used = self._used[tenant.name]
        used.in_flight -= 1
        no_limit = tenant.rpm_limit is None and tenant.bytes_per_s is None
        if no_limit and not used.in_flight:
            del self._used[tenant.name]

    def prune(self, now: float) -> None:
        """Forget the tenants that have asked for nothing lately."""
        for name, used in list(self._used.items()):
            last = used.minute[-1][0] if used.minute else -math.inf
            is_still = now - max(last, used.at) > MINUTE_S + 1
            owes = used.bytes_left is not None and used.bytes_left < 0
            if not used.in_flight and is_still and not owes:
                del self._used[name]


def _gateway_part(limit: float, gateways: int) -> float:
    return max(1, math.ceil(limit / max(1, gateways)))


def _parallel(tenant: Tenant, used: RecentUse, gateways: int) -> RateLimited | None:
    limit = tenant.max_parallel_requests
    if limit is None or used.in_flight < _gateway_part(limit, gateways):
        return None
    return RateLimited(
        "max_parallel_requests",
        f"{used.in_flight} requests of yours are under way, and your "
        f"max_parallel_requests is {limit}; wait for one to end",
        1.0,
    )


def _per_minute(
    tenant: Tenant, used: RecentUse, gateways: int, now: float
) -> RateLimited | None:
    """Count whole seconds: in no 60 s are there more than the limit."""
    limit = tenant.rpm_limit
    if limit is None:
        return None
    while used.minute and used.minute[0][0] + 1 + MINUTE_S <= now:
        used.minute.popleft()
    if sum(count for _, count in used.minute) < _gateway_part(limit, gateways):
        return None
    retry_after_s = used.minute[0][0] + 1 + MINUTE_S - now
    return RateLimited(
        "rpm_limit",
        f"your rpm_limit of {limit} requests a minute is used up; try again in "
        f"{retry_after_s:.0f} s",
        retry_after_s,
    )


def _bytes(
    tenant: Tenant, used: RecentUse, gateways: int, now: float
) -> RateLimited | None:
    """Let in while anything is left; what a request takes is owed afterwards."""
    if tenant.bytes_per_s is None:
        used.bytes_left = None
        return None
    rate = tenant.bytes_per_s / max(1, gateways)
    most = rate * BURST_S
    left = most if used.bytes_left is None else used.bytes_left
    used.bytes_left = min(most, left + rate * (now - used.at))
    used.at = now
    if used.bytes_left > 0:
        return None
    retry_after_s = -used.bytes_left / rate + 0.001
    return RateLimited(
        "bytes_per_s",
        f"your limit of {tenant.bytes_per_s:g} bytes a second is used up; try again in "
        f"{retry_after_s:.1f} s",
        retry_after_s,
    )
