"""Native c10d process groups: making, aborting and freeing them. Making a group blocks
and may fail halfway, so it runs in a thread, and ``give_up`` ends it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from multiworld.backends import torch_names
from multiworld.backends.c10d import nccl, sockets
from multiworld.backends.c10d.store import C10dStore
from multiworld.errors import ConfigError
from multiworld.net.forks import closed_in_forks

# Seconds of Gloo's connect timeout. Gloo waits five times as long for a member that was
# admitted and died.
CONNECT_S = 2.0


def check_backend(name: str, device: torch.device) -> None:
    """Check, before any I/O, that this process can use a backend."""
    torch_names.check("c10d")
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
    usable = ["direct", "memory", *plugins]
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
        self._connections: sockets.Connections | None = None

    def make(self, rank: int, size: int, host: str, timeout_s: float) -> None:
        """Make the native group; block until it is connected, or until ``give_up``."""
        self.native = self._new(rank, size, host, timeout_s)
        if self.name == "gloo":
            self._note_addresses(rank)
        self.store.seen.clear()

    def _new(self, rank: int, size: int, host: str, timeout_s: float) -> Any:
        """Return a native group, bound to ``host``."""
        name, store = self.name, self.store
        if name == "nccl":
            return nccl.make_nccl(store, rank, size, self.device, timeout_s)
        if name == "gloo":
            # Each Gloo device has its own listener, by which ``sockets`` finds the
            # group's connections.
            return torch_names.new_gloo(
                store, rank, size, host=host, connect_s=CONNECT_S, timeout_s=timeout_s
            )
        plugin = torch_names.plugins()[name.upper()]
        if plugin.extended_api:
            raise ConfigError(
                "backend", name, "use a backend registered without extended_api"
            )
        return plugin.creator_fn(store, rank, size, timedelta(seconds=timeout_s))

    def _note_addresses(self, rank: int) -> None:
        own: sockets.SocketAddress | None = None
        peers: set[sockets.SocketAddress] = set()
        for key, value in self.store.seen.items():
            with contextlib.suppress(ValueError):
                address = sockets.parse_published(value)
                if key.rpartition("/")[2] == str(rank):
                    own = address
                else:
                    peers.add(address)
        if own is not None:
            self._connections = closed_in_forks(sockets.Connections(own, peers))

    def give_up(self) -> None:
        """Make a running ``make`` fail, by closing the store."""
        self.store.close()

    def cut(self) -> None:
        """Release every waiter: shut the group's sockets down, or abort the group."""
        if self._connections is not None:
            self._connections.cut()
        elif self.name == "nccl" and self.native is not None:
            # Abort all groups that break in this iteration of the event loop together:
            # see ``nccl.Aborter``.
            self._is_aborted = True
            nccl.aborter.add(self.native)
            self._call_soon(nccl.aborter.abort_all)
        elif self.native is not None and hasattr(self.native, "abort"):
            self.native.abort()

    def drop(self, done: Callable[[], None] | None = None) -> None:
        """Free the native group in a thread, because its destructor joins threads."""
        holder = [self.native]
        self.native = None
        # Destroying an aborted communicator hangs on newer releases of NCCL.
        ends_politely = self.name == "nccl" and not self._is_aborted

        def free() -> None:
            if ends_politely and holder[0] is not None:
                with contextlib.suppress(RuntimeError):
                    holder[0].shutdown()
            holder.clear()
            self.store.close()
            if done is not None:
                done()

        # The thread is not a daemon, because a group that outlives the interpreter
        # aborts the process.
        threading.Thread(target=free, name="multiworld-drop-group").start()
