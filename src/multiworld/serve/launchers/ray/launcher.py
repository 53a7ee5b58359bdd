"""Replicas as actors of a Ray cluster; gateways stay beside the controller. Shell."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from multiworld.errors import LaunchError, ServeError
from multiworld.serve.launchers import local
from multiworld.serve.launchers.base import (
    LauncherContext,
    OnExit,
    RunningProcess,
    began_at,
)
from multiworld.serve.launchers.helper_process import HelperProcess
from multiworld.serve.launchers.local import LocalLauncher
from multiworld.serve.launchers.protocol import (
    BRIDGE_NEWS,
    AdoptActor,
    BridgeNews,
    ClusterNode,
    ClusterNodes,
    ClusterReady,
    Exited,
    KillActor,
    LaunchActor,
    Launched,
    LaunchFailed,
    Sweep,
)
from multiworld.serve.resources.amounts import Gpu, Location, Need, Node
from multiworld.serve.spec.schema import RaySpec
from multiworld.serve.transport.process_args import ProcessArgs

logger = logging.getLogger("multiworld.serve")

BRIDGE = "multiworld.serve.launchers.ray.bridge"
START_S = 60.0
ADOPT_S = 15.0
SILENT_S = 5.0
"""A head that has not answered for so long is lost."""

RETRY_S = 5.0
REACH_S = 5.0
LAUNCH_S = 90.0
MINIMAL_GPU = 0.0001
"""Of a GPU, for what books nothing of it."""


class RayLauncher:
    """Replicas as actors of a Ray cluster; see ``base.Launcher``.

    Args:
        app: The service's name.
        local: For what belongs beside the controller.
        env: What replicas find in their environment.
        log: Where the output of the bridge goes.
        on_exit: Told of every process that ends.
        on_nodes: Told when machines were added or are gone, or the head is.
        clock: Returns the monotonic time in seconds.
    """

    def __init__(
        self,
        app: str,
        local: LocalLauncher,
        spec: RaySpec,
        env: dict[str, str],
        log: Path,
        on_exit: OnExit,
        on_nodes: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._app, self._local, self._spec, self._env = app, local, spec, env
        self._log, self._on_exit, self._on_nodes = log, on_exit, on_nodes
        self._loop = asyncio.get_running_loop()
        self._bridge = HelperProcess(
            BRIDGE, log, BRIDGE_NEWS, self._on_news, self._bridge_ended
        )
        self._nodes: dict[str, Node] = {}
        self._ranks: dict[str, int] = {}
        self._ending: set[str] = set()
        self._starting: dict[str, asyncio.Future[RunningProcess]] = {}
        self._heard_at = self._clock()
        self._trouble = ""
        self._monitoring: asyncio.Task[None] | None = None

    async def start(self, *, is_new: bool) -> None:
        """Connect to the cluster, or start it.

        Args:
            is_new: Whether there is nothing to adopt. What runs is adopted without a
                cluster, too: its head may just be lost.

        Raises:
            ServeError: There is none for a new service, or Ray is not installed.

        Cancellation: safe.
        """
        try:
            await self._connect(START_S if is_new else ADOPT_S)
        except (LaunchError, OSError) as error:
            reason = _last_line(self._log) or error
            text = f"no Ray cluster at {self._spec.address!r}: {reason}"
            if is_new:
                raise ServeError(
                    f"{text}. It needs multiworld-elastic[ray], and `ray start --head` "
                    "or `address: local`"
                ) from error
            self._trouble = f"{text}: what runs goes on, nothing is started or scaled"
        self._monitoring = self._loop.create_task(self._monitor())

    async def _connect(self, limit_s: float = START_S) -> None:
        await _check_reachable(self._spec.address)
        words = [self._spec.address, self._spec.namespace, self._app]
        first = await self._bridge.start(words, {}, limit_s)
        if isinstance(first, ClusterReady):
            self._set_nodes(first.nodes)
        self._heard_at = self._clock()

    async def _monitor(self) -> None:
        """Notice when the head is silent; come back to it when it answers."""
        while True:
            await asyncio.sleep(1.0)
            silent_s = self._clock() - self._heard_at
            if silent_s > SILENT_S and not self._trouble:
                self._set_trouble(
                    f"the head of the Ray cluster has not answered for {silent_s:.0f} "
                    "s: what runs goes on, nothing is started or scaled"
                )
            if not self._bridge.is_running:
                await self._connect_again()

    async def _connect_again(self) -> None:
        try:
            await self._connect()
        except (LaunchError, OSError) as error:
            logger.debug("the Ray cluster is still away: %s", error)
            await asyncio.sleep(RETRY_S)
            return
        self.settle()
        for name in list(self._ranks):
            if name in self._ending:
                self._exited(name, None)  # the order to end it may have been lost
            else:
                self._adopt(name, must_be_known=False)
        self._set_trouble("")

    def _set_trouble(self, text: str) -> None:
        self._trouble = text
        for name, future in list(self._starting.items()):
            if text and not future.done():
                del self._starting[name]
                future.set_exception(LaunchError(f"{name}: {text}"))
        self._on_nodes()

    # What the bridge tells.

    def _on_news(self, news: BridgeNews) -> None:
        match news:
            case ClusterNodes(nodes, is_same):
                self._heard_at = self._clock()
                if self._trouble:
                    self._set_trouble("")
                if not is_same:
                    self._set_nodes(nodes)
                    self._on_nodes()
            case Launched(name, pid, began):
                if name not in self._starting:
                    self._end(name)  # it was given up meanwhile
                self._resolve(name, RunningProcess(name, pid, began))
            case LaunchFailed(name, error):
                self._ranks.pop(name, None)
                self._resolve(name, LaunchError(f"{name}: {error}"))
            case Exited(name, code):
                self._exited(name, code)

    def _exited(self, name: str, code: int | None) -> None:
        self._ending.discard(name)
        if self._ranks.pop(name, None) is not None:
            self._on_exit(name, code)

    def _end(self, name: str) -> None:
        if name in self._ranks:
            self._ending.add(name)
            self._bridge.tell(KillActor(name, self._ranks[name]))

    def _resolve(self, name: str, outcome: RunningProcess | LaunchError) -> None:
        future = self._starting.pop(name, None)
        if future is None or future.done():
            return
        if isinstance(outcome, LaunchError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _bridge_ended(self) -> None:
        self._set_trouble("the connection to the Ray cluster has ended; it is tried on")

    def _set_nodes(self, found: Sequence[ClusterNode]) -> None:
        self._nodes = {
            node.name: Node(
                name=node.name,
                key=node.key,
                address=node.address,
                cpus=node.cpus,
                memory_bytes=node.memory_bytes,
                gpus=tuple(Gpu(*gpu) for gpu in node.gpus),
            )
            for node in found
        }

    # Launcher.

    def nodes(self) -> tuple[Node, ...]:
        """Return the machines of the cluster."""
        return tuple(self._nodes.values())

    def trouble(self) -> str:
        """Say why nothing can be started now; empty if it can."""
        return self._trouble

    async def launch(
        self,
        name: str,
        args: ProcessArgs,
        log: Path,
        spot: Location | None,
        need: Need,
    ) -> RunningProcess:
        """Start a replica as an actor, in a placement group of its own.

        Raises:
            LaunchError: Ray did not start it.

        Cancellation: it may start all the same.
        """
        if spot is None:
            return await self._local.launch(name, args, log, spot, need)
        if self._trouble:
            raise LaunchError(f"{name}: {self._trouble}")
        node = self._nodes.get(spot.node)
        if node is None:
            raise LaunchError(f"{name}: {spot.node} is gone")
        future: asyncio.Future[RunningProcess] = self._loop.create_future()
        self._starting[name], self._ranks[name] = future, need.ranks
        # Ray chooses among a machine's GPUs, and shows the process that one only.
        gpu = 0 if need.on_gpu else None
        of_ranks = [
            args.model_copy(update={"gpu": gpu, "rank": k if need.ranks > 1 else None})
            for k in range(need.ranks)
        ]
        self._bridge.tell(
            LaunchActor(
                name=name,
                key=node.key,
                address=node.address,
                bundle=bundle_of(need, node),
                args=tuple(one.model_dump_json() for one in of_ranks),
                env=self._env,
                folder=os.getcwd(),
                log=str(log),
            )
        )
        try:
            async with asyncio.timeout(LAUNCH_S):
                running = await future
        except TimeoutError:
            self._starting.pop(name, None)  # it is ended when it is there
            raise LaunchError(f"{name}: Ray took more than {LAUNCH_S:g} s") from None
        return RunningProcess(name, running.pid, running.began, spot.node)

    def kill(self, running: RunningProcess, number: int = signal.SIGKILL) -> None:
        """End a replica; other signals reach it if it runs on this machine."""
        if running.name not in self._ranks:
            self._local.kill(running, number)
        elif number in (signal.SIGKILL, signal.SIGTERM):
            self._end(running.name)
            self._end_here(running)
        elif self._is_here(running):
            self._local.kill(running, number)

    def _end_here(self, running: RunningProcess) -> None:
        """Do what a lost head, or a frozen machine, leaves undone."""
        if self._is_here(running):
            self._local.kill(running, signal.SIGKILL)
            if self._trouble:
                self._loop.call_soon(self._exited, running.name, None)

    def _is_here(self, running: RunningProcess) -> bool:
        node = self._nodes.get(running.node)
        here = node is None or node.address in _own_addresses()
        return here and began_at(running.pid) == running.began

    def outgrown(self, running: RunningProcess, limit: int) -> int | None:
        """Return the memory that a process uses, if that can be seen from here."""
        if running.name in self._ranks and not self._is_here(running):
            return None
        return self._local.outgrown(running, limit)

    def adopt(self, running: RunningProcess, ranks: int) -> bool:
        """Watch a replica of an earlier controller; False if it has ended."""
        if not running.node:
            return self._local.adopt(running, ranks)
        self._ranks[running.name] = ranks
        self._adopt(running.name, must_be_known=True)
        return True

    def _adopt(self, name: str, *, must_be_known: bool) -> None:
        self._bridge.tell(AdoptActor(name, self._ranks[name], must_be_known))

    def settle(self) -> None:
        """End what an earlier controller left behind that was not adopted."""
        known = tuple(name for name in self._ranks if name not in self._ending)
        self._bridge.tell(Sweep(known))

    async def close(self) -> None:
        """End the bridge; the replicas go on, but for those that just start."""
        for name in list(self._starting):
            self._end(name)
        if self._monitoring is not None:
            self._monitoring.cancel()
        await self._bridge.close()
        await self._local.close()


def bundle_of(need: Need, node: Node) -> dict[str, float]:
    """Return what Ray sets aside for each rank of a replica."""
    bundle: dict[str, float] = {}
    if need.cpus:
        bundle["CPU"] = need.cpus / need.ranks
    if need.memory_bytes:
        bundle["memory"] = float(need.memory_bytes // need.ranks)
    if need.on_gpu:
        size = max((gpu.memory_bytes for gpu in node.gpus), default=0)
        share = need.gpu_memory_bytes / need.ranks / size if size else 0.0
        # Rounded down to what Ray counts in: what fits in our ledger fits there.
        bundle["GPU"] = max(MINIMAL_GPU, min(1.0, math.floor(share * 1e4) / 1e4))
    return bundle


async def _check_reachable(address: str) -> None:
    """Find a wrong address at once; Ray tries for minutes.

    Raises:
        OSError: Nobody listens there.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return
    async with asyncio.timeout(REACH_S):
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()


def _own_addresses() -> set[str]:
    import psutil

    return {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].strip() if lines else ""


async def make(context: LauncherContext) -> RayLauncher:
    """Return a launcher that is connected to the cluster.

    Raises:
        ServeError: There is no cluster for a new service, or Ray is not installed.

    Cancellation: nothing is left.
    """
    app = context.app
    launcher = RayLauncher(
        app.app,
        await local.make(context),
        app.ray or RaySpec(),
        context.env,
        context.logs / "ray.log",
        context.on_exit,
        context.on_nodes,
    )
    await launcher.start(is_new=context.is_new)
    return launcher
