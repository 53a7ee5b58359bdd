"""Requests that bypass FastAPI, and the state of their connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

CONNECTION = "multiworld.connection"  # scope key of a request's ``Connection``

RECORDER = "multiworld.recorder"  # scope key of the ``Recorder`` of the connection

# Scope key that is present once the whole request has arrived.
IS_COMPLETE = "multiworld.is_complete"


class Connection:
    """A client's connection; calls the functions in ``on_lost`` when it is lost."""

    def __init__(self) -> None:
        self.is_lost = False
        self.on_lost: set[Callable[[], object]] = set()

    def lost(self) -> None:
        self.is_lost = True
        for call in list(self.on_lost):
            call()


class AnyRequest(Protocol):
    @property
    def scope(self) -> MutableMapping[str, Any]:
        """The ASGI scope."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers; names are in lower case."""

    @property
    def receive(self) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
        """ASGI's function that returns the next event."""


class HttpRequest:
    """A request with decoded headers; of repeated headers, the first counts."""

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    ) -> None:
        self.scope, self.receive = scope, receive
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
