"""Waiting requests of a model by tenant, and each tenant's limit. Pure."""

from __future__ import annotations

from collections import Counter

from multiworld.serve.queueing.fair_queue import Share


class WaitingTenants:
    """Number of waiting requests of each tenant.

    A tenant that waits alone may fill the queue up to the limit. While several tenants
    wait, the queue may grow to twice the limit; beyond the limit, a tenant may have its
    weighted share of the limit, but always at least one request.
    """

    def __init__(self) -> None:
        self.count = 0
        self._by_tenant: Counter[str] = Counter()
        self._weights: dict[str, float] = {}

    def of(self, tenant: str) -> int:
        return self._by_tenant[tenant]

    def add(self, share: Share) -> None:
        self.count += 1
        self._by_tenant[share.tenant] += 1
        self._weights[share.tenant] = share.weight

    def remove(self, tenant: str) -> None:
        self.count -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant], self._weights[tenant]

    def is_full(self, share: Share, limit: int, count: int = 1) -> bool:
        """Return whether ``count`` more requests of a tenant are refused."""
        if self.count + count <= limit:
            return False
        own = self._by_tenant[share.tenant]
        is_more = own + count > 1  # every tenant may have one request
        if own == self.count or (is_more and self.count + count > 2 * limit):
            return True
        weights = sum({**self._weights, share.tenant: share.weight}.values())
        return own + count - 1 >= max(1.0, limit * share.weight / weights)
