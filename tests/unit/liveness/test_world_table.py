"""Messages that arrive before their world is known."""

from __future__ import annotations

from typing import Any, cast

from multiworld.liveness.control_link import LinkKey
from multiworld.liveness.manager_messages import Broken, EndCollectives
from multiworld.liveness.world_table import (
    KEPT_S,
    LIMIT_BYTES,
    MEMBER_LANES,
    MESSAGE_BYTES,
    SPARE_LANES,
    EarlyMessages,
    WorldTable,
)

A, B = LinkKey("a", "127.0.0.1", "127.0.0.1"), LinkKey("b", "127.0.0.1", "127.0.0.1")


def message(nonce: int, number: int = 0) -> EndCollectives:
    return EndCollectives(nonce, number, 0)


def long(rank: int) -> Broken:
    """Return a message that takes half of what one link may take."""
    return Broken(3, rank, "", "x" * (LIMIT_BYTES // 2), 0.0)


def test_early_messages_wait_for_their_incarnation_and_link() -> None:
    early = EarlyMessages()
    for number in range(3):
        early.keep(A, message(1, number), 0.0)
    early.keep(B, message(1), 0.0)
    early.keep(A, message(2), 0.0)
    assert early.take(1, A) == [message(1, number) for number in range(3)]
    assert early.take(1, A) == []
    early.drop(1)
    assert early.take(1, B) == []
    early.purge(KEPT_S + 1)
    assert early.take(2, A) == []


def test_link_that_sends_too_many_takes_nothing_from_others() -> None:
    """Each link has the same limit, in which long texts count."""
    early = EarlyMessages()
    most = LIMIT_BYTES // MESSAGE_BYTES
    for number in range(most + 10):
        early.keep(A, message(number % 2, number), 0.0)
    early.keep(B, long(1), 0.0)
    early.keep(B, long(2), 0.0)
    early.keep(B, message(3), 0.0)
    assert early.take(3, B) == [long(1), message(3)]
    assert len(early.take(0, A)) + len(early.take(1, A)) == most
    early.keep(A, message(4), 0.0)
    assert early.take(4, A) == [message(4)], "what was taken makes room"


class OpenLane:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


async def test_member_cannot_open_lanes_without_limit() -> None:
    """Each lane is a descriptor here; other members and worlds are not refused."""
    table, port = WorldTable(), cast("Any", None)
    for nonce in (1, 2):
        table.open(nonce, port)
    lanes: list[Any] = [OpenLane() for _ in range(MEMBER_LANES)]
    for number, lane in enumerate(lanes):
        assert table.lane_refusal(1, 1) is None
        table.lanes.put((1, 1, f"channel {number}"), lane)
    assert "of that member" in str(table.lane_refusal(1, 1))
    assert table.lane_refusal(1, 2) is None
    assert table.lane_refusal(2, 1) is None
    assert await table.lanes.get((1, 1, "channel 0")) is lanes[0]
    assert table.lane_refusal(1, 1) is None
    table.remove(1)
    assert all(lane.is_closed for lane in lanes[1:])
    assert table.lanes.count(1) == table.lanes.count_of(1, 1) == 0


async def test_members_that_name_other_ranks_cannot_either() -> None:
    table = WorldTable()
    table.open(1, cast("Any", None))
    for rank in range(SPARE_LANES):
        assert table.lane_refusal(1, rank) is None
        table.lanes.put((1, rank, "p2p"), cast("Any", OpenLane()))
    assert "for that epoch" in str(table.lane_refusal(1, SPARE_LANES))
    table.add(1, 1, A)
    assert table.lane_refusal(1, SPARE_LANES) is None
