"""Connections that a forked child closes, because its copies would hide its parent's
death from the peers."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import weakref
from typing import Protocol, TypeVar


class Descriptors(Protocol):
    """An owner of descriptors that have no socket objects."""

    def filenos(self) -> list[int]:
        """Return the descriptors that are open now."""


Owner = TypeVar("Owner", bound="socket.socket | Descriptors")

_owners: weakref.WeakSet[socket.socket | Descriptors] = weakref.WeakSet()


def closed_in_forks(owner: Owner) -> Owner:
    """Return ``owner``, whose descriptors every child forked from now on closes."""
    _install()
    _owners.add(owner)
    return owner


def filenos() -> list[int]:
    """Return the descriptors that a child forked now would close."""
    found: list[int] = []
    for owner in list(_owners):
        if isinstance(owner, socket.socket):
            found.append(owner.fileno())
        else:
            found += owner.filenos()
    return [fd for fd in found if fd >= 0]


@functools.cache
def _install() -> None:
    os.register_at_fork(after_in_child=_close)


def _close() -> None:
    # Keep the descriptors' numbers in use: inherited objects still hold the numbers,
    # and would close any other file that gets one of them.
    try:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no other file can be opened either, so none gets the numbers
        nothing = -1
    for fd in filenos():
        with contextlib.suppress(OSError):
            if nothing < 0:
                os.close(fd)
            else:
                os.dup2(nothing, fd, inheritable=False)
    if nothing >= 0:
        os.close(nothing)
