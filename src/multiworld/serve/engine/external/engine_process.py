"""The processes of an engine: a process group that is killed with its replica.

The engine runs in its own environment, which may have another release of torch. All of
its processes form one process group on a leash (see ``machines.leash``): if the replica
is lost for whatever reason, the kernel kills the group at once, even if it is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from multiworld.serve.engine.external.held_cores import HeldCores
from multiworld.serve.machines import leash
from multiworld.serve.machines.usage import family_of, is_stopped

END_S = 5.0  # seconds for an engine to exit before it is killed
# Maximum seconds to wait for a killed engine to disappear: it may hang in a driver.
KILLED_S = 1.0
LAST_S = 1.0  # seconds to read the last output of an engine that has exited
BURST = 2**20  # bytes of output that may go to the log at once
RATE = 256  # bytes of output per second that may go to the log beyond that
LAST_LINES = 50  # number of last lines of output, which always go to the log
LINE_BYTES = 2**16  # maximum bytes of a line of output
FAMILY_S = 1.0  # seconds for which the list of an engine's processes stays valid


class Allowance:
    """Rate limit of output: ``BURST`` bytes at once, and ``RATE`` bytes a second."""

    def __init__(self, now: float) -> None:
        self._left, self._at, self.left_out = float(BURST), now, 0

    def allows(self, size: int, now: float) -> bool:
        """Return whether ``size`` more bytes may be written; if so, count them."""
        self._left = min(BURST, self._left + RATE * (now - self._at))
        self._at = now
        if size > self._left:
            self.left_out += 1
            return False
        self._left -= size
        return True


def pass_on(
    source: int,
    write: Callable[[bytes], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Write the lines of a pipe into the log, within the allowance, until its end."""
    # The log has an allowance, because e.g. llama.cpp writes a kilobyte for every
    # token.
    write = write or functools.partial(os.write, 2)
    allowance, last = Allowance(clock()), deque[bytes](maxlen=LAST_LINES)

    def put(lines: Iterable[bytes]) -> None:
        with contextlib.suppress(OSError):  # for instance, the disk is full
            for line in lines:
                write(line)

    with open(source, "rb") as pipe:
        for line in iter(functools.partial(pipe.readline, LINE_BYTES), b""):
            if not allowance.allows(len(line), clock()):
                last.append(line)
                continue
            if allowance.left_out:
                put([b"(%d lines of the engine left out)\n" % allowance.left_out])
                allowance.left_out = 0
                last.clear()
            put([line])
    put(last)  # the last lines say why the engine exited


class EngineProcess:
    """A running engine; its output goes to the log of the replica."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cores: int = 0,  # number of cores for this engine alone; 0: it may use all
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._stopped_at: float | None = None
        self._family: list[int] = []
        self._family_at = -math.inf
        reader, self._leash = os.pipe()
        output, inlet = os.pipe()
        wearing = [sys.executable, "-I", "-S", leash.__file__, str(reader), *command]
        self._cores = HeldCores(cores)
        try:
            with self._cores.of_children():
                self._process = subprocess.Popen(
                    wearing,
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=inlet,
                    stderr=inlet,
                    start_new_session=True,
                    pass_fds=(reader,),
                )
        except BaseException:
            self._cores.release()
            os.close(self._leash)
            os.close(output)
            raise
        finally:
            os.close(reader)
            os.close(inlet)
        self.pid = self._process.pid
        self._output = threading.Thread(
            target=pass_on, args=[output], name="engine output", daemon=True
        )
        self._output.start()

    async def wait(self) -> int:
        """Wait until the engine's first process has exited; return its exit code."""
        if (code := self._process.poll()) is not None:
            return code
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(self.pid)
        exited = asyncio.Event()
        loop.add_reader(pidfd, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        # Wait for the engine's last output.
        await asyncio.to_thread(self._output.join, LAST_S)
        return self._process.wait()

    def stopped_s(self) -> float:
        """Return the seconds for which a process of the engine has been stopped."""
        now = self._clock()
        if now - self._family_at >= FAMILY_S:
            self._family, self._family_at = family_of(self.pid), now
        if not any(map(is_stopped, self._family)):
            self._stopped_at = None
            return 0.0
        if self._stopped_at is None:
            self._stopped_at = now
        return now - self._stopped_at

    async def close(self) -> None:
        """Let the engine exit; kill its group after ``END_S``, or if cancelled."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                await self.wait()
        except TimeoutError:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all processes of the engine at once, and release the leash."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_S)
        if self._leash >= 0:
            os.close(self._leash)
            self._leash = -1
        self._cores.release()

    def _signal(self, number: signal.Signals) -> None:
        if self._leash < 0:
            # The engine was released, and its process group's number may be reused.
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class HeldPort:
    """A free port that no other engine on this host gets until ``release``.

    vLLM starts to listen long after its port was chosen, and does so even if another
    process listens on that port by then.
    """

    def __init__(self) -> None:
        self.number = 0
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        while not self.number:
            number = free_port()
            try:
                self._claim.bind(f"\0multiworld engine port {number}")
                self.number = number
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # another engine has reserved it
                    self._claim.close()
                    raise

    def release(self) -> None:
        self._claim.close()
