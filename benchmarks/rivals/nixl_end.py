"""End of a NIXL connection: one-sided writes, each with a notification.

NIXL has no receive. A message is a write into memory that the other end has registered,
and the receiver waits for the notification. In a stream, every write goes to the same
memory, without backpressure. Both ends poll without a progress thread: with such a
thread, each step takes ten milliseconds on two cores.
"""

from __future__ import annotations

from typing import Any

import ends
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

MAX_BYTES = 64 * 1024 * 1024
"""Bytes of the largest message."""


class NixlEnd:
    """An agent with its UCX backend, and one registered buffer."""

    async def connect(self, rank: int, port: int) -> None:
        """Register memory, and exchange its address and the agents' metadata."""
        self._name, self._peer = f"end-{rank}", f"end-{1 - rank}"
        self._agent = nixl_agent(self._name, nixl_agent_config(False, backends=["UCX"]))
        # This end sends from the first half; the peer writes to the second half.
        self._memory = np.zeros(2 * MAX_BYTES, dtype=np.uint8)
        self._base = self._memory.ctypes.data
        whole = [(self._base, self._memory.nbytes, 0, "")]
        self._registered = self._agent.register_memory(whole, "DRAM")
        mine = self._base.to_bytes(8, "little") + self._agent.get_agent_metadata()
        theirs = ends.swap(rank, port, mine)
        self._their_base, metadata = int.from_bytes(theirs[:8], "little"), theirs[8:]
        self._agent.add_remote_agent(metadata)
        self._handle: Any = None
        self._size = -1
        self._arrived = 0

    async def prepare(self, size: int) -> None:
        """Prepare the write of a message of ``size`` bytes."""
        if size == self._size:
            return
        self._size = size
        ours = self._agent.get_xfer_descs([(self._base, size, 0)], "DRAM")
        theirs = self._agent.get_xfer_descs(
            [(self._their_base + MAX_BYTES, size, 0)], "DRAM"
        )
        self._handle = self._agent.initialize_xfer(
            "WRITE", ours, theirs, self._peer, b"m"
        )

    async def send(self) -> None:
        """Write one message, and wait until it is done."""
        state = self._agent.transfer(self._handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise ConnectionError(f"the transfer failed with state {state}")

    async def recv(self) -> None:
        """Wait for the notification of one message."""
        while not self._arrived:
            self._arrived += len(self._agent.get_new_notifs().get(self._peer, ()))
        self._arrived -= 1


if __name__ == "__main__":
    ends.serve(NixlEnd())
