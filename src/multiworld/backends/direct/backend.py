"""The ``direct`` backend: Unix sockets on one host, TCP between hosts."""

from __future__ import annotations

from multiworld.backends.channel import Channel
from multiworld.backends.channel import Lane as AnyLane
from multiworld.backends.direct.lane import Lane
from multiworld.backends.message_backend import MessageBackend


class DirectBackend(MessageBackend):
    async def _open_lane(self, rank: int, name: str, channel: Channel) -> AnyLane:
        view = self._view
        sock = await view.lane(rank, name)
        return Lane(
            sock, rank, view.incarnation.nonce, channel.mailbox, view.config, self
        )
