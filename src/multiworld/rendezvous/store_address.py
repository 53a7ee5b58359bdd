"""Where a store is: ``tcp://host:port`` (or several), or ``memory://name``. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from multiworld.errors import ConfigError

RULE = (
    "'tcp://HOST:PORT', several of them with commas between (the first that answers is "
    "used), or 'memory://NAME' inside one process"
)

MAX_STORES = 8


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A parsed address of one store. ``port`` is 0 for a memory store.

    Attributes:
        place: Its number among several that serve the same worlds, and how many there
            are. Each gives out epochs of its own, so no two ever give the same.
    """

    scheme: str
    host: str
    port: int = 0
    place: tuple[int, int] = (0, 1)

    def __str__(self) -> str:
        if self.scheme == "memory":
            return f"memory://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """True for a store inside this process."""
        return self.scheme == "memory"


@dataclass(frozen=True, slots=True)
class StoreAddresses:
    """The stores where a world may meet, in the order of preference; at least one."""

    stores: tuple[StoreAddress, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.stores))

    @property
    def is_local(self) -> bool:
        """True for a store inside this process."""
        return self.stores[0].is_local


def parse_store(text: str) -> StoreAddresses:
    """Read one or more store addresses.

    Raises:
        ConfigError: It is none; the message shows the forms.
    """
    if not isinstance(text, str):
        raise ConfigError("store", text, RULE)
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_STORES or len(set(parts)) < len(parts):
        raise ConfigError("store", text, f"at most {MAX_STORES} different addresses")
    places = [(number, len(parts)) for number in range(len(parts))]
    stores = tuple(
        _parse_one(part, place, text) for part, place in zip(parts, places, strict=True)
    )
    if len(stores) > 1 and any(store.is_local for store in stores):
        raise ConfigError("store", text, RULE)
    return StoreAddresses(stores)


def _parse_one(part: str, place: tuple[int, int], text: str) -> StoreAddress:
    try:
        url = urlsplit(part)
        port = url.port
    except ValueError as error:
        raise ConfigError("store", text, RULE) from error
    if url.scheme == "memory" and url.netloc:
        return StoreAddress("memory", url.netloc)
    if url.scheme != "tcp" or not url.hostname or not port:
        raise ConfigError("store", text, RULE)
    return StoreAddress("tcp", url.hostname, port, place)
