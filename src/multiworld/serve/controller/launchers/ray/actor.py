"""The actors of a service.

A ``NodeLauncher`` keeps a fork server on a machine and forks replicas from it. Each
rank of a replica also has a ``ReplicaHolder`` in the replica's placement group. Through
these holders, Ray accounts for the replica's resources. A holder holds its rank's leash
(``machines.leash``), so the rank dies with the holder.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Sequence
from pathlib import Path

from multiworld.errors import LaunchError
from multiworld.serve.controller.launchers.base import began_at
from multiworld.serve.controller.launchers.forks import Forks
from multiworld.serve.controller.launchers.protocol import Launch
from multiworld.serve.machines.leash import Leash, hold_leash

# Seconds after which a holder exits by itself once its replica has exited. By then, the
# bridge has usually read the exit and killed the holder, unless the head is lost.
LINGER_S = 5.0

CODE_S = 1.0  # maximum wait for the fork server to report an exit code, in seconds

# Variables in which Ray names the GPUs that an actor may use.
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class NodeLauncher:
    """Starts the ranks of replicas on one machine, in an event loop."""

    def __init__(
        self, preload: Sequence[str], folder: str, logs: str, number: str
    ) -> None:
        # ``number`` tells the logs of several fork servers in ``logs`` apart.
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {"PYTHONPATH": os.pathsep.join(paths)} if Path(folder).is_dir() else {}
        log = Path(logs, f"launcher-{number}.log") if Path(logs).is_dir() else None
        self._forks = Forks(preload, env, log, self._exited)
        self._leashes: dict[str, Leash] = {}
        self._waiting: set[str] = set()  # ranks that wait for the fork server
        self._codes: dict[str, asyncio.Future[int | None]] = {}

    async def warm(self) -> None:
        await self._forks.warm()

    async def launch(
        self, name: str, args: str, env: dict[str, str], log: str
    ) -> tuple[int, int, str]:
        """Start a rank; return its process id, its start time, and its leash's path."""
        self._waiting.add(name)
        try:
            await self._forks.warm()
            if name not in self._waiting:
                raise LaunchError(f"{name} was cancelled while the fork server started")
        finally:
            self._waiting.discard(name)
        # Create the leash only after the wait. If it were released during the wait,
        # another rank's leash could get the same descriptors, and so the same path.
        leash = self._leashes[name] = Leash()
        self._codes[name] = asyncio.get_running_loop().create_future()
        kept = log if Path(log).parent.is_dir() else ""
        try:
            pid = await self._forks.fork(Launch(name, args, kept, env, leash.worn_at))
        except BaseException:
            self._codes.pop(name)
            await self.let_go(name)
            raise
        return pid, began_at(pid) or 0, leash.held_at

    async def let_go(self, name: str) -> None:
        """Release a rank's leash: the rank exits unless its holder has the leash."""
        self._waiting.discard(name)
        leash = self._leashes.pop(name, None)
        if leash is not None:
            leash.let_go()

    def _exited(self, name: str, code: int | None) -> None:
        future = self._codes.get(name)
        if future is not None and not future.done():
            future.set_result(code)

    async def exit_code(self, name: str) -> int | None:
        """Return an exited rank's exit code, but only once; None if it is unknown."""
        future = self._codes.get(name)
        if future is None:
            return None
        try:
            async with asyncio.timeout(CODE_S):
                return await future
        except TimeoutError:
            return None
        finally:
            self._codes.pop(name, None)


class ReplicaHolder:
    """Represents one rank of a replica in Ray: the rank dies with this process."""

    def gpu_variables(self) -> dict[str, str]:
        """Return the variables that name the GPUs chosen by Ray."""
        found = ((name, os.environ.get(name)) for name in GPU_VARIABLES)
        return {name: value for name, value in found if value is not None}

    def hold(self, leash: str) -> None:
        """Hold the leash of the rank until this process exits."""
        hold_leash(leash)

    def wait(self, pid: int, began: int) -> None:
        """Return when the rank has exited."""
        wait_exit(pid, began)
        timer = threading.Timer(LINGER_S, os._exit, [0])
        timer.daemon = True
        timer.start()

    def ended(self) -> None:
        """Return after ``wait`` has returned, because actor calls run one by one."""


def wait_exit(pid: int, began: int) -> None:
    """Return when a process with this start time has exited."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if began_at(pid) == began:
        # Still the same process: the id was not reused.
        select.select([watched], [], [])
    os.close(watched)


def probe_machine() -> tuple[list[tuple[int, str, int]], float]:
    from multiworld.serve.engine.compute.matmul_speed import bfloat16_cost
    from multiworld.serve.machines.inventory import gpus

    found = [(gpu.index, gpu.kind, gpu.memory_bytes) for gpu in gpus()]
    return found, bfloat16_cost()
