"""An end over ucxx: RAPIDS' asyncio interface to UCX."""

from __future__ import annotations

import asyncio
from typing import Any

import ends
import numpy as np
import ucxx


class UcxxEnd:
    """An endpoint between two processes of one host.

    Of its progress modes "polling" is the fastest here; the ones with a thread are many
    times slower. With error handling, which is its default and what notices a lost
    peer, UCX goes by TCP.
    """

    async def connect(self, rank: int, port: int) -> None:
        """Make the endpoint."""
        ucxx.init(progress_mode="polling")
        self._array = np.zeros(0, dtype=np.uint8)
        if rank == 0:
            found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            async def accepted(endpoint: Any) -> None:
                found.set_result(endpoint)
                await asyncio.Event().wait()  # it is closed when this returns

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
        raise ConnectionError(f"nobody listens on port {port}")

    async def prepare(self, size: int) -> None:
        """Make an array."""
        if self._array.size != size:
            self._array = np.zeros(size, dtype=np.uint8)

    async def send(self) -> None:
        """Send it."""
        await self._endpoint.send(self._array)

    async def recv(self) -> None:
        """Receive into it."""
        await self._endpoint.recv(self._array)


if __name__ == "__main__":
    ends.serve(UcxxEnd())
