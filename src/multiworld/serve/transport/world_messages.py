"""Small typed messages on control worlds, one at a time; edges send frames."""

from __future__ import annotations

from typing import TypeVar

from multiworld.serve.transport.protocol import Codec
from multiworld.world.world import World

M = TypeVar("M")


async def receive(world: World, codec: Codec[M], src: int) -> M:
    """Receive one small message; a cancelled call leaves it for the next one."""
    return codec.decode(await world.recv_object(src=src, tag=codec.tag))
