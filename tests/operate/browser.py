"""Headless Chromium, controlled through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HANG_S = 60.0
LOOK_S = 0.05
SLOW_MS = 400  # latency of a limited connection

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--remote-debugging-port=0"),
)


class Tab:
    """One page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []  # that the page has thrown or logged

    async def listen(self) -> None:
        async for message in self._socket:
            said = message.json()
            if (waiting := self._answers.pop(said.get("id", 0), None)) is not None:
                waiting.set_result(said)
            elif said.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(said["params"]["exceptionDetails"]))
            elif said.get("method") == "Log.entryAdded":
                entry = said["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(entry["text"])

    async def ask(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(HANG_S):
            said = await self._answers[number]
        assert "error" not in said, said
        return said["result"]

    async def value(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = await self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until the page has a body and an expression is true."""
        async with asyncio.timeout(HANG_S):
            while not await self.value(f"Boolean(document.body) && ({script})"):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)

    async def until_text(self, text: str) -> None:
        await self.until(f"document.body.innerText.includes({text!r})")

    async def click(self, words: str, inside: str = "body") -> None:
        """Click the first button with these words."""
        found = f"[...document.querySelectorAll({inside + ' button'!r})]"
        button = f"{found}.find(b => b.innerText.includes({words!r}))"
        await self.until(f"Boolean({button})")
        await self.value(f"{button}.click()")

    async def picture(self, width: int, height: int) -> bytes:
        """Return the page as a PNG."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await asyncio.sleep(1.0)  # until the page is drawn again
        shot = await self.ask("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


@contextlib.asynccontextmanager
async def opened(url: str, bytes_s: int = -1) -> AsyncIterator[Tab]:
    """Open a page in a browser of its own; ``bytes_s`` limits its connection."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(CHROMIUM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"),
            stderr=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port_in(Path(folder))
            async with aiohttp.ClientSession() as http:
                where = f"http://127.0.0.1:{port}/json/new?about:blank"
                async with http.put(where) as answer:
                    found = await answer.json()
                async with http.ws_connect(
                    found["webSocketDebuggerUrl"], max_msg_size=2**26
                ) as socket:
                    tab = Tab(socket)
                    listening = asyncio.ensure_future(tab.listen())
                    for domain in ("Runtime", "Log", "Page", "Network"):
                        await tab.ask(f"{domain}.enable")
                    if bytes_s > 0:
                        await tab.ask(
                            "Network.emulateNetworkConditions",
                            offline=False,
                            latency=SLOW_MS,
                            downloadThroughput=bytes_s,
                            uploadThroughput=bytes_s,
                        )
                    await tab.ask("Page.navigate", url=url)
                    try:
                        yield tab
                    finally:
                        listening.cancel()
        finally:
            process.kill()
            await process.wait()


async def _port_in(folder: Path) -> int:
    path = folder / "DevToolsActivePort"
    async with asyncio.timeout(HANG_S):
        while not path.exists() or not path.read_text():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
    return int(path.read_text().splitlines()[0])
