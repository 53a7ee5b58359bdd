"""Ray driver of a service: starts and stops actors and lists machines.

It runs as ``python -m`` this module, with arguments FD ADDRESS NAMESPACE APP, and takes
orders from the socket FD. Actors are detached: the next bridge finds them by name.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from multiworld.serve.controller.launchers import protocol
from multiworld.serve.controller.launchers.ray.actor import (
    NodeLauncher,
    ReplicaHolder,
    probe_machine,
)

PLACE_S = 10.0  # maximum seconds for Ray to reserve a replica's resources
# Maximum seconds to start an actor's process or a replica, including the warm-up of a
# new machine.
START_S = 60.0
CODE_S = 2.0  # maximum seconds for a machine to report the exit code of a replica
LOOK_S = 0.5  # seconds between queries of the head
CLAIM_S = 5.0  # seconds for the head to notice that an earlier controller has exited
GPU_S = 30.0  # maximum seconds for a machine to report its GPUs and bfloat16 speed

# Amount of the machine's own ``node:`` resource in every bundle. A bundle must not be
# empty, and a replica that books no CPU must not reserve one in Ray.
MINIMAL_SHARE = 0.0001

HEAD = "node:__internal_head__"  # a resource that only the head has
STARTERS = 64  # maximum number of orders that are carried out at once
DRAIN_S = 5.0  # seconds for pending orders after the controller has closed the socket

NAME_LABEL = "multiworld/name"
ID_LABEL = "ray.io/node-id"
LOCAL = {
    # Replicas must survive the loss of the head; see docs/serve/ray.md.
    "gcs_rpc_server_reconnect_timeout_s": 10**6,
    # Ray's default, 15, leaves replicas 3 % of a core that another program uses.
    "worker_niceness": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}

Started = tuple[int, int, str]  # process id and start time of a rank, path of its leash


class WarmNodePool:
    """A ``NodeLauncher`` on each machine; thread-safe."""

    def __init__(self) -> None:
        remote: Any = ray.remote  # Ray's overloads lack a keyword-only call
        self._class = remote(NodeLauncher)
        self._lock = threading.Lock()
        self._order: protocol.WarmNodes | None = None
        # The launchers are not detached, so they and their fork servers exit with the
        # bridge. Replicas keep running, because their holders are detached.
        self._launchers: dict[str, Any] = {}

    def configure(self, order: protocol.WarmNodes) -> None:
        """Set the modules that fork servers import; required before warming."""
        with self._lock:
            self._order = order

    def keep(self, keys: Iterable[str]) -> None:
        """Warm new machines; forget those whose Ray id is not in ``keys``."""
        wanted = set(keys)
        with self._lock:
            if self._order is None:
                return  # the controller has not yet sent ``WarmNodes``
            for key in self._launchers.keys() - wanted:
                del self._launchers[key]
        for key in wanted:
            self.launcher(key)

    def launcher(self, key: str) -> Any:
        """Return a machine's launcher, by its Ray id; start one if needed."""
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


class Bridge:
    """The main loop of the bridge; a pool of threads carries out the orders."""

    def __init__(self, control: socket.socket, namespace: str, app: str) -> None:
        self._control, self._namespace, self._app = control, namespace, app
        self._news: queue.SimpleQueue[protocol.BridgeNews] = queue.SimpleQueue()
        self._starters = ThreadPoolExecutor(STARTERS)
        self._remote: Any = ray.remote  # Ray's overloads lack a keyword-only call
        self._class = self._remote(ReplicaHolder)
        self._warm = WarmNodePool()
        self._ask: Any = ray.nodes
        self._facts: dict[str, tuple[list[tuple[int, str, int]], float]] = {}
        self._ask_at: dict[str, float] = {}  # when to ask a machine again

    def claim_service(self) -> None:
        """Register as the service's only controller on this cluster, or raise."""
        name = f"{self._app}/controller"
        limit = time.monotonic() + CLAIM_S
        while True:
            try:
                there = get_placement_group(name)
            except ValueError:
                break
            if time.monotonic() > limit:
                raise RuntimeError(
                    f"a controller of {self._app!r} already runs on this cluster "
                    f"(placement group {there.id.hex()}); shut it down, or give this "
                    "service another name (app:)"
                )
            time.sleep(LOOK_S)
        # The name of this placement group is the lock; Ray removes the group when this
        # driver exits.
        self._lock = placement_group([{HEAD: MINIMAL_SHARE}], name=name)
        ray.get(self._lock.ready(), timeout=PLACE_S)

    def run(self) -> None:
        """Carry out orders until the controller closes the socket."""
        nodes = self._nodes()
        self._news.put(protocol.ClusterReady(nodes))
        self._start(self._write)
        self._start(self._look, nodes)
        buffer = b""
        while data := self._control.recv(1 << 20):
            buffer += data
            while b"\n" in buffer:
                line, _, buffer = buffer.partition(b"\n")
                order = protocol.ACTOR_ORDERS.decode(line)
                match order:
                    case protocol.Ping():
                        self._news.put(protocol.Pong())
                    case protocol.Sweep(known):
                        # Carried out in this thread, because later orders must wait for
                        # it.
                        self._sweep(known)
                    case protocol.WarmNodes():
                        self._warm.configure(order)
                        self._warm.keep(node.key for node in nodes)
                    case _:
                        self._starters.submit(self._carry_out, order)
        self._start(_exit_after, DRAIN_S)
        self._starters.shutdown(wait=True)

    def _carry_out(self, order: protocol.ActorOrder) -> None:
        try:
            match order:
                case protocol.LaunchActor():
                    self._launch(order)
                case protocol.AdoptActor(name, ranks, must_be_known):
                    self._adopt(name, ranks, must_be_known)
                case protocol.KillActor(name, ranks):
                    self._kill(name, ranks)
        except Exception:
            # If the bridge continued, the launcher would never learn what became of the
            # replica.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the launcher starts another bridge, which cleans up

    def _start(self, body: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=body, args=args, daemon=True).start()

    def _write(self) -> None:
        while True:
            news = self._news.get()
            try:
                self._control.sendall(protocol.encode(news))
            except OSError:
                return  # the reader sees that the socket is closed

    # Machines.

    def _look(self, before: tuple[protocol.ClusterNode, ...]) -> None:
        while True:
            time.sleep(LOOK_S)
            try:
                found = self._nodes()
            except Exception as error:
                sys.stderr.write(f"the head of the cluster does not answer: {error}\n")
                sys.stderr.flush()
                os._exit(1)  # the launcher starts another bridge
            self._warm.keep(node.key for node in found)
            # Send the nodes even if they have not changed, to show that the head
            # answers.
            self._news.put(protocol.ClusterNodes(found, found == before))
            before = found

    def _nodes(self) -> tuple[protocol.ClusterNode, ...]:
        return tuple(self._node(node) for node in self._ask() if node["Alive"])

    def _node(self, node: dict[str, Any]) -> protocol.ClusterNode:
        has, key = node["Resources"], node["NodeID"]
        if time.monotonic() > self._ask_at.get(key, 0.0) and key not in self._facts:
            self._ask_at[key] = time.monotonic() + 2 * GPU_S
            self._starters.submit(self._ask_facts, key)
        gpus, bfloat16 = self._facts.get(key, ((), None))
        return protocol.ClusterNode(
            name=_name(node),
            key=key,
            address=node["NodeManagerAddress"],
            cpus=has.get("CPU", 0.0),
            memory_bytes=int(has.get("memory", 0)),
            gpus=tuple(gpus) if has.get("GPU") else (),
            bfloat16=bfloat16,
        )

    def _ask_facts(self, key: str) -> None:
        """Query a machine's GPUs and its bfloat16 speed, for later node lists."""
        there = NodeAffinitySchedulingStrategy(key, soft=False)
        probe = self._remote(num_cpus=0, scheduling_strategy=there)(probe_machine)
        try:
            self._facts[key] = ray.get(probe.remote(), timeout=GPU_S)
        except Exception as error:
            # The machine's GPUs stay unused until a later query succeeds.
            sys.stderr.write(f"the resources of {key} are not known yet: {error}\n")

    # Replicas.

    def _launch(self, order: protocol.LaunchActor) -> None:
        name, ranks, bundle = order.name, len(order.args), order.bundle
        try:
            group = placement_group(
                [{f"node:{order.address}": MINIMAL_SHARE, **bundle}] * ranks,
                strategy="STRICT_PACK",
                name=self._named(name),
                lifetime="detached",
                bundle_label_selector=[{ID_LABEL: order.key}] * ranks,
            )
            if not group.wait(PLACE_S):
                raise ray.exceptions.GetTimeoutError
            holders = [self._holder(name, rank, group, bundle) for rank in range(ranks)]
            started = self._start_ranks(order, holders)
        except Exception as error:
            self._end(name, ranks)
            self._let_go(order)  # ends the ranks that have started
            why = f"Ray did not start it: {_message(error)}"
            self._news.put(protocol.LaunchFailed(name, why))
            return
        pid, began, _ = started[0]
        self._news.put(protocol.Launched(name, pid, began))
        self._hand_over(order, holders, started)

    def _start_ranks(
        self, order: protocol.LaunchActor, holders: list[Any]
    ) -> list[Started]:
        """Start the ranks of a replica; meanwhile Ray starts their holders."""
        launcher = self._warm.launcher(order.key)
        calls = []
        for rank, (args, holder) in enumerate(zip(order.args, holders, strict=True)):
            env = order.env
            if order.bundle.get("GPU"):
                # Ray chooses the GPUs, and only the holder learns which.
                gpus = ray.get(holder.gpu_variables.remote(), timeout=START_S)
                env = {**env, **gpus}
            name = self._named(order.name, rank)
            calls.append(launcher.launch.remote(name, args, env, order.log))
        started: list[Started] = ray.get(calls, timeout=START_S)
        return started

    def _hand_over(
        self, order: protocol.LaunchActor, holders: list[Any], started: list[Started]
    ) -> None:
        """Move each rank's leash from its machine's launcher to its holder."""
        launcher = self._warm.launcher(order.key)
        try:
            held = [
                holder.hold.remote(leash)
                for holder, (_, _, leash) in zip(holders, started, strict=True)
            ]
            ray.get(held, timeout=START_S)
        except Exception as error:
            why = _message(error)
            sys.stderr.write(f"cannot start the holder of {order.name}: {why}\n")
            self._end(order.name, len(holders))
        waiting = [
            holder.wait.remote(pid, began)
            for holder, (pid, began, _) in zip(holders, started, strict=True)
        ]
        self._let_go(order)
        self._await(order.name, len(holders), waiting[0], launcher)

    def _let_go(self, order: protocol.LaunchActor) -> None:
        launcher = self._warm.launcher(order.key)
        for rank in range(len(order.args)):
            launcher.let_go.remote(self._named(order.name, rank))

    def _holder(
        self, name: str, rank: int, group: Any, bundle: dict[str, float]
    ) -> Any:
        there = PlacementGroupSchedulingStrategy(group, rank)
        return self._class.options(
            name=self._named(name, rank),
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=0,
            max_task_retries=0,
            num_cpus=0,
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=there,
        ).remote()

    def _named(self, name: str, rank: int = 0) -> str:
        """Return the name of a rank's actor; rank 0's is also the placement group's."""
        own = f"{self._app}/{name}"
        return own if rank == 0 else f"{own}#{rank}"

    def _await(self, name: str, ranks: int, ref: Any, launcher: Any = None) -> None:
        """Once ``ref`` resolves, report a replica's exit and release its resources."""

        def report() -> None:
            code = None
            # If an earlier bridge started the replica, ``launcher`` is None, and the
            # exit code is unknown.
            if launcher is not None:
                with contextlib.suppress(Exception):  # the machine may be lost
                    answer = launcher.exit_code.remote(self._named(name))
                    code = ray.get(answer, timeout=CODE_S)
            self._news.put(protocol.Exited(name, code))
            self._end(name, ranks)

        ref.future().add_done_callback(lambda _: self._starters.submit(report))

    def _adopt(self, name: str, ranks: int, must_be_known: bool) -> None:
        try:
            actor = ray.get_actor(self._named(name), self._namespace)
        except ValueError:
            # A restarted head knows no actors, although they still run, so the replica
            # may be alive. Processes that are connected to it notice when it exits.
            if must_be_known:
                self._end(name, ranks)
                self._news.put(protocol.Exited(name, None))
            return
        self._await(name, ranks, actor.ended.remote())

    def _kill(self, name: str, ranks: int) -> None:
        if not self._end(name, ranks):
            # Ray does not know the replica, so nothing else reports its exit.
            self._news.put(protocol.Exited(name, None))

    def _sweep(self, known: Sequence[str]) -> None:
        """Kill this service's replicas of an earlier bridge, except ``known``."""
        names = {f"{self._app}/{name}" for name in [*known, "controller"]}
        for found in ray.util.placement_group_table().values():
            own = str(found["name"])
            is_ours = own.startswith(f"{self._app}/") and own not in names
            if is_ours and found["state"] != "REMOVED":
                name = own.removeprefix(f"{self._app}/")
                self._end(name, max(1, len(found["bundles"])))

    def _end(self, name: str, ranks: int) -> bool:
        """Kill a replica and release its resources; return True if Ray knew rank 0."""
        was_there = False
        for rank in range(ranks):
            try:
                actor = ray.get_actor(self._named(name, rank), self._namespace)
                ray.kill(actor, no_restart=True)
                was_there |= rank == 0
            except ValueError:
                pass  # the actor has exited
        try:
            remove_placement_group(get_placement_group(self._named(name)))
        except ValueError:
            pass  # the placement group was removed earlier
        return was_there


def _exit_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(0)


def _name(node: dict[str, Any]) -> str:
    """Return a machine's display name: its label, its name or part of its id."""
    label = node.get("Labels", {}).get(NAME_LABEL)
    given = node["NodeName"] if node["NodeName"] != node["NodeManagerAddress"] else ""
    return str(label or given or f"node-{node['NodeID'][:8]}")


def _message(error: Exception) -> str:
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return (
            "timed out (other jobs may use the cluster's resources, or the machine is "
            "too busy to import the model's code)"
        )
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)


def main() -> None:
    # Ignore Ctrl-C in the terminal: the controller handles it, and closes the socket,
    # which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    address, namespace, app = sys.argv[2:5]
    options: dict[str, Any] = {"namespace": namespace, "log_to_driver": False}
    if address == "local":
        options |= {"include_dashboard": False, "_system_config": LOCAL}
    ray.init(address=address, configure_logging=True, **options)
    bridge = Bridge(control, namespace, app)
    bridge.claim_service()
    bridge.run()
    os._exit(0)  # do not wait for calls that a lost head will never answer


if __name__ == "__main__":
    main()
