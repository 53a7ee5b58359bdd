"""The warm machines of a Ray cluster: a ``NodeLauncher`` on each.

The launchers are not detached: they and their fork servers exit with the bridge. The
replicas keep running, because their holders are detached.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from multiworld.serve.launchers.protocol import WarmNodes
from multiworld.serve.launchers.ray.actor import NodeLauncher


class WarmNodePool:
    """The launchers of all machines. Its methods can be called from any thread."""

    def __init__(self) -> None:
        remote: Any = ray.remote  # Ray's overloads lack a keyword-only call
        self._class = remote(NodeLauncher)
        self._lock = threading.Lock()
        self._order: WarmNodes | None = None
        self._launchers: dict[str, Any] = {}

    def configure(self, order: WarmNodes) -> None:
        """Set what the fork servers import; no machine is warmed before that."""
        with self._lock:
            self._order = order

    def keep(self, keys: Iterable[str]) -> None:
        """Warm new machines, and forget those whose Ray id is not in `keys`."""
        wanted = set(keys)
        with self._lock:
            if self._order is None:
                return  # the controller has not yet sent what they import
            for key in self._launchers.keys() - wanted:
                del self._launchers[key]
        for key in wanted:
            self.launcher(key)

    def launcher(self, key: str) -> Any:
        """Return the launcher of a machine, by its Ray id; start one if needed."""
        with self._lock:
            found = self._launchers.get(key)
            if found is None:
                found = self._launchers[key] = self._start(key)
            return found

    def _start(self, key: str) -> Any:
        there = NodeAffinitySchedulingStrategy(key, soft=False)
        order = self._order
        assert order is not None, "the order to warm machines precedes all launches"
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": there}
        made = self._class.options(**options).remote(
            order.preload, order.folder, order.logs, key[:8]
        )
        made.warm.remote()
        return made
