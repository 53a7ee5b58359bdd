"""Launcher of replicas as Ray actors; gateways run beside the controller."""

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
from multiworld.serve.controller.launchers import local, protocol
from multiworld.serve.controller.launchers.base import (
    LauncherContext,
    RunningProcess,
    began_at,
)
from multiworld.serve.controller.launchers.helper_process import HelperProcess
from multiworld.serve.controller.launchers.local import LocalLauncher
from multiworld.serve.machines.amounts import Gpu, Location, Need, Node
from multiworld.serve.spec.schema import RaySpec
from multiworld.serve.wire.process_args import ProcessArgs

logger = logging.getLogger("multiworld.serve")

BRIDGE = "multiworld.serve.controller.launchers.ray.bridge"

START_S = 60.0  # maximum seconds for the bridge to connect
ADOPT_S = 15.0  # instead of START_S, if there are replicas to adopt
SILENT_S = 5.0  # seconds without a response after which the head counts as lost
RETRY_S = 5.0  # seconds between attempts to reconnect
LOOK_S = 1.0  # seconds between checks of the head's silence and of the bridge
REACH_S = 5.0  # maximum seconds to connect to the head's address
LAUNCH_S = 90.0  # maximum seconds for Ray to start a replica

# Share of a GPU that Ray reserves for a replica that books no GPU memory.
MINIMAL_GPU = 0.0001


class RayLauncher:
    """Replicas as actors of a Ray cluster; ``local`` launches all other processes."""

    def __init__(
        self,
        context: LauncherContext,
        local: LocalLauncher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context, self._local, self._clock = context, local, clock
        self._spec = context.app.ray or RaySpec()
        # Log of the bridge; the fork servers' logs are in the same folder.
        self._log = context.logs / "ray.log"
        self._loop = asyncio.get_running_loop()
        self._bridge = HelperProcess(
            BRIDGE,
            self._log,
            protocol.BRIDGE_NEWS,
            self._on_news,
            self._bridge_ended,
            self._bridge_hangs,
            # With ``address: local`` the bridge has started the cluster, which would
            # exit with the bridge.
            is_replaceable=self._spec.address != "local",
        )
        self._nodes: dict[str, Node] = {}
        self._ranks: dict[str, int] = {}
        self._ending: set[str] = set()
        self._starting: dict[str, asyncio.Future[RunningProcess]] = {}
        self._heard_at = self._clock()
        self._trouble = ""
        self._monitoring: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to the cluster, or start one with ``address: local``."""
        is_new = self._context.is_new
        try:
            # If there are replicas to adopt, an unreachable head is not an error.
            await self._connect(START_S if is_new else ADOPT_S)
        except (LaunchError, OSError) as error:
            reason = _last_line(self._log) or error
            text = f"no Ray cluster at {self._spec.address!r}: {reason}"
            if is_new:
                raise ServeError(
                    f"{text}. Ray needs multiworld-elastic[ray], and `ray start "
                    "--head` or `address: local`"
                ) from error
            self._trouble = (
                f"{text}: replicas keep running, but none is started or scaled"
            )
        self._monitoring = self._loop.create_task(self._monitor())

    async def _connect(self, limit_s: float = START_S) -> None:
        await _check_reachable(self._spec.address)
        words = [self._spec.address, self._spec.namespace, self._context.app.app]
        first = await self._bridge.start(words, {}, limit_s)
        if isinstance(first, protocol.ClusterReady):
            self._set_nodes(first.nodes)
        preload, logs = tuple(self._context.preload), str(self._context.logs)
        self._bridge.send(protocol.WarmNodes(preload, os.getcwd(), logs))
        self._heard_at = self._clock()

    async def _monitor(self) -> None:
        """Report a silent head, and start another bridge after one has exited."""
        while True:
            await asyncio.sleep(LOOK_S)
            silent_s = self._clock() - self._heard_at
            if silent_s > SILENT_S and not self._trouble:
                self._set_trouble(
                    f"the head of the Ray cluster has not answered for {silent_s:.0f} "
                    "s: replicas keep running, but none is started or scaled"
                )
            if not self._bridge.is_running:
                await self._connect_again()

    async def _connect_again(self) -> None:
        try:
            await self._connect()
        except (LaunchError, OSError) as error:
            logger.debug("the Ray cluster is still unreachable: %s", error)
            await asyncio.sleep(RETRY_S)
            return
        self.settle()
        for name in list(self._ranks):
            if name in self._ending:
                # The old bridge may have lost the order to kill this replica;
                # ``settle`` repeats the order.
                self._exited(name, None)
            else:
                self._adopt(name, must_be_known=False)
        self._set_trouble("")

    def _set_trouble(self, text: str) -> None:
        self._trouble = text
        for name, future in list(self._starting.items()):
            if text and not future.done():
                del self._starting[name]
                # The replica's actors may still start; then they are killed.
                self._ending.add(name)
                future.set_exception(LaunchError(f"{name}: {text}"))
        self._context.on_nodes()

    # News of the bridge.

    def _on_news(self, news: protocol.BridgeNews) -> None:
        match news:
            case protocol.ClusterNodes(nodes, is_same):
                self._heard_at = self._clock()
                if self._trouble:
                    self._set_trouble("")
                if not is_same:
                    self._set_nodes(nodes)
                    self._context.on_nodes()
            case protocol.Launched(name, pid, began):
                if name not in self._starting:
                    self._end(name)  # its launch has timed out, so kill it
                self._resolve(name, RunningProcess(name, pid, began))
            case protocol.LaunchFailed(name, error):
                self._ranks.pop(name, None)
                self._ending.discard(name)
                self._resolve(name, LaunchError(f"{name}: {error}"))
            case protocol.Exited(name, code):
                self._exited(name, code)

    def _exited(self, name: str, code: int | None) -> None:
        self._ending.discard(name)
        if self._ranks.pop(name, None) is not None:
            self._context.on_exit(name, code)

    def _end(self, name: str) -> None:
        if name in self._ranks:
            self._ending.add(name)
            self._bridge.send(protocol.KillActor(name, self._ranks[name]))

    def _resolve(self, name: str, outcome: RunningProcess | LaunchError) -> None:
        future = self._starting.pop(name, None)
        if future is None or future.done():
            return
        if isinstance(outcome, LaunchError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _bridge_hangs(self) -> None:
        self._set_trouble(
            "the Ray bridge hangs: replicas keep running, but none is started or scaled"
        )

    def _bridge_ended(self) -> None:
        self._set_trouble("the connection to the Ray cluster was lost; reconnecting")

    def _set_nodes(self, found: Sequence[protocol.ClusterNode]) -> None:
        self._nodes = {
            node.name: Node(
                name=node.name,
                key=node.key,
                address=node.address,
                cpus=node.cpus,
                memory_bytes=node.memory_bytes,
                gpus=tuple(Gpu(*gpu) for gpu in node.gpus),
                bfloat16=node.bfloat16,
            )
            for node in found
        }

    # Launcher.

    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    def trouble(self) -> str:
        return self._trouble

    async def launch(
        self, name: str, args: ProcessArgs, log: Path, spot: Location | None, need: Need
    ) -> RunningProcess:
        """Start a replica in a placement group of its own; Ray chooses its GPUs."""
        if spot is None:
            return await self._local.launch(name, args, log, spot, need)
        if self._trouble:
            raise LaunchError(f"{name}: {self._trouble}")
        node = self._nodes.get(spot.node)
        if node is None:
            raise LaunchError(f"{name}: machine {spot.node} is not in the cluster")
        future: asyncio.Future[RunningProcess] = self._loop.create_future()
        self._starting[name], self._ranks[name] = future, need.ranks
        # Ray chooses the GPUs, and the process sees only those, numbered from 0.
        gpus = tuple(range(need.gpus))
        of_ranks = [
            args.model_copy(
                update={"gpus": gpus, "rank": k if need.ranks > 1 else None}
            )
            for k in range(need.ranks)
        ]
        self._bridge.send(
            protocol.LaunchActor(
                name=name,
                key=node.key,
                address=node.address,
                bundle=bundle_of(need, node),
                args=tuple(one.model_dump_json() for one in of_ranks),
                env=self._context.env,
                log=str(log),
            )
        )
        try:
            async with asyncio.timeout(LAUNCH_S):
                running = await future
        except TimeoutError:
            # Killed if it starts later, also if the bridge is replaced meanwhile.
            self._starting.pop(name, None)
            self._ending.add(name)
            raise LaunchError(f"{name}: Ray took more than {LAUNCH_S:g} s") from None
        return RunningProcess(name, running.pid, running.began, spot.node)

    def kill(self, running: RunningProcess, number: int = signal.SIGKILL) -> None:
        """Kill a replica on any machine; send other signals only on this machine."""
        if running.name not in self._ranks:
            self._local.kill(running, number)
        elif number in (signal.SIGKILL, signal.SIGTERM):
            self._end(running.name)
            self._end_here(running)
        elif self._is_here(running):
            self._local.kill(running, number)

    def _end_here(self, running: RunningProcess) -> None:
        """Kill a replica on this machine, in case Ray cannot."""
        if self._is_here(running):
            self._local.kill(running, signal.SIGKILL)
            if self._trouble:
                self._loop.call_soon(self._exited, running.name, None)

    def _is_here(self, running: RunningProcess) -> bool:
        node = self._nodes.get(running.node)
        here = node is None or node.address in _own_addresses()
        return here and began_at(running.pid) == running.began

    def outgrown(self, running: RunningProcess, limit: int) -> int | None:
        if running.name in self._ranks and not self._is_here(running):
            return None
        return self._local.outgrown(running, limit)

    def adopt(self, running: RunningProcess, ranks: int) -> bool:
        """Watch a process; ``on_exit`` reports a replica that has already exited."""
        if not running.node:
            return self._local.adopt(running, ranks)
        self._ranks[running.name] = ranks
        self._adopt(running.name, must_be_known=True)
        return True

    def _adopt(self, name: str, *, must_be_known: bool) -> None:
        self._bridge.send(protocol.AdoptActor(name, self._ranks[name], must_be_known))

    def settle(self) -> None:
        known = tuple(name for name in self._ranks if name not in self._ending)
        self._bridge.send(protocol.Sweep(known))

    async def close(self) -> None:
        """Shut the bridge down; replicas that are still starting are killed."""
        for name in list(self._starting):
            self._end(name)
        if self._monitoring is not None:
            self._monitoring.cancel()
        await self._bridge.close()
        await self._local.close()


def bundle_of(need: Need, node: Node) -> dict[str, float]:
    """Return the resources that Ray reserves for each rank of a replica."""
    bundle: dict[str, float] = {}
    if need.cpus:
        bundle["CPU"] = need.cpus / need.ranks
    if need.memory_bytes:
        bundle["memory"] = float(need.memory_bytes // need.ranks)
    if need.whole_gpus or need.gpus > 1:
        bundle["GPU"] = float(need.gpus)
    elif need.gpus:
        size = max((gpu.memory_bytes for gpu in node.gpus), default=0)
        share = need.gpu_memory_bytes / need.ranks / size if size else 0.0
        # Round down to Ray's unit, so that a replica that fits in our bookings also
        # fits in Ray's.
        bundle["GPU"] = max(MINIMAL_GPU, min(1.0, math.floor(share * 1e4) / 1e4))
    return bundle


async def _check_reachable(address: str) -> None:
    """Raise OSError if the head is unreachable; Ray itself retries for minutes."""
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
    launcher = RayLauncher(context, await local.make(context))
    await launcher.start()
    return launcher
