"""End of a connection over ucxx, RAPIDS' asyncio interface to UCX."""

from __future__ import annotations

import asyncio
from typing import Any

import ends
import numpy as np
import ucxx


class UcxxEnd:
    """An endpoint between two processes of one host.

    Its progress mode "polling" is the fastest here; the modes with a thread are many
    times slower. Error handling is on, as by default, because it detects a lost peer;
    with it, UCX uses TCP.
    """

    async def connect(self, rank: int, port: int) -> None:
        ucxx.init(progress_mode="polling")
        self._array = np.zeros(0, dtype=np.uint8)
        if rank == 0:
            found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            async def accepted(endpoint: Any) -> None:
                found.set_result(endpoint)
                # Ucxx closes the endpoint when this returns.
                await asyncio.Event().wait()

            self._listener = ucxx.create_listener(accepted, port)
            self._endpoint = await found
            return
        for _ in range(100):
            try:
                self._endpoint = await ucxx.create_endpoint("127.0.0.1", port)
            except ucxx.exceptions.UCXError:
                await asyncio.sleep(0.1)
            else:
                return
        raise ConnectionError(f"nothing listens on port {port}")

    async def prepare(self, size: int) -> None:
        if self._array.size != size:
            self._array = np.zeros(size, dtype=np.uint8)

    async def send(self) -> None:
        await self._endpoint.send(self._array)

    async def recv(self) -> None:
        await self._endpoint.recv(self._array)


if __name__ == "__main__":
    ends.serve(UcxxEnd())
