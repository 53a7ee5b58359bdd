"""A request of the hot routes, and what its connection tells about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

CONNECTION = "multiworld.connection"
"""Key of a scope: the ``Connection`` of the request."""

IS_COMPLETE = "multiworld.is_complete"
"""Key of a scope: present if the whole request has arrived."""


class Connection:
    """State of the connection of a request.

    Attributes:
        is_lost: The client has disconnected.
        on_lost: Functions that are called when the client disconnects.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self.on_lost: set[Callable[[], object]] = set()

    def lost(self) -> None:
        """Call the functions; the client has disconnected."""
        self.is_lost = True
        for call in list(self.on_lost):
            call()


class AnyRequest(Protocol):
    """The part of Starlette's requests that ``HttpRequest`` has, too."""

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
    """A request whose headers are decoded once.

    Args:
        scope: The ASGI scope.
        receive: ASGI's function that returns the next event.

    Attributes:
        scope: The ASGI scope.
        receive: ASGI's function that returns the next event.
        headers: The headers; of several with one name, the first.
    """

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
