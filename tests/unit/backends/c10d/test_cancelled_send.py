"""A native send that is cancelled after it was announced."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from multiworld import WorldBrokenError, WorldConfig
from multiworld.backends.direct.backend import DirectBackend
from multiworld.testing import Arena


async def test_send_cancelled_between_header_and_tensor_breaks_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the next, larger tensor would meet its receive, and end the process."""
    config = WorldConfig(join_s=20, host_p2p="backend", operation_s=8)
    async with Arena("gloo", config) as arena:
        one, two = await arena.world(2)
        header_sent = asyncio.Event()
        send_object = DirectBackend.send_object

        async def send_and_wait(*args: Any) -> None:
            await send_object(*args)
            header_sent.set()
            await asyncio.sleep(60)  # as where the lane gives way to the loop

        monkeypatch.setattr(DirectBackend, "send_object", send_and_wait)
        receiving = asyncio.ensure_future(two.recv(src=0))
        sending = asyncio.ensure_future(one.send(torch.ones(4), dst=1))
        await header_sent.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert one.is_broken
        with pytest.raises(WorldBrokenError, match="cancelled a send"):
            await receiving
