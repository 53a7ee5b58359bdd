"""Heartbeat frames: encoding, damage, replays."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.liveness import heartbeat_helper
from multiworld.liveness.heartbeat_helper import (
    HeartbeatFrame,
    HeartbeatTarget,
    decode_heartbeat,
    encode_heartbeat,
)

KEY = bytes(range(32))


heartbeats = st.builds(
    HeartbeatFrame,
    st.sampled_from([heartbeat_helper.RUNNING, heartbeat_helper.STOPPED]),
    st.sampled_from([heartbeat_helper.WAITING, heartbeat_helper.COMPUTING]),
    st.integers(1, 2**60),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


@given(heartbeats, st.integers(0, heartbeat_helper.FRAME_BYTES * 8 - 1))
def test_heartbeat_arrives_whole_or_not_at_all(
    heartbeat: HeartbeatFrame, bit: int
) -> None:
    frame = encode_heartbeat(heartbeat, KEY)
    got = decode_heartbeat(frame, KEY)
    for name in HeartbeatFrame.__slots__:
        assert getattr(got, name) == getattr(heartbeat, name)
    damaged = bytearray(frame)
    damaged[bit // 8] ^= 1 << bit % 8
    for wrong, key in ((bytes(damaged), KEY), (frame, bytes(32))):
        with pytest.raises(ValueError, match="beat"):
            decode_heartbeat(wrong, key)


def heartbeat(sequence: int) -> HeartbeatFrame:
    return HeartbeatFrame(
        heartbeat_helper.RUNNING, heartbeat_helper.WAITING, sequence, 0, 0
    )


def test_torn_frames_and_garbage_cost_only_themselves() -> None:
    """This happens when a helper is replaced in the middle of a frame."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        target = HeartbeatTarget(ours, bytes(32), KEY)
        theirs.sendall(
            encode_heartbeat(heartbeat(1), KEY)[:10]
            + encode_heartbeat(heartbeat(2), KEY)
        )
        assert target.read(1.0)
        theirs.sendall(b"garbage" * 30 + encode_heartbeat(heartbeat(3), KEY))
        theirs.sendall(encode_heartbeat(heartbeat(4), KEY))
        assert target.read(2.0)
        assert target.latest is not None
        assert target.latest.sequence == 4
        assert target.heard_at == 2.0


def test_replayed_heartbeat_does_not_count_again() -> None:
    """A replayed heartbeat does not prove that the peer is alive."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        target = HeartbeatTarget(ours, bytes(32), KEY)
        recorded = encode_heartbeat(heartbeat(7), KEY)
        theirs.sendall(recorded)
        target.read(1.0)
        theirs.sendall(recorded)
        target.read(9.0)
        assert target.heard_at == 1.0


def test_process_is_stopped_if_it_did_nothing_between_two_looks() -> None:
    """A process that is resumed in pulses may be stopped at every check."""
    looks = heartbeat_helper.StopLook()
    stopped, running = heartbeat_helper.STOPPED, heartbeat_helper.RUNNING
    assert looks.state(stopped, 1) == running  # it may just have been stopped
    assert looks.state(stopped, 1) == stopped
    assert looks.state(stopped, 1) == stopped
    assert looks.state(stopped, 2) == running
    assert looks.state(running, 2) == running
    assert looks.state(stopped, 2) == running
    assert looks.state(stopped, 2) == stopped


def test_work_of_a_thread_is_seen() -> None:
    """A thread that only waits works too, as it takes turns."""
    pid, tid = os.getpid(), threading.get_native_id()
    before = heartbeat_helper.work_of(pid, tid)
    time.sleep(0.001)  # one iteration
    assert heartbeat_helper.work_of(pid, tid) != before
    assert heartbeat_helper.work_of(2**30, 1) is None
