"""Return of credit to the replicas that sent work."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from multiworld.serve.replica.batches.batch_queue import Work
from multiworld.serve.wire import inference_messages
from multiworld.serve.wire.edges import Outbox
from multiworld.serve.wire.protocol import Key

RELEASE_S = 0.05  # maximum seconds until a quick stage returns the credit of its work

# A quick stage returns credit at once when it owes 1 / RELEASE_SHARE of
# ``max_ongoing_requests``.
RELEASE_SHARE = 4


class CreditReturns:
    """Senders of the work at one replica, to which credit is returned."""

    def __init__(self, upstream: Mapping[str, Outbox], max_ongoing: int) -> None:
        self._upstream, self._max_ongoing = upstream, max_ongoing
        # By work: the outbox of its sender, which may be a gateway. Gateways use no
        # credit.
        self._source: dict[Key, Outbox] = {}
        self._owed: dict[Outbox, list[Key]] = {}
        self._paying: asyncio.TimerHandle | None = None

    def took(self, key: Key, source: Outbox) -> None:
        self._source[key] = source

    def release(self, works: Sequence[Work]) -> None:
        for source, keys in self._by_source(works).items():
            source.put(inference_messages.CreditReleased(tuple(keys)))

    def refuse(self, works: Sequence[Work]) -> None:
        for source, keys in self._by_source(works).items():
            source.put(inference_messages.CreditRefused(tuple(keys)))

    def release_soon(self, works: Sequence[Work]) -> None:
        """Return credit within ``RELEASE_S``, together with the credit of other
        work."""
        for source, keys in self._by_source(works).items():
            self._owed.setdefault(source, []).extend(keys)
        if not self._owed:
            return
        largest = max(map(len, self._owed.values()))
        if RELEASE_SHARE * largest >= self._max_ongoing:
            self._pay()
        elif self._paying is None:
            loop = asyncio.get_running_loop()
            self._paying = loop.call_later(RELEASE_S, self._pay)

    def _pay(self) -> None:
        if self._paying is not None:
            self._paying.cancel()
            self._paying = None
        owed, self._owed = self._owed, {}
        for source, keys in owed.items():
            if self._upstream.get(source.edge.peer) is source:
                source.put(inference_messages.CreditReleased(tuple(keys)))

    def _by_source(self, works: Sequence[Work]) -> dict[Outbox, list[Key]]:
        found: dict[Outbox, list[Key]] = {}
        for work in works:
            source = self._source.pop(work.key, None)
            if source is not None and source.edge.peer in self._upstream:
                found.setdefault(source, []).append(work.key)
        return found
