"""Connections of a Gloo world, found among a process's descriptors."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from multiworld.backends.c10d.sockets import Connections


@pytest.mark.parametrize("is_full", [False, True], ids=["", "no descriptor is left"])
def test_connections_are_cut(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
    ):
        theirs, _ = listener.accept()
        with theirs:
            theirs.settimeout(5.0)
            known = Connections(("127.0.0.1", 1), {listener.getsockname()[:2]})
            assert known.filenos() == [ours.fileno()]
            if is_full:
                monkeypatch.setattr(os, "dup", full)
            known.cut()
            assert theirs.recv(1) == b""
            # The descriptor is still open, and its owner closes it.
            assert ours.getsockname()[0] == "127.0.0.1"
