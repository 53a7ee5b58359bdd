"""Small messages on worlds: cancelled receives, and the end of the peer."""

from __future__ import annotations

import asyncio

import pytest

from multiworld.errors import MemberLeftError, WorldBrokenError
from multiworld.serve.transport.control_messages import ORDERS, ReportRequest
from multiworld.serve.transport.world_messages import receive
from multiworld.testing import Arena
from tests.unit.serve.edges import break_world, settle

ASK = ReportRequest(7)


async def test_cancelled_receive_leaves_the_message_for_the_next() -> None:
    """Nothing is lost."""
    async with Arena("memory") as arena:
        left, right = await arena.world(2)
        for _ in range(3):
            waiting = asyncio.ensure_future(receive(right, ORDERS, src=0))
            await settle()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await left.send_object(ORDERS.encode(ASK), dst=1, tag=ORDERS.tag)
        assert await receive(right, ORDERS, src=0) == ASK


@pytest.mark.parametrize("is_polite", [True, False])
async def test_end_of_the_peer_is_raised(is_polite: bool) -> None:
    """What it sent before it left, or was lost, is received first."""
    async with Arena("memory") as arena:
        left, right = await arena.world(2)
        await left.send_object(ORDERS.encode(ASK), dst=1, tag=ORDERS.tag)
        if is_polite:
            await left.close()
        else:
            await break_world(left)
        assert await receive(right, ORDERS, src=0) == ASK
        with pytest.raises(MemberLeftError if is_polite else WorldBrokenError):
            await receive(right, ORDERS, src=0)
