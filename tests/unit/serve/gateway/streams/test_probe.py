"""The end of a probe."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from multiworld.errors import ServeError
from multiworld.serve.gateway.streams.streams import OnItem, Streams
from multiworld.serve.wire.routing_table import Replica, ReplicaState, RoutingTable


class Opened:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self, error: BaseException | None = None) -> None:
        self.is_closed = True


async def test_last_item_of_a_cancelled_probe_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may come before the probe has closed its stream, and must break no edge."""
    streams, receivers, opened = Streams("gateway/1"), list[OnItem](), Opened()
    replica = Replica("r", "m", "1", 0, ReplicaState.READY)
    streams.table_changed(RoutingTable(number=1, replicas={"r": replica}))

    def open_stream(*given: Any, **more: Any) -> Opened:
        receivers.append(given[4])
        return opened

    monkeypatch.setattr(streams, "open", open_stream)
    probing = asyncio.ensure_future(streams.probe("r", [1], 1.0))
    await asyncio.sleep(0)
    probing.cancel()
    (receive,) = receivers
    receive(ServeError("the replica is gone"))
    with pytest.raises(asyncio.CancelledError):
        await probing
    assert opened.is_closed
