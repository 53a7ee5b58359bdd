"""Making, aborting and dropping c10d's own process groups. Shell.

A ``Group`` wraps one native group (``ProcessGroupGloo``, ``ProcessGroupNCCL``, or what
a registered creator makes). Making one blocks and may fail half way; it is done in a
thread, and ``give_up`` ends it early.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from multiworld.backends.c10d import nccl, sockets
from multiworld.backends.c10d.store import C10dStore
from multiworld.errors import ConfigError

CONNECT_S = 2.0
"""Gloo's own limit while members connect to each other. It waits five times as long as
it is told for a member that was admitted and died."""


class GroupMaker(Protocol):
    """Makes a native group on a store."""

    def __call__(
        self, store: Store, rank: int, size: int, host: str, timeout_s: float
    ) -> Any:
        """Return the group; blocks."""


def _nccl_maker(device: torch.device) -> GroupMaker:
    def make(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
        return nccl.make_nccl(store, rank, size, device, timeout_s)

    return make


def make_gloo(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    """Make a Gloo group that binds to ``host`` and connects eagerly.

    Each group gets a device, and so a listener, of its own: its connections can then be
    told from those of other worlds.
    """
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    try:
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._threads = 1
        options._timeout = timedelta(seconds=CONNECT_S)
        group = gloo(store, rank, size, options)
        # Connecting is over; what programs do with the group has the world's limit.
        group._set_default_timeout(timedelta(seconds=timeout_s))
    finally:
        # A traceback that is kept would keep the device: a thread and four descriptors.
        del options
    return group


def make_registered(name: str) -> GroupMaker:
    """Return a maker for a backend that a plugin registered with torch."""
    plugin = dist.Backend._plugins[name.upper()]

    def make(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
        if plugin.extended_api:
            raise ConfigError(
                "backend", name, "a backend whose creator has the plain signature"
            )
        return plugin.creator_fn(store, rank, size, timedelta(seconds=timeout_s))

    return make


def maker_of(name: str, device: torch.device) -> GroupMaker:
    """Return how to make a group of backend ``name``."""
    if name == "nccl":
        return _nccl_maker(device)
    return make_gloo if name == "gloo" else make_registered(name)


def check_backend(name: str, device: torch.device) -> None:
    """Check that a backend is there, before any I/O.

    Raises:
        ConfigError: torch does not know it, or it was not built in.
    """
    known = ["direct", "memory", *dist.Backend.backend_list]
    plugins = [plugin.lower() for plugin in dist.Backend._plugins]
    available = dist.is_backend_available(name) if isinstance(name, str) else False
    if name in ("gloo", "nccl") and available:
        if name == "nccl" and device.type != "cuda":
            raise ConfigError("device", str(device), "backend 'nccl' needs 'cuda'")
        if name == "nccl" and not torch.cuda.is_available():
            raise ConfigError("backend", name, "nccl needs a GPU, and there is none")
        return
    if name in plugins:
        return
    usable = [k for k in known if k in ("direct", "memory", *plugins)]
    usable += [k for k in ("gloo", "nccl") if dist.is_backend_available(k)]
    raise ConfigError("backend", name, f"one of {', '.join(dict.fromkeys(usable))}")


class Group:
    """One native group, and how to be rid of it."""

    def __init__(
        self,
        name: str,
        store: C10dStore,
        device: torch.device,
        call_soon: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.name, self.device = name, device
        self._call_soon = call_soon
        self._is_aborted = False
        self.store = store
        self.native: Any = None
        self._published: dict[str, bytes] = {}
        self._connections: sockets.Connections | None = None

    def record(self, key: str, value: bytes) -> None:
        """Remember what passed through the store while the group was made."""
        self._published[key] = value

    def make(self, rank: int, size: int, host: str, timeout_s: float) -> None:
        """Make the group; blocks. See ``give_up``."""
        make = maker_of(self.name, self.device)
        self.native = make(self.store, rank, size, host, timeout_s)
        if self.name == "gloo":
            self._note_addresses(rank)
        self._published.clear()

    def _note_addresses(self, rank: int) -> None:
        own: sockets.Where | None = None
        peers: set[sockets.Where] = set()
        for key, value in self._published.items():
            with contextlib.suppress(ValueError):
                where = sockets.parse_published(value)
                if key.rpartition("/")[2] == str(rank):
                    own = where
                else:
                    peers.add(where)
        if own is not None:
            self._connections = sockets.Connections(own, peers)

    def give_up(self) -> None:
        """End a ``make`` that is under way, with an error."""
        self.store.close()

    def cut(self) -> None:
        """Release everybody who waits in an operation of this group."""
        if self._connections is not None:
            self._connections.cut()
        elif self.name == "nccl" and self.native is not None:
            # With all others that break now: see ``nccl``.
            self._is_aborted = True
            nccl.aborter.add(self.native)
            self._call_soon(nccl.aborter.abort_all)
        elif self.native is not None and hasattr(self.native, "abort"):
            self.native.abort()

    def filenos(self) -> list[int]:
        """Return the connections that a forked child must close."""
        found = [self.store.fileno()]
        return (
            found if self._connections is None else self._connections.filenos() + found
        )

    def drop(self, done: Callable[[], None] | None = None) -> None:
        """Free the native group in a thread: its destructor joins threads.

        The thread is waited for at exit: a group that lives longer than the
        interpreter aborts the process.
        """
        holder = [self.native]
        self.native = None
        ends_politely = self.name == "nccl" and not self._is_aborted

        def free() -> None:
            if ends_politely and holder[0] is not None:
                with contextlib.suppress(RuntimeError):
                    holder[0].shutdown()
            holder.clear()
            self.store.close()
            if done is not None:
                done()

        threading.Thread(target=free, name="multiworld-drop-group").start()
