"""Child processes of ``multiworld.testing``, and what they report."""

from __future__ import annotations

import sys
import time
import types

import pytest

from multiworld.testing import ChildFailedError, ProcessFleet, Role

LARGE = 20_000_000


async def report_much(role: Role) -> None:
    """Report more than the pipe holds."""
    role.report(b"x" * LARGE)


async def report_a_stranger(role: Role) -> None:
    """Report an object of a module that the test does not have."""
    module = sys.modules["only_here"] = types.ModuleType("only_here")
    module.Strange = type("Strange", (), {"__module__": "only_here"})  # type: ignore[attr-defined]
    role.report(module.Strange())
    await role.order()


async def test_child_that_is_stopped_within_a_report_does_not_block_the_test() -> None:
    async with ProcessFleet() as fleet:
        child = fleet.start(report_much)
        time.sleep(2.0)  # noqa: ASYNC251 - nobody reads, so that the pipe is full
        child.stop()
        with pytest.raises(ChildFailedError, match="in time"):
            await child.report(limit_s=0.5)
        child.go_on()
        assert len(await child.report()) == LARGE
        await child.done()


async def test_report_that_cannot_be_read_is_named() -> None:
    async with ProcessFleet() as fleet:
        child = fleet.start(report_a_stranger)
        with pytest.raises(ChildFailedError, match="only_here"):
            await child.report()
