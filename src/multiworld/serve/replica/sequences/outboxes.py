"""The edges of a replica, and the messages it sends on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.edges import Outbox
from multiworld.serve.wire.routing_table import RoutingTable

# Maximum number of messages kept for a gateway that is not connected yet.
MAX_POSTPONED = 4096


class Outboxes:
    """The connected peers of one replica."""

    def __init__(self) -> None:
        self.table = RoutingTable()
        self._edges: dict[str, Outbox] = {}
        self._postponed: dict[str, deque[EdgeMessage]] = {}

    def __contains__(self, peer: str) -> bool:
        return peer in self._edges

    def __iter__(self) -> Iterator[str]:
        return iter(self._edges)

    def table_changed(self, table: RoutingTable) -> None:
        self.table = table
        for name in self._postponed.keys() - {*table.gateways, *self._edges}:
            del self._postponed[name]

    def up(self, outbox: Outbox) -> None:
        peer = outbox.edge.peer
        self._edges[peer] = outbox
        for message in self._postponed.pop(peer, ()):
            outbox.put(message)

    def down(self, outbox: Outbox) -> bool:
        """Stop using an outbox whose edge is down; return whether it was in use."""
        peer = outbox.edge.peer
        if self._edges.get(peer) is not outbox:
            return False
        del self._edges[peer]
        return True

    def gateways(self) -> tuple[str, ...]:
        return tuple(sorted({*self.table.gateways} & self._edges.keys()))

    def of_stage(self, stage: int) -> tuple[str, ...]:
        known = self.table.replicas
        return tuple(
            sorted(n for n in self._edges if n in known and known[n].stage == stage)
        )

    def send(
        self, peer: str, message: EdgeMessage, hidden: Tensor | None = None
    ) -> None:
        """Send a message with its rows, [rows, hidden]."""
        outbox = self._edges.get(peer)
        if outbox is not None:
            outbox.put(message, () if hidden is None else [{"hidden": hidden}])
        elif peer in self.table.gateways:
            # Keep the message until the gateway has connected.
            self._postponed.setdefault(peer, deque(maxlen=MAX_POSTPONED)).append(
                message
            )

    def flush(self, peer: str) -> None:
        if peer in self._edges:
            self._edges[peer].flush()

    async def wait_sent(self) -> None:
        for outbox in list(self._edges.values()):
            await outbox.wait_sent()
