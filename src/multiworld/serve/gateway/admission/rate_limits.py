"""Rate limits of tenants: requests, tokens and bytes over time. Pure.

Gateways of a host that share a file (``shared_limits``) count requests together. Rate
limits on tokens and bytes are averages that allow debt; each gateway enforces an equal
part.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from multiworld.serve.tenants.directory import Tenant

MINUTE_S = 60  # seconds of the window of ``rpm_limit`` and the bucket of ``tpm_limit``
# After a pause, a tenant may use this many seconds of its ``bytes_per_s`` at once.
BURST_S = 2.0


@dataclass(frozen=True, slots=True)
class RateLimited:
    """Refusal by the limit that ``limit`` names, with the error text for the client."""

    limit: str
    text: str
    retry_after_s: float


@dataclass(slots=True)
class RecentUse:
    """Recent usage of a tenant at one gateway."""

    # Pairs of a whole second and the number of requests admitted in it.
    minute: deque[list[int]] = field(default_factory=deque)
    in_flight: int = 0
    # Bytes that the tenant may still use now; negative: it has used more than its limit
    # allows; None: it has no limit.
    bytes_left: float | None = None
    at: float = 0.0  # time of the last update of ``bytes_left``
    # Like ``bytes_left``, for prompt and output tokens.
    tokens_left: float | None = None
    tokens_at: float = 0.0  # time of the last update of ``tokens_left``


class SharedUse(Protocol):
    """Recent usage of a tenant at all gateways of a host; see ``shared_limits``."""

    def seconds(self, now: float) -> Sequence[Sequence[int]]: ...

    def count(self, now: float) -> None: ...

    def in_flight(self, limit: float) -> int: ...

    def set_in_flight(self, count: int) -> None: ...


class SharedLimits(Protocol):
    """Counts that the gateways of a host share; see ``shared_limits``."""

    def use(
        self, tenant: str, now: float
    ) -> AbstractContextManager[SharedUse | None]: ...

    def set_in_flight(self, tenant: str, count: int) -> None: ...


class RateLimiter:
    def __init__(self, shared: SharedLimits | None = None) -> None:
        self.shared = shared
        self._used: dict[str, RecentUse] = {}

    def in_flight(self, tenant: str) -> int:
        used = self._used.get(tenant)
        return 0 if used is None else used.in_flight

    def admit(self, tenant: Tenant, gateways: int, now: float) -> RateLimited | None:
        """Admit a request, or return why not; ``release`` must follow an admission."""
        used = self._used.setdefault(tenant.name, RecentUse(at=now))
        has_limit = (tenant.rpm_limit, tenant.max_parallel_requests) != (None, None)
        if self.shared is None or not has_limit:
            return self._admit(tenant, used, gateways, now)
        with self.shared.use(tenant.name, now) as shared:
            return self._admit(tenant, used, gateways, now, shared)

    def readmit(self, tenant: Tenant, gateways: int, now: float) -> None:
        """Admit a request that another gateway admitted; ``release`` must follow."""
        used = self._used.setdefault(tenant.name, RecentUse(at=now))
        used.in_flight += 1
        # Whatever they answer: from now on, this gateway charges the tenant.
        _bytes(tenant, used, gateways, now)
        _tokens(tenant, used, gateways, now)
        if self.shared is not None and tenant.max_parallel_requests is not None:
            with self.shared.use(tenant.name, now) as shared:
                if shared is not None:
                    shared.set_in_flight(used.in_flight)

    def _admit(
        self,
        tenant: Tenant,
        used: RecentUse,
        gateways: int,
        now: float,
        shared: SharedUse | None = None,
    ) -> RateLimited | None:
        # Each gateway enforces an equal part of a limit that is not shared.
        refusal = (
            _parallel(tenant, used, gateways, shared)
            or _per_minute(tenant, used, gateways, now, shared)
            or _bytes(tenant, used, gateways, now)
            or _tokens(tenant, used, gateways, now)
        )
        if refusal is None:
            used.in_flight += 1
            if shared is not None:
                shared.count(now)
                shared.set_in_flight(used.in_flight)
            second = math.floor(now)
            if tenant.rpm_limit is not None:
                if not used.minute or used.minute[-1][0] != second:
                    used.minute.append([second, 0])
                used.minute[-1][1] += 1
        return refusal

    def spend(self, tenant: Tenant, size: int) -> None:
        """Charge a tenant for bytes, even if that causes debt."""
        used = self._used.get(tenant.name)
        if used is not None and used.bytes_left is not None:
            used.bytes_left -= size

    def check_tokens(
        self, tenant: Tenant, gateways: int, now: float
    ) -> RateLimited | None:
        """Return why an admitted request may not use tokens now; None if it may."""
        return _tokens(tenant, self._used[tenant.name], gateways, now)

    def spend_tokens(self, tenant: Tenant, count: int) -> None:
        """Charge a tenant for prompt or output tokens, even if that causes debt."""
        used = self._used.get(tenant.name)
        if used is not None and used.tokens_left is not None:
            used.tokens_left -= count

    def release(self, tenant: Tenant) -> None:
        """End an admitted request, whatever its outcome."""
        used = self._used[tenant.name]
        used.in_flight -= 1
        if self.shared is not None:
            self.shared.set_in_flight(tenant.name, used.in_flight)
        # Decide by the counts: since the admission, the limits of ``tenant`` may have
        # changed.
        is_unlimited = not used.minute and (used.bytes_left, used.tokens_left) == (
            None,
            None,
        )
        if is_unlimited and not used.in_flight:
            del self._used[tenant.name]

    def prune(self, now: float) -> None:
        """Forget tenants without recent requests or debt."""
        for name, used in list(self._used.items()):
            last = used.minute[-1][0] if used.minute else -math.inf
            is_still = now - max(last, used.at, used.tokens_at) > MINUTE_S + 1
            owes = min(used.bytes_left or 0.0, used.tokens_left or 0.0) < 0
            if not used.in_flight and is_still and not owes:
                del self._used[name]


def _gateway_part(limit: float, gateways: int) -> float:
    return max(1, math.ceil(limit / max(1, gateways)))


def _parallel(
    tenant: Tenant, used: RecentUse, gateways: int, shared: SharedUse | None
) -> RateLimited | None:
    limit = tenant.max_parallel_requests
    if limit is None:
        return None
    in_flight = used.in_flight if shared is None else shared.in_flight(limit)
    part = _gateway_part(limit, gateways) if shared is None else limit
    if in_flight < part:
        return None
    return RateLimited(
        "max_parallel_requests",
        f"{in_flight} of your requests are in flight and your "
        f"max_parallel_requests is {limit}; wait until one is answered",
        1.0,
    )


def _per_minute(
    tenant: Tenant,
    used: RecentUse,
    gateways: int,
    now: float,
    shared: SharedUse | None,
) -> RateLimited | None:
    """Refuse requests above ``rpm_limit`` in a sliding window of 60 to 61 seconds."""
    limit = tenant.rpm_limit
    if limit is None:
        return None
    while used.minute and used.minute[0][0] + 1 + MINUTE_S <= now:
        used.minute.popleft()
    minute: Sequence[Sequence[int]] = used.minute
    part = _gateway_part(limit, gateways)
    if shared is not None:
        minute, part = shared.seconds(now), limit
    if not minute or sum(count for _, count in minute) < part:
        return None
    retry_after_s = minute[0][0] + 1 + MINUTE_S - now
    return RateLimited(
        "rpm_limit",
        f"your rpm_limit of {limit} requests a minute is used up; retry in "
        f"{math.ceil(retry_after_s)} s",
        retry_after_s,
    )


def _bytes(
    tenant: Tenant, used: RecentUse, gateways: int, now: float
) -> RateLimited | None:
    """Refuse a tenant in debt; a large request may cause debt, but is admitted."""
    if tenant.bytes_per_s is None:
        used.bytes_left = None
        return None
    rate = tenant.bytes_per_s / max(1, gateways)
    limit = rate * BURST_S
    left = limit if used.bytes_left is None else used.bytes_left
    used.bytes_left = min(limit, left + rate * (now - used.at))
    used.at = now
    if used.bytes_left > 0:
        return None
    retry_after_s = -used.bytes_left / rate + 0.001
    return RateLimited(
        "bytes_per_s",
        f"your bytes_per_s limit of {tenant.bytes_per_s:g} is used up; retry in "
        f"{retry_after_s:.1f} s",
        retry_after_s,
    )


def _tokens(
    tenant: Tenant, used: RecentUse, gateways: int, now: float
) -> RateLimited | None:
    """Refuse a tenant in debt; a long completion may cause debt, but is not cut."""
    if tenant.tpm_limit is None:
        used.tokens_left = None
        return None
    limit = tenant.tpm_limit / max(1, gateways)
    left = limit if used.tokens_left is None else used.tokens_left
    used.tokens_left = min(limit, left + limit / MINUTE_S * (now - used.tokens_at))
    used.tokens_at = now
    if used.tokens_left > 0:
        return None
    retry_after_s = (1 - used.tokens_left) * MINUTE_S / limit
    return RateLimited(
        "tpm_limit",
        f"your tpm_limit of {tenant.tpm_limit} tokens a minute is used up; retry in "
        f"{math.ceil(retry_after_s)} s",
        retry_after_s,
    )
