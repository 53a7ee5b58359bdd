"""Small typed messages on worlds, one at a time.

The control worlds use them; edges send frames.
"""

from __future__ import annotations

from typing import TypeVar

from multiworld.serve.transport.protocol import Codec
from multiworld.world.world import World

M = TypeVar("M")


async def receive(world: World, codec: Codec[M], src: int) -> M:
    """Receive one small message.

    Args:
        world: World of the sender.
        codec: Codec of the message.
        src: Rank of the sender.

    Raises:
        MessageError: This release does not know the message.
        WorldBrokenError: The sender, or another member, was lost.

    Cancellation: Safe; the message stays for the next call.
    """
    return codec.decode(await world.recv_object(src=src, tag=codec.tag))
