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
"""Coroutine function that raises an error if a backend breaks the contract.

It returns at once if the backend documents the operation as unsupported.
"""

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
    """Return a check with a time limit of ``HANG_S``, and add it to ``CHECKS``."""

    async def bounded(arena: Arena) -> None:
        async with asyncio.timeout(HANG_S):
            await function(arena)

    bounded.__name__, bounded.__doc__ = function.__name__, function.__doc__
    CHECKS.append(bounded)
    return bounded


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have equal bytes, shape and dtype, even with NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = one.contiguous().view(-1).view(torch.uint8)
    return torch.equal(flat, other.contiguous().view(-1).view(torch.uint8))


def some(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of the elements 0 to 99, repeated as needed."""
    count = 1
    for extent in shape:
        count *= extent
    return (torch.arange(count) % 100).to(dtype).view(shape)


async def every(worlds: list[World], call: Callable[..., Awaitable[Any]]) -> Any:
    """Return the results, by rank, of a call on every member at once."""
    return await asyncio.gather(*(call(world) for world in worlds))


async def raised_by(step: Awaitable[Any]) -> BaseException | None:
    try:
        await step
    except Exception as error:
        return error
    return None


async def expect(world: World, tensor: Tensor, src: int = 0, tag: int = 0) -> None:
    got = await world.recv(src=src, tag=tag)
    assert same(got, tensor), f"sent {tensor}, got {got}"
