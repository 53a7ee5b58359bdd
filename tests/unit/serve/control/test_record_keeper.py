"""The record of a service on a disk that is slow, hangs or is full."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from multiworld.net.rare_log import RareLog
from multiworld.serve.control.record_keeper import RecordKeeper
from multiworld.serve.fleet.record import Record
from multiworld.serve.spec.loader import parse_spec
from tests.unit.waiting import until

APP = parse_spec("models: {m: {factory: 'a:b', stages: [{}]}}")


def record(number: int) -> Record:
    """Return a record that differs from others by a number."""
    return Record(app=APP, specs={}, active={}, number=number)


class Disk:
    """A disk that writes when it is allowed to."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self.is_full = False
        self.may_go_on = threading.Event()

    def save(self, one: Record) -> None:
        """Write a record."""
        assert self.may_go_on.wait(10.0)
        if self.is_full:
            raise OSError("no space left on device")
        self.found.append(one.number)


async def test_disk_that_hangs_holds_up_nothing_and_gets_the_newest_record() -> None:
    """Those between are not written any more."""
    disk = Disk()
    keeper = RecordKeeper(disk.save, RareLog(logging.getLogger("test")))
    for number in range(5):
        keeper.keep(record(number))
        await asyncio.sleep(0)
    await keeper.settled(0.05)
    assert disk.found == []
    disk.may_go_on.set()
    await keeper.settled(10.0)
    assert disk.found[-1] == 4
    assert len(disk.found) <= 2
    keeper.keep(record(4))
    await keeper.settled(10.0)
    assert disk.found.count(4) == 1


async def test_record_that_could_not_be_written_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the next event, even if that changes nothing."""
    disk = Disk()
    disk.may_go_on.set()
    disk.is_full = True
    keeper = RecordKeeper(disk.save, RareLog(logging.getLogger("test")))
    keeper.keep(record(1))
    await keeper.settled(10.0)
    assert "no space left" in caplog.text
    disk.is_full = False
    keeper.keep(record(1))
    await until(lambda: disk.found == [1])
