"""The owner's side of the heartbeat helper: reports, and helpers that die or hang."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from multiworld.liveness import heartbeat as heartbeat_module
from multiworld.liveness import heartbeat_helper
from multiworld.liveness.heartbeat import Heartbeat, HeartbeatReport, Mode, give_sign
from multiworld.testing import no_leaks

ONE, TWO = b"1" * 32, b"2" * 32

HANG_S = 20.0


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


class Side:
    def __init__(self) -> None:
        self.reports: list[tuple[int, HeartbeatReport]] = []
        self.beat = Heartbeat(lambda *report: self.reports.append(report))

    async def until_heard(self, count: int = 1) -> HeartbeatReport:
        """Tick until ``count`` more reports have come; return the last."""
        wanted = len(self.reports) + count
        async with asyncio.timeout(HANG_S):
            while len(self.reports) < wanted:
                await self.beat.tick()
        return self.reports[-1][1]


class Both:
    def __init__(self, mode: Mode) -> None:
        self.sockets = socket.socketpair()
        self.sides = Side(), Side()
        keys = ((ONE, TWO), (TWO, ONE))
        self.numbers = [
            side.beat.add(sock, *pair, mode)
            for side, sock, pair in zip(self.sides, self.sockets, keys, strict=True)
        ]

    def free(self) -> None:
        for side in self.sides:
            side.beat.close()
        for sock in self.sockets:
            sock.close()


@pytest.fixture(params=["thread", "process"])
async def both(request: pytest.FixtureRequest) -> AsyncIterator[Both]:
    async with no_leaks():
        both = Both(request.param)
        yield both
        both.free()


async def test_peers_hear_each_other(both: Both) -> None:
    one, two = both.sides
    await one.until_heard()
    await two.until_heard()
    report = await one.until_heard(3)
    assert report.state == heartbeat_helper.RUNNING
    assert report.heard_us_s is not None
    assert report.heard_us_s < HANG_S
    assert {number for number, _ in one.reports} == {both.numbers[0]}


async def test_end_of_the_connection_is_reported_once(both: Both) -> None:
    """Its owner dials again; the end is no verdict."""
    one, two = both.sides
    await one.until_heard()
    two.beat.remove(both.numbers[1])
    both.sockets[1].close()
    async with asyncio.timeout(HANG_S):
        while one.reports[-1][1].state != heartbeat_helper.ENDED:
            await one.beat.tick()
    for _ in range(3):
        assert await one.beat.tick()
    states = [report.state for _, report in one.reports]
    assert states.count(heartbeat_helper.ENDED) == 1


async def test_removed_connection_reports_nothing_more(both: Both) -> None:
    one = both.sides[0]
    await one.until_heard()
    one.beat.remove(both.numbers[0])
    one.beat.remove(both.numbers[0])
    assert await one.beat.tick()
    count = len(one.reports)
    assert await one.beat.tick()
    assert len(one.reports) == count
    assert both.sockets[0].fileno() >= 0


async def test_helper_that_was_killed_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with no_leaks():
        both = Both("process")
        one, two = both.sides
        await two.until_heard()
        pid = one.beat.helper_pid
        assert pid is not None
        kill(pid)
        await one.beat.tick()
        assert one.beat.helper_pid not in (None, pid)
        await one.until_heard(2)
        await two.until_heard(2)
        both.free()
    assert "exited with -9" in caplog.text


async def test_helper_that_hangs_is_replaced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile, ticks report that nothing is known, so that nobody is accused."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(heartbeat_module, "MISSED_S", 0.6)
    async with no_leaks():
        both = Both("process")
        one = both.sides[0]
        await one.until_heard()
        pid = one.beat.helper_pid
        assert pid is not None
        stop(pid)
        await one.beat.tick()  # it may have reported right before
        assert [await one.beat.tick() for _ in range(2)] == [False, False]
        await one.until_heard()
        assert one.beat.helper_pid != pid
        both.free()
    assert "is stuck" in caplog.text


async def test_helper_that_takes_long_to_end_is_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat_module, "REAP_S", 0.0)
    async with no_leaks():
        both = Both("process")
        await both.sides[0].until_heard()
        both.free()


async def test_stopped_owner_is_reported_by_its_helper(both: Both) -> None:
    """A helper in a process sees /proc; one in a thread stops with its owner."""
    report = await both.sides[0].until_heard()
    assert report.state == heartbeat_helper.RUNNING
    assert report.lag_s < HANG_S


async def test_without_connections_there_is_no_helper() -> None:
    """A process that has joined nothing starts nothing."""
    async with no_leaks():
        side = Side()
        assert await side.beat.tick()
        assert side.beat.helper_pid is None
        side.beat.close()


async def test_helper_that_cannot_start_is_an_error_and_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller closes the connection and tries again later."""
    async with no_leaks():
        side = Side()
        ours, theirs = socket.socketpair()
        with monkeypatch.context() as broken, ours, theirs:
            broken.setattr(sys, "executable", "/no/python")
            with pytest.raises(FileNotFoundError):
                side.beat.add(ours, ONE, TWO, "process")
        side.beat.close()


async def test_helper_that_cannot_be_replaced_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine short of processes or descriptors recovers."""
    both = Both("process")
    one = both.sides[0]
    assert one.beat.helper_pid is not None
    kill(one.beat.helper_pid)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/no/python")
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                await one.beat.tick()
    await one.until_heard()
    both.free()


async def test_helper_that_a_new_connection_starts_has_the_old_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection may be added between two attempts to replace a helper."""
    both = Both("process")
    one = both.sides[0]
    assert one.beat.helper_pid is not None
    kill(one.beat.helper_pid)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/no/python")
        with pytest.raises(FileNotFoundError):
            await one.beat.tick()
    ours, theirs = socket.socketpair()
    try:
        one.beat.add(ours, ONE, TWO, "process")
        await one.until_heard()
        await both.sides[1].until_heard(3)
        assert {number for number, _ in one.reports} == {both.numbers[0]}
    finally:
        both.free()
        ours.close()
        theirs.close()


async def test_datagrams_wait_for_a_helper_that_could_not_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer's port may arrive while there is no helper."""
    both = Both("process")
    one = both.sides[0]
    try:
        assert one.beat.helper_pid is not None
        kill(one.beat.helper_pid)
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/no/python")
            with pytest.raises(FileNotFoundError):
                await one.beat.tick()
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            one.beat.add_datagrams(both.numbers[0], sock)
    finally:
        both.free()


async def test_datagrams_of_an_unknown_connection_are_closed() -> None:
    """It was removed while its UDP socket was being made."""
    side = Side()
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    side.beat.add_datagrams(7, sock)
    assert sock.fileno() == -1
    side.beat.close()


async def test_heartbeats_over_udp_outlive_the_connection(both: Both) -> None:
    """They continue until the owner has opened another connection."""
    udp = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    for sock in udp:
        sock.setblocking(False)
        sock.bind(("127.0.0.1", 0))
    udp[0].connect(udp[1].getsockname())
    udp[1].connect(udp[0].getsockname())
    one, two = both.sides
    for side, number, sock in zip(both.sides, both.numbers, udp, strict=True):
        side.beat.add_datagrams(number, sock)
    for sock in both.sockets:
        sock.shutdown(socket.SHUT_RDWR)
    async with asyncio.timeout(HANG_S):
        while not (one.reports and one.reports[-1][1].heard_us_s is not None):
            await one.beat.tick()
            await two.beat.tick()
    await one.until_heard(3)
    assert one.reports[-1][1].state == heartbeat_helper.RUNNING


async def test_owner_that_blocks_repeatedly_still_receives_heartbeats() -> None:
    """Its reports come in the turn in which it gives up waiting; the helper stays."""
    async with no_leaks():
        both = Both("process")
        one = both.sides[0]
        await one.until_heard()
        pid = one.beat.helper_pid
        told = []
        for _ in range(8):
            waiting = asyncio.ensure_future(one.beat.tick())
            await asyncio.sleep(0.001)
            time.sleep(0.3)  # noqa: ASYNC251  # three intervals, on the loop
            told.append(await waiting)
        assert all(told)
        assert one.beat.helper_pid == pid
        both.free()


def test_sign_is_never_torn() -> None:
    """The helper reads it while it is written: a zero would look like a long stall."""
    script = """
import mmap, os, sys
from multiworld.liveness.heartbeat_helper import SIGN
sign = mmap.mmap(int(sys.argv[1]), SIGN.size)
for _ in range(300_000):
    if SIGN.unpack_from(sign)[0] < 1.0:
        sys.exit("torn")
"""
    memory = os.memfd_create("sign")
    try:
        os.ftruncate(memory, heartbeat_helper.SIGN.size)
        with mmap.mmap(memory, heartbeat_helper.SIGN.size) as sign:
            give_sign(sign)
            with subprocess.Popen(
                [sys.executable, "-c", script, str(memory)], pass_fds=[memory]
            ) as reader:
                while reader.poll() is None:
                    give_sign(sign)
            assert reader.returncode == 0
    finally:
        os.close(memory)


def frame_from(sock: socket.socket) -> heartbeat_helper.HeartbeatFrame:
    frame = sock.recv(heartbeat_helper.FRAME_BYTES, socket.MSG_WAITALL)
    return heartbeat_helper.decode_heartbeat(frame, ONE)


def test_connection_that_the_helper_did_not_get_is_reported_as_ended() -> None:
    """The helper had no descriptor left; the owner opens another connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sign = bytearray(heartbeat_helper.SIGN.size)
    helper = heartbeat_helper.HeartbeatHelper(theirs, sign, None, 0.01)
    ours.send(heartbeat_helper.encode_order(heartbeat_helper.ADD, 7, ONE, TWO))
    thread = threading.Thread(target=helper.run)
    thread.start()
    with ours:
        ours.settimeout(HANG_S)
        message = ours.recv(heartbeat_helper.READ_BYTES)
        entries = heartbeat_helper.REPORT.iter_unpack(message)
        assert next(entries)[:2] == (7, heartbeat_helper.ENDED)
        ours.send(heartbeat_helper.encode_order(heartbeat_helper.REMOVE, 7, ONE, TWO))
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_end_that_could_not_be_reported_is_reported_later() -> None:
    """The owner was stuck, so its socket was full."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sign = bytearray(heartbeat_helper.SIGN.size)
    helper = heartbeat_helper.HeartbeatHelper(theirs, sign, None, 0.01)
    with contextlib.suppress(BlockingIOError):
        while True:
            theirs.send(b"")
    peers = []
    for number in (1, 2):
        near, far = socket.socketpair()
        far.settimeout(HANG_S)
        order = heartbeat_helper.encode_order(heartbeat_helper.ADD, number, ONE, TWO)
        socket.send_fds(ours, [order], [near.fileno()])
        near.close()
        peers.append(far)
    thread = threading.Thread(target=helper.run)
    thread.start()
    with ours, peers[0] as ends, peers[1] as stays:
        ours.settimeout(HANG_S)
        heard = heartbeat_helper.HeartbeatFrame(0, 0, 1, 0, 0)
        ends.send(heartbeat_helper.encode_heartbeat(heard, TWO))
        while frame_from(ends).heard_ms == heartbeat_helper.NEVER_MS:
            pass
        ends.shutdown(socket.SHUT_RDWR)
        stays.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                stays.recv(heartbeat_helper.READ_BYTES)
        stays.settimeout(HANG_S)
        for _ in range(2):  # the second turn has read the end, and could not report it
            frame_from(stays)
        while not (message := ours.recv(heartbeat_helper.READ_BYTES)):
            pass
        entries = heartbeat_helper.REPORT.iter_unpack(message)
        assert next(entries)[:2] == (1, heartbeat_helper.ENDED)
    thread.join(HANG_S)
    assert not thread.is_alive()


async def test_helper_that_starved_continues_while_another_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What starves it may starve the start of another helper, too."""
    monkeypatch.setattr(heartbeat_module, "MISSED_S", 0.6)
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 600\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    async with no_leaks():
        both = Both("process")
        one, other = both.sides
        await one.until_heard()
        pid = one.beat.helper_pid
        assert pid is not None
        monkeypatch.setattr(sys, "executable", str(slow))
        stop(pid)
        while await one.beat.tick():
            pass  # it may have reported right before
        for _ in range(6):
            await one.beat.tick()
        assert one.beat.helper_pid == pid
        os.kill(pid, signal.SIGCONT)
        await one.until_heard()
        await other.until_heard(3)
        assert one.beat.helper_pid == pid
        both.free()
