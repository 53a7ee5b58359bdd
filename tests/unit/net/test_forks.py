"""Descriptors that forked children close."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator

import pytest

from multiworld.net.forks import closed_in_forks, filenos


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_living_forked_child_does_not_hide_the_end_of_its_parents_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    closed_in_forks(ours)
    with forked():
        ours.close()
        there, _, _ = select.select([theirs], [], [], 20.0)
        assert there, "the child keeps the connection open"
        assert theirs.recv(1) == b""


def test_descriptor_number_stays_in_use_in_the_child(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """An inherited object would otherwise close the file that gets the number."""
    fd = closed_in_forks(pair[0]).fileno()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            is_free = fd in [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
            status = 2 if is_free else 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_closed_and_forgotten_owners_are_not_listed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    known = set(filenos())
    for sock in pair:
        closed_in_forks(sock)
    numbers = [sock.fileno() for sock in pair]
    assert set(filenos()) - known == set(numbers)
    pair[0].close()
    assert set(filenos()) - known == {numbers[1]}
    pair[1].detach()
    assert set(filenos()) == known
    os.close(numbers[1])


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Fork a child that lives until the block ends."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.pause()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
