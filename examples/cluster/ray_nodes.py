"""A Ray cluster on this machine, whose nodes can be killed and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

STORE_BYTES = 80 * 2**20  # of each node's object store

# Ray system settings: Ray declares a node lost after a few seconds.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
    # Nodes must outlive a lost head; see docs/serve/ray.md.
    "gcs_rpc_server_reconnect_timeout_s": 3600,
    "worker_niceness": 0,
}


class RayNodes:
    """A Ray cluster; it starts with one node, named "head".

    Args:
        cpus: CPUs that each node offers to Ray.
    """

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
        """Address of the head, HOST:PORT."""
        return str(self._cluster.address)

    @property
    def names(self) -> list[str]:
        """Names of the nodes."""
        return list(self._nodes)

    def add(self, name: str) -> None:
        """Start a node.

        Args:
            name: Its name, also its label ``multiworld/name``.
        """
        self._nodes[name] = self._cluster.add_node(**self._args(name))

    def remove(self, name: str) -> None:
        """Kill all processes of a node at once, like a power failure.

        Args:
            name: Name of the node.
        """
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # remove_node() would work in the main thread only, and would wait.
        self._cluster.worker_nodes.discard(self._nodes.pop(name))

    def freeze(self, name: str, *, is_thawed: bool = False) -> None:
        """Suspend every process of a node with SIGSTOP.

        Args:
            name, is_thawed: Name of the node; True resumes with SIGCONT instead.
        """
        number = signal.SIGCONT if is_thawed else signal.SIGSTOP
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self, name: str) -> list[int]:
        """Return the process IDs of a node: its raylet and all descendants.

        Args:
            name: Name of the node.
        """
        import psutil

        found = []
        for process in self._nodes[name].all_processes.get("raylet", []):
            with contextlib.suppress(psutil.NoSuchProcess):
                raylet = psutil.Process(process.process.pid)
                found += [raylet.pid, *(p.pid for p in raylet.children(recursive=True))]
        return found

    def freeze_head(self, *, is_thawed: bool = False) -> None:
        """Suspend the head's control service (GCS) with SIGSTOP.

        Args:
            is_thawed: Resume it with SIGCONT instead.
        """
        (server,) = self._cluster.head_node.all_processes["gcs_server"]
        number = signal.SIGCONT if is_thawed else signal.SIGSTOP
        os.kill(server.process.pid, number)

    def lose_head(self) -> None:
        """Kill the head's control service (GCS); the nodes keep running."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)

    def end(self) -> None:
        """Kill the remaining nodes and shut the cluster down."""
        for name in list(self._nodes):
            self.freeze(name, is_thawed=True)
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_nodes(count: int = 4, cpus: float = 4.0) -> Iterator[RayNodes]:
    """Yield a running cluster, and shut it down after the block.

    Args:
        count: Number of nodes, with the head; the others are named n1, n2, and so on.
        cpus: CPUs that each node offers to Ray.
    """
    cluster = RayNodes(cpus)
    try:
        for number in range(1, count):
            cluster.add(f"n{number}")
        yield cluster
    finally:
        cluster.end()
