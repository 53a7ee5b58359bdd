"""What all tests share."""

from __future__ import annotations

import asyncio

import pytest
import torch

from multiworld.testing import ProcessFleet, Role

torch.set_num_threads(1)  # a pool that starts in the middle of a test looks like a leak


async def _hello(role: Role) -> None:
    role.report("hello")


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the fork server once, so that it is no test's leftover."""

    async def start() -> None:
        async with ProcessFleet() as fleet:
            await fleet.start(_hello).done(60)

    asyncio.run(start())
