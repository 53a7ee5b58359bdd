"""Client of the fork server: starts it, orders forks, replaces it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from multiworld.errors import LaunchError
from multiworld.serve.controller.launchers.fork_server import WaitingServer
from multiworld.serve.controller.launchers.helper_process import HelperProcess
from multiworld.serve.controller.launchers.protocol import (
    FORK_NEWS,
    Exited,
    ForkNews,
    Launch,
    Launched,
    LaunchFailed,
    Threaded,
)

logger = logging.getLogger("multiworld.serve")

FORK_SERVER = "multiworld.serve.controller.launchers.fork_server"

# Maximum seconds for the fork server to import its modules. Another attempt would start
# over, so this suffices on a machine whose cores are busy.
WARM_S = 600.0

# Seconds before another attempt to start a fork server: the first pause, which doubles
# each time, and the maximum.
RETRY_S, RETRY_MAX_S = 1.0, 30.0


# Environment of fork servers. It keeps libraries from starting a thread or initializing
# CUDA, because a forked process must inherit neither.
FORKED = {
    "OPENBLAS_NUM_THREADS": "1",
    # For pyarrow, which transformers imports.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # ``torch.cuda.is_available`` then asks NVML and does not initialize CUDA.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class Forks:
    """The fork server of one machine; it is replaced when it hangs or exits."""

    def __init__(
        self,
        preload: Sequence[str],
        env: dict[str, str],
        log: Path | None,
        on_exit: Callable[[str, int | None], None],
        # Forked process that becomes the first fork server.
        waiting: WaitingServer | None = None,
    ) -> None:
        self.trouble = ""
        self._preload = list(preload)
        self._env = {**FORKED, **env}
        self._on_exit, self._waiting = on_exit, waiting
        self._server = HelperProcess(
            FORK_SERVER, log, FORK_NEWS, self._on_news, self._ended, self._hangs
        )
        self._replacing: asyncio.Task[None] | None = None
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._warming = asyncio.Lock()

    async def warm(self) -> None:
        """Start the fork server unless it runs, and wait until it is ready."""
        async with self._warming:
            while not self._server.is_running:
                waiting, self._waiting = self._waiting, None
                news = await self._server.start(
                    self._preload, self._env, WARM_S, waiting
                )
                if isinstance(news, Threaded):
                    await self._server.close()
                    self._forget(news.module)
                else:
                    self.trouble = ""

    async def fork(self, order: Launch) -> int:
        """Fork a process, and return its id; if cancelled, it may still start."""
        await self.warm()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._starting[order.name] = future
        self._server.send(order)
        if not self._server.is_running:
            self._fail(order.name, "the fork server has exited")
        return await future

    def _on_news(self, news: ForkNews) -> None:
        match news:
            case Exited(name, code):
                self._on_exit(name, code)
            case Launched(name, pid):
                future = self._starting.pop(name, None)
                if future is not None and not future.done():
                    future.set_result(pid)
            case LaunchFailed(name, error):
                self._fail(name, error)
            case Threaded(module):
                self._forget(module)

    def _forget(self, module: str) -> None:
        """Stop preloading a module and those after it, which may import it."""
        kept = self._preload.index(module) if module in self._preload else 0
        logger.warning(
            "%s starts a thread, so the fork server cannot fork with it loaded: "
            "processes import %s themselves, which costs time and memory",
            module or "a module",
            ", ".join(self._preload[kept:]),
        )
        del self._preload[kept:]

    def _fail(self, name: str, why: str) -> None:
        future = self._starting.pop(name, None)
        if future is not None and not future.done():
            future.set_exception(LaunchError(f"{name}: {why}"))

    def _hangs(self) -> None:
        self.trouble = "the fork server hangs; nothing starts until it is replaced"

    def _ended(self) -> None:
        for name in list(self._starting):
            self._fail(name, "the fork server has exited")
        if self._replacing is not None:
            self._replacing.cancel()
        self._replacing = asyncio.get_running_loop().create_task(self._replace())

    async def _replace(self) -> None:
        """Start another fork server at once, before a process needs it."""
        pause_s = RETRY_S
        while True:
            try:
                return await self.warm()
            except (LaunchError, OSError) as error:
                logger.error("the fork server cannot be replaced: %s", error)
                self.trouble = f"{error}; next attempt in {pause_s:g} s"
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_MAX_S, 2 * pause_s)

    async def close(self) -> None:
        """Shut the fork server down; the forked processes keep running."""
        if self._replacing is not None:
            self._replacing.cancel()
        if self._waiting is not None:
            self._waiting.control.close()
        await self._server.close()
