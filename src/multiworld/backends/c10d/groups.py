"""Native c10d process groups: making, aborting and freeing them.

A ``Group`` wraps one native group: a ``ProcessGroupGloo``, a ``ProcessGroupNCCL``, or
the group that a registered creator returns. Making one blocks and may fail half way, so
it runs in a thread; ``give_up`` ends it early.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store

from multiworld.backends import torch_names
from multiworld.backends.c10d import nccl, sockets
from multiworld.backends.c10d.store import C10dStore
from multiworld.errors import ConfigError

CONNECT_S = 2.0
"""Seconds for Gloo's own limit while members connect to each other. Gloo waits five
times as long for a member that was admitted and then died."""


class GroupMaker(Protocol):
    """Function that makes a native group on a store."""

    def __call__(
        self, store: Store, rank: int, size: int, host: str, timeout_s: float
    ) -> Any:
        """Return the new group; block until the members are connected. ``host`` is the
        address of the interface to bind to; ``timeout_s`` limits the group's
        operations."""


def _nccl_maker(device: torch.device) -> GroupMaker:
    def make(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
        return nccl.make_nccl(store, rank, size, device, timeout_s)

    return make


def make_gloo(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    """Return a Gloo group that binds to ``host`` and connects eagerly; blocks. Each
    group has its own device, and so its own listener. This is how ``sockets``
    distinguishes its connections from those of other worlds."""
    return torch_names.new_gloo(
        store, rank, size, host=host, connect_s=CONNECT_S, timeout_s=timeout_s
    )


def make_registered(name: str) -> GroupMaker:
    """Return a maker for a backend that a plugin registered with torch."""
    plugin = torch_names.plugins()[name.upper()]

    def make(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
        if plugin.extended_api:
            raise ConfigError(
                "backend", name, "use a backend registered without extended_api"
            )
        return plugin.creator_fn(store, rank, size, timedelta(seconds=timeout_s))

    return make


def maker_of(name: str, device: torch.device) -> GroupMaker:
    if name == "nccl":
        return _nccl_maker(device)
    return make_gloo if name == "gloo" else make_registered(name)


def check_backend(name: str, device: torch.device) -> None:
    """Check, before any I/O, that this process can use a backend. Raises
    ``ConfigError`` if torch lacks the backend or it does not work on ``device``, and
    ``TorchVersionError`` if torch lacks names that multiworld needs."""
    torch_names.check("c10d")
    known = ["direct", "memory", *dist.Backend.backend_list]
    plugins = [plugin.lower() for plugin in torch_names.plugins()]
    available = dist.is_backend_available(name) if isinstance(name, str) else False
    if name in ("gloo", "nccl") and available:
        if name == "nccl" and device.type != "cuda":
            raise ConfigError("device", str(device), "backend 'nccl' needs 'cuda'")
        if name == "nccl" and not torch.cuda.is_available():
            raise ConfigError("backend", name, "nccl needs a GPU, but torch finds none")
        torch_names.check("gloo" if name == "gloo" else "nccl")
        return
    if name in plugins:
        return
    usable = [k for k in known if k in ("direct", "memory", *plugins)]
    usable += [k for k in ("gloo", "nccl") if dist.is_backend_available(k)]
    raise ConfigError("backend", name, f"use one of {', '.join(dict.fromkeys(usable))}")


class Group:
    """One native group, from its construction to its end; it closes ``store``."""

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
        """Remember a value that passed through the store while the group was made."""
        self._published[key] = value

    def make(self, rank: int, size: int, host: str, timeout_s: float) -> None:
        """Make the native group; block until it is connected, or until ``give_up``."""
        make = maker_of(self.name, self.device)
        self.native = make(self.store, rank, size, host, timeout_s)
        if self.name == "gloo":
            self._note_addresses(rank)
        self._published.clear()

    def _note_addresses(self, rank: int) -> None:
        own: sockets.SocketAddress | None = None
        peers: set[sockets.SocketAddress] = set()
        for key, value in self._published.items():
            with contextlib.suppress(ValueError):
                address = sockets.parse_published(value)
                if key.rpartition("/")[2] == str(rank):
                    own = address
                else:
                    peers.add(address)
        if own is not None:
            self._connections = sockets.Connections(own, peers)

    def give_up(self) -> None:
        """Make a running ``make`` fail, by closing the store."""
        self.store.close()

    def cut(self) -> None:
        """Release every waiter of this group, by closing sockets or aborting it."""
        if self._connections is not None:
            self._connections.cut()
        elif self.name == "nccl" and self.native is not None:
            # Together with all groups that break in this turn of the loop: see nccl.
            self._is_aborted = True
            nccl.aborter.add(self.native)
            self._call_soon(nccl.aborter.abort_all)
        elif self.native is not None and hasattr(self.native, "abort"):
            self.native.abort()

    def filenos(self) -> list[int]:
        found = [self.store.fileno()]
        return (
            found if self._connections is None else self._connections.filenos() + found
        )

    def drop(self, done: Callable[[], None] | None = None) -> None:
        """Free the native group in a thread, because its destructor joins threads. The
        interpreter waits for the thread at exit: a group that outlives the interpreter
        aborts the process. ``done`` is called in the thread at the end."""
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
