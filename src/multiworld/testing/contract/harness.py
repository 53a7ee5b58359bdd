"""Tools that the checks of the contract share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from torch import Tensor

from multiworld.testing.arena import Arena
from multiworld.world.world import World

Check = Callable[[Arena], Awaitable[None]]
"""Coroutine function that raises if a backend breaks the contract."""

CHECKS: list[Check] = []
"""All checks of the contract."""

HANG_S = 20.0
"""Seconds after which a check counts as hanging."""

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def check(function: Check) -> Check:
    """Add a check to ``CHECKS``, with a time limit of ``HANG_S``.

    Args:
        function: The check; a decorated function.

    Returns:
        The check with the time limit; it raises ``TimeoutError`` if it hangs.
    """

    async def bounded(arena: Arena) -> None:
        async with asyncio.timeout(HANG_S):
            await function(arena)

    bounded.__name__, bounded.__doc__ = function.__name__, function.__doc__
    CHECKS.append(bounded)
    return bounded


def same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have equal bytes, shape and dtype.

    Works for every dtype, and for NaN.

    Args:
        one: A host tensor.
        other: A host tensor.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = one.contiguous().view(-1).view(torch.uint8)
    return torch.equal(flat, other.contiguous().view(-1).view(torch.uint8))


def some(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of the elements 0 to 99, repeated as needed.

    Args:
        shape: Its shape.
        dtype: Its dtype, to which the elements are converted.
    """
    count = 1
    for extent in shape:
        count *= extent
    return (torch.arange(count) % 100).to(dtype).view(shape)


async def every(worlds: list[World], call: Callable[..., Awaitable[Any]]) -> Any:
    """Call the same function on every member at once.

    Args:
        worlds: Each member's view of the world, by rank.
        call: Coroutine function of a world.

    Returns:
        The results, by rank.

    Cancellation: cancels the call on every member.
    """
    return await asyncio.gather(*(call(world) for world in worlds))


async def raised_by(step: Awaitable[Any]) -> BaseException | None:
    """Await a step, and return the error that it raised.

    Args:
        step: An awaitable.

    Returns:
        The error, or None if there was none.

    Cancellation: cancels the step and raises ``CancelledError``.
    """
    try:
        await step
    except Exception as error:
        return error
    return None


async def expect(world: World, tensor: Tensor, src: int = 0, tag: int = 0) -> None:
    """Receive a tensor and assert that it equals another.

    Args:
        world: The receiver's view of the world.
        tensor: The expected tensor, of any shape and dtype.
        src: Rank of the sender.
        tag: Tag of the message.

    Raises:
        AssertionError: The tensor that arrived differs.

    Cancellation: as that of ``World.recv``.
    """
    got = await world.recv(src=src, tag=tag)
    assert same(got, tensor), f"sent {tensor}, got {got}"
