"""End of a pymultiworld 0.2.3 connection, used as its own examples do."""

from __future__ import annotations

import ends
import torch

from multiworld.manager import WorldManager  # pymultiworld's package, not ours


class PyMultiworldEnd:
    """A member of a world of two on Gloo."""

    async def connect(self, rank: int, port: int) -> None:
        torch.set_num_threads(1)
        self._manager = WorldManager()
        await self._manager.initialize_world(
            "bench", rank, 2, backend="gloo", addr="127.0.0.1", port=port
        )
        self._communicator = self._manager.communicator
        self._peer = 1 - rank
        self._tensor = torch.zeros(0, dtype=torch.uint8)

    async def prepare(self, size: int) -> None:
        if self._tensor.numel() != size:
            self._tensor = torch.zeros(size, dtype=torch.uint8)

    async def send(self) -> None:
        await self._communicator.send(self._tensor, self._peer, "bench")

    async def recv(self) -> None:
        await self._communicator.recv(self._tensor, self._peer, "bench")


if __name__ == "__main__":
    ends.serve(PyMultiworldEnd())
