"""Fair shares of tenants by tokens. Pure.

Each tenant has a counter of the tokens that were computed for it, of prompts and of
answers alike, divided by its weight. The tenant with the lowest counter is next. One
that comes back after a while gets hardly any credit for it: its counter is lifted to
the lowest of those that are there (the virtual token counter of Sheng et al., "Fairness
in Serving Large Language Models", 2024), less what it may have to wait for: the tokens
of the steps that have begun before it came.
"""

from __future__ import annotations

from collections import Counter

from multiworld.serve.tenants.fair_queue import Share

PRUNE_AT = 1024
"""Number of counters at which those that would be lifted anyway are dropped."""


class TokenShares:
    """Tokens that were computed for each tenant."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._present: Counter[str] = Counter()
        self._level = 0.0

    def enter(self, share: Share, waits_for: float = 0.0) -> None:
        """Record that a sequence of a tenant has come.

        Args:
            share: The tenant.
            waits_for: Tokens of others that it has to wait for.
        """
        if not self._present[share.tenant]:
            known = self._served.get(share.tenant, 0.0)
            level = self._lowest() - waits_for / share.weight
            self._served[share.tenant] = max(known, level)
        self._present[share.tenant] += 1

    def leave(self, share: Share) -> None:
        """Record that a sequence of a tenant is gone."""
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
        """Charge a tenant for tokens that are computed now."""
        self._served[share.tenant] += tokens / share.weight

    def rank(self, share: Share) -> tuple[int, float]:
        """Return the rank of a tenant's sequences; the lowest is next."""
        return -share.priority, self._served[share.tenant]

    def _lowest(self) -> float:
        """Return the lowest counter of the tenants that are there."""
        if not self._present:
            return self._level
        return min(self._served[tenant] for tenant in self._present)
