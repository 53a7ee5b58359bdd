"""A Ray cluster of several nodes on this machine, whose nodes can be lost.

Not imported with ``multiworld.testing``: it needs ``multiworld-elastic[ray]``.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

STORE_BYTES = 80 * 2**20
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
    # What a head that is lost must not take along; see docs/serve/ray.md.
    "gcs_rpc_server_reconnect_timeout_s": 3600,
}


class RayNodes:
    """The cluster. Nodes have names: head, n1, n2, …"""

    def __init__(self, cpus: float = 4.0) -> None:
        from ray.cluster_utils import Cluster

        self._cpus = cpus
        args = {**self._args("head"), "_system_config": HEALTH}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=args)
        self._nodes: dict[str, Any] = {"head": self._cluster.head_node}

    def _args(self, name: str) -> dict[str, Any]:
        return {
            "num_cpus": self._cpus,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "labels": {"multiworld/name": name},
        }

    @property
    def address(self) -> str:
        """Of the head."""
        return str(self._cluster.address)

    @property
    def names(self) -> list[str]:
        """Of the nodes."""
        return list(self._nodes)

    def add(self, name: str) -> None:
        """Add a node."""
        self._nodes[name] = self._cluster.add_node(**self._args(name))

    def remove(self, name: str) -> None:
        """Take a node away as a power failure would: all of its processes at once."""
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Not by remove_node(), which runs in the main thread only, and waits.
        self._cluster.worker_nodes.discard(self._nodes.pop(name))

    def freeze(self, name: str, *, is_thawed: bool = False) -> None:
        """Stop every process of a node, or let them go on."""
        number = signal.SIGCONT if is_thawed else signal.SIGSTOP
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self, name: str) -> list[int]:
        """Return the raylet of a node and everything below it."""
        import psutil

        found = []
        for process in self._nodes[name].all_processes.get("raylet", []):
            with contextlib.suppress(psutil.NoSuchProcess):
                raylet = psutil.Process(process.process.pid)
                found += [raylet.pid, *(p.pid for p in raylet.children(recursive=True))]
        return found

    def freeze_head(self, *, is_thawed: bool = False) -> None:
        """Stop the process that knows the cluster, or let it go on."""
        (server,) = self._cluster.head_node.all_processes["gcs_server"]
        number = signal.SIGCONT if is_thawed else signal.SIGSTOP
        os.kill(server.process.pid, number)

    def lose_head(self) -> None:
        """Kill the process that knows the cluster; the nodes go on."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)

    def end(self) -> None:
        """End what is left."""
        for name in list(self._nodes):
            self.freeze(name, is_thawed=True)
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_nodes(count: int = 4, cpus: float = 4.0) -> Iterator[RayNodes]:
    """Run a cluster; nothing of it stays."""
    cluster = RayNodes(cpus)
    try:
        for number in range(1, count):
            cluster.add(f"n{number}")
        yield cluster
    finally:
        cluster.end()
