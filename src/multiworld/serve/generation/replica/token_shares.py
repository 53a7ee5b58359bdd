"""Fair shares of tenants by tokens. Pure.

Each tenant has a counter of the prompt and output tokens computed for it, divided by
its weight. The tenant with the lowest counter is next. One that returns after a while
gets hardly any credit for its absence: its counter is lifted to the lowest of those
present (the virtual token counter of Sheng et al., "Fairness in Serving Large Language
Models", 2024), less the tokens of the steps in flight that it may have to wait for.
"""

from __future__ import annotations

import heapq
from collections import Counter

from multiworld.serve.tenants.fair_queue import Share

# Number of counters at which those that would be lifted anyway are dropped.
PRUNE_AT = 1024


class TokenShares:
    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._present: Counter[str] = Counter()
        # Counters of those present, and of some others; a counter may have grown since.
        self._order: list[tuple[float, str]] = []
        self._level = 0.0

    def enter(self, share: Share, waits_for: float = 0.0) -> None:
        """Add a sequence that may have to wait for ``waits_for`` tokens of others."""
        if not self._present[share.tenant]:
            known = self._served.get(share.tenant, 0.0)
            level = self._lowest() - waits_for / share.weight
            self._served[share.tenant] = max(known, level)
            heapq.heappush(self._order, (self._served[share.tenant], share.tenant))
        self._present[share.tenant] += 1

    def leave(self, share: Share) -> None:
        self._level = self._lowest()
        self._present[share.tenant] -= 1
        if not self._present[share.tenant]:
            del self._present[share.tenant]
            self._level = max(self._level, self._lowest())
        if len(self._served) > max(PRUNE_AT, 2 * len(self._present)):
            self._served = {
                tenant: served
                for tenant, served in self._served.items()
                if tenant in self._present or served > self._level
            }

    def charge(self, share: Share, tokens: float) -> None:
        self._served[share.tenant] += tokens / share.weight

    def rank(self, share: Share) -> tuple[int, float]:
        """Return the rank of a tenant's sequences; the lowest is next."""
        return -share.priority, self._served[share.tenant]

    def _lowest(self) -> float:
        if len(self._order) > PRUNE_AT + 2 * len(self._present):
            self._order = [(self._served[tenant], tenant) for tenant in self._present]
            heapq.heapify(self._order)
        while self._order:
            served, tenant = self._order[0]
            if tenant not in self._present:
                heapq.heappop(self._order)
            elif served < self._served[tenant]:
                heapq.heapreplace(self._order, (self._served[tenant], tenant))
            else:
                return self._served[tenant]
        return self._level
