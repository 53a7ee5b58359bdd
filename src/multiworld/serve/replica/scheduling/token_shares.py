"""Fair shares of tenants by tokens. Pure.

Each tenant has a counter of the prompt and output tokens computed for it, divided by
its weight. The tenant with the lowest counter is next (the virtual token counter of
Sheng et al., "Fairness in Serving Large Language Models", 2024). A tenant that returns
after a while, or takes less than its share, gets hardly any credit for that: its
counter is lifted to the *level*, the counter of the tenant that was next in the latest
step (the virtual time of start-time fair queueing, Goyal et al., 1996), minus the
tokens of the steps in flight that it may have to wait for. Each priority has a separate
level, so that a waiting tenant does not hold down the level of a higher priority.
"""

from __future__ import annotations

from collections import Counter

from multiworld.serve.queueing.fair_queue import Share

# Number of counters up to which none is dropped. If there are more, ``leave`` may drop
# those that ``lift`` would replace.
PRUNE_AT = 1024

_Key = tuple[int, str]  # priority and name of a tenant


class TokenShares:
    def __init__(self) -> None:
        self._served: dict[_Key, float] = {}
        self._levels: dict[int, float] = {}
        self._present: Counter[_Key] = Counter()

    def enter(self, share: Share, waits_for: float = 0.0) -> None:
        """Add a sequence that may have to wait for ``waits_for`` tokens of others."""
        if not self._present[_key(share)]:
            self.lift(share, waits_for)
        self._present[_key(share)] += 1

    def leave(self, share: Share) -> None:
        self._present[_key(share)] -= 1
        if not self._present[_key(share)]:
            del self._present[_key(share)]
            if all(priority != share.priority for priority, _ in self._present):
                self.reach(share)
        if len(self._served) > max(PRUNE_AT, 2 * len(self._present)):
            self._served = {
                key: served
                for key, served in self._served.items()
                if key in self._present or served > self._levels.get(key[0], 0.0)
            }

    def lift(self, share: Share, waits_for: float = 0.0) -> None:
        """Remove the credit of a tenant that takes less than its share."""
        level = self._levels.get(share.priority, 0.0) - waits_for / share.weight
        self._served[_key(share)] = max(self._served.get(_key(share), 0.0), level)

    def reach(self, share: Share) -> None:
        """Lift the level to a tenant's counter: the tenant is next in its priority."""
        level = self._levels.get(share.priority, 0.0)
        self._levels[share.priority] = max(level, self._served[_key(share)])

    def charge(self, share: Share, tokens: float) -> None:
        self._served[_key(share)] += tokens / share.weight

    def rank(self, share: Share) -> tuple[int, float]:
        """Return the rank of a tenant's sequences; the lowest is next."""
        return -share.priority, self._served[_key(share)]


def _key(share: Share) -> _Key:
    return share.priority, share.tenant
