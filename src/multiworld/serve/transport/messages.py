"""Messages of a service on worlds: typed headers, and tensors of many requests. Shell.

The tensors of a bundle are named ``NUMBER.NAME``: those of the header's item of that
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from multiworld.serve.spec.stage import Tensors
from multiworld.serve.transport.protocol import Codec
from multiworld.world.world import Bundle, World

M = TypeVar("M")

HEADER = "header"


async def receive(world: World, codec: Codec[M], src: int) -> M:
    """Receive one small message.

    Args:
        world: Where it comes from.
        codec: The conversation that it belongs to.
        src: Rank of the sender.

    Raises:
        MessageError: This release does not know it.
        WorldBrokenError: The sender, or another member, was lost.

    Cancellation: safe; the message stays for the next call.
    """
    return codec.decode(await world.recv_object(src=src, tag=codec.tag))


async def receive_bundle(world: World, codec: Codec[M], src: int) -> tuple[M, Bundle]:
    """Receive a header and its tensors.

    Args:
        world: Where it comes from.
        codec: The conversation that it belongs to.
        src: Rank of the sender.

    Raises:
        MessageError: This release does not know it.
        WorldBrokenError: The sender, or another member, was lost.

    Cancellation: safe; the message stays for the next call.
    """
    bundle = await world.recv_bundle(src=src, tag=codec.tag)
    return codec.decode(bundle.meta.get(HEADER)), bundle


def pack(contents: Sequence[Tensors]) -> Tensors:
    """Return the tensors of several requests as those of one bundle."""
    return {
        f"{number}.{name}": tensor
        for number, tensors in enumerate(contents)
        for name, tensor in tensors.items()
    }


def unpack(bundle: Bundle, count: int) -> list[Tensors]:
    """Return the tensors of each of ``count`` requests."""
    contents: list[Tensors] = [{} for _ in range(count)]
    for name, tensor in bundle.tensors.items():
        number, _, plain = name.partition(".")
        contents[int(number)][plain] = tensor
    return contents
