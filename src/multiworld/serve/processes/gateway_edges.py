"""The edges of a gateway, shared by its dispatcher and its streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from multiworld.serve.generation.gateway.streams import Streams
from multiworld.serve.inference.gateway.dispatcher import Dispatcher
from multiworld.serve.transport.edges import Outbox
from multiworld.serve.transport.frames import Entry
from multiworld.serve.transport.generation_messages import GenerationMessage

GENERATION = get_args(GenerationMessage)


class GatewayEdges:
    """An ``EdgeOwner`` that passes edge events to the dispatcher and the streams."""

    def __init__(self, dispatcher: Dispatcher, streams: Streams) -> None:
        self._dispatcher, self._streams = dispatcher, streams

    def edge_up(self, outbox: Outbox) -> None:
        self._dispatcher.edge_up(outbox)
        self._streams.edge_up(outbox)

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        """Dispatch a frame; the messages of one edge are all of one kind."""
        is_generation = isinstance(frame[0][0], GENERATION) if frame else False
        owner = self._streams if is_generation else self._dispatcher
        owner.received(outbox, frame)

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        self._dispatcher.edge_down(outbox, is_polite=is_polite)
        self._streams.edge_down(outbox, is_polite=is_polite)
