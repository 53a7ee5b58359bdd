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
"""Key of the header in a bundle's metadata."""


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


async def receive_bundle(world: World, codec: Codec[M], src: int) -> tuple[M, Bundle]:
    """Receive a header and its tensors.

    Args:
        world: World of the sender.
        codec: Codec of the header.
        src: Rank of the sender.

    Raises:
        MessageError: This release does not know the header.
        WorldBrokenError: The sender, or another member, was lost.

    Cancellation: Safe; the message stays for the next call.
    """
    bundle = await world.recv_bundle(src=src, tag=codec.tag)
    return codec.decode(bundle.meta.get(HEADER)), bundle


def pack(contents: Sequence[Tensors]) -> Tensors:
    """Return the tensors of several requests under the names of one bundle."""
    return {
        f"{number}.{name}": tensor
        for number, tensors in enumerate(contents)
        for name, tensor in tensors.items()
    }


def unpack(bundle: Bundle, count: int) -> list[Tensors]:
    """Return the tensors of each of the ``count`` requests of a bundle."""
    contents: list[Tensors] = [{} for _ in range(count)]
    for name, tensor in bundle.tensors.items():
        number, _, plain = name.partition(".")
        contents[int(number)][plain] = tensor
    return contents
